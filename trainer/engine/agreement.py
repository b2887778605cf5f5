"""Agreement."""

from typing import Any

LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


def fixed_ids(tokenizer: Any) -> list[int]:
    return list(tokenizer("The quick brown fox jumps over the lazy dog.", add_special_tokens=False)["input_ids"])
