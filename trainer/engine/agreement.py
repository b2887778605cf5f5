"""The agreement of an engine with the trainer: a fixed text, scored by both with the weights that both should have."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes a second to import

FIXED_TEXT = """\
The lighthouse keeper wrote down the weather every morning at six: the direction of the wind, the height of the waves,
and how far he could see across the bay. On clear days he counted 14 islands; in fog he counted none. "A number that
nobody checks", he used to say, "is only a wish." So each evening his daughter climbed the 212 steps, looked at the
same sea, and wrote a second column beside his. When the two columns agreed they drank tea. When they did not, they
went outside together and looked again, because one of them had to be wrong, and the sea never was.

def agree(first: list[float], second: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(first, second)) < 0.001
"""
"""English prose, quoted speech, numbers and a line of code: 150 to 250 tokens of today's tokenizers."""

LIMITS: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05})
"""Type of the weights -> largest mean difference in nats that is agreement. Provisional: tiny models on CPU were below
1e-4 in float32 and below 2e-3 in bfloat16; larger models, float16 and GPUs were not measured."""


def fixed_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the token ids of the fixed text, without special tokens."""
    return list(tokenizer.encode(FIXED_TEXT, add_special_tokens=False))


def mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the mean absolute difference of two equally long rows of log-probabilities, in nats.

    It is infinite when a number is not finite, so that no comparison takes it for agreement. Raises `ValueError` for
    rows that are empty or differ in length.
    """
    if not first:
        raise ValueError("there is nothing to compare")
    mean = fmean(abs(a - b) for a, b in zip(first, second, strict=True))
    return mean if isfinite(mean) else float("inf")
