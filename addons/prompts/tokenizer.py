"""A tokenizer with a cache of encoded texts."""

from functools import lru_cache
from typing import Any

_SHORT = 256
"""Texts below this number of characters have a cache of their own: templates put the same few around each message."""
_SHORT_TEXTS, _LONG_TEXTS = 8192, 512
"""Cache sizes in texts. The long texts worth caching are system prompts and tools, which sessions share."""


class CachingTokenizer:
    """The part of a `transformers` tokenizer that `renderers` uses to render, parse and bridge.

    It hides the tokenizer's `__call__`. `renderers` then skips computing character offsets, which are not used here.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode_short = lru_cache(maxsize=_SHORT_TEXTS)(self._encode)
        self._encode_long = lru_cache(maxsize=_LONG_TEXTS)(self._encode)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text` in a new list. Special tokens are not added by default."""
        return list((self._encode_short if len(text) < _SHORT else self._encode_long)(text, add_special_tokens))

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
