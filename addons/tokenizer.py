"""A tokenizer that reads a long text once."""

from functools import lru_cache
from typing import Any

_SHORT = 256
"""Characters. Shorter texts are tokenised faster than they are worth keeping."""
_TEXTS = 512
"""Long texts that are kept: system prompts and tools, which sessions share."""


class CachingTokenizer:
    """The part of a `transformers` tokenizer that `renderers` uses to render, parse and bridge.

    It cannot be called, so that renderers leave the character offsets of each token out, which nobody here reads.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cached = lru_cache(maxsize=_TEXTS)(self._encode)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`."""
        if len(text) < _SHORT:
            return list(self._encode(text, add_special_tokens))
        return list(self._cached(text, add_special_tokens))

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
