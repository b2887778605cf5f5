"""A tokenizer that reads a text once."""

from functools import lru_cache
from typing import Any

_SHORT = 256
"""Characters. Many short texts are kept: a template writes the same few around every message."""
_SHORT_TEXTS, _LONG_TEXTS = 8192, 512
"""How many are kept. The long ones are system prompts and tools, which sessions share."""


class CachingTokenizer:
    """The part of a `transformers` tokenizer that `renderers` uses to render, parse and bridge.

    It cannot be called, so that renderers leave the character offsets of each token out, which nobody here reads.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._short = lru_cache(maxsize=_SHORT_TEXTS)(self._encode)
        self._long = lru_cache(maxsize=_LONG_TEXTS)(self._encode)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`."""
        return list((self._short if len(text) < _SHORT else self._long)(text, add_special_tokens))

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
