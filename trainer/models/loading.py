"""Loading."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

Dtype = Literal["bfloat16", "float16", "float32"]


def load_policy(folder: Path, dtype: Dtype, **init: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, dtype), **init)


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


def meta_policy(folder: Path, dtype: Dtype) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))


def frozen_modules(model: Any) -> list[str]:
    return []
