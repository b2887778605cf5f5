"""A tokenizer with a cache of encoded texts, for use by several threads; and the text of tokens as they are sampled."""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from rolltap.addons.prompts.controls import BREAK

_SHORT = 256
"""Texts below this number of characters have a cache of their own: templates put the same few around each message."""
_SHORT_TEXTS = 8192
_LONG_BYTES = 64 * 2**20
"""Size of the cache of long texts in bytes. Those worth caching are system prompts and tools, which sessions share."""
_LARGEST_SHARE = 16
"""A text that takes more than this part of the cache is not kept."""
_LONG_DECODE = 256
"""Tokens from which a text is decoded without the GIL. Decoding them takes longer than handing over the GIL."""


class CachingTokenizer:
    """The part of a `transformers` tokenizer that `renderers` uses to render, parse and continue.

    It hides the tokenizer's `__call__`. `renderers` then skips computing character offsets, which are not used here.
    Long texts are encoded and decoded without the GIL, so that a thread can do it while the event loop runs.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _find_backend(tokenizer)
        """The `tokenizers.Tokenizer`, or None when the `transformers` tokenizer does more than to call it."""
        self._encode_lock = threading.Lock()
        self._encode_short = lru_cache(maxsize=_SHORT_TEXTS)(self._encode)
        self._long_texts = _TextCache(_LONG_BYTES)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text` in a new list. Special tokens are not added by default."""
        if len(text) < _SHORT:
            return list(self._encode_short(text, add_special_tokens))
        kept = self._long_texts.get((text, add_special_tokens))
        if kept is not None:
            return kept.tolist()
        ids = self._encode(text, add_special_tokens)
        self._long_texts.put((text, add_special_tokens), array("I", ids))
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`, which is not kept."""
        return len(self._encode(text, False))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """Return the text of the tokens."""
        if self._backend is None or options or self._tokenizer.clean_up_tokenization_spaces:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        elif len(token_ids) < _LONG_DECODE:
            text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = True, **options: Any) -> Any:
        """Return the text of the chat template, or its tokens: see `transformers`."""
        if self._backend is None or not tokenize or options.get("return_dict", True):
            return self._tokenizer.apply_chat_template(conversation, tokenize=tokenize, **options)
        return self._encode(self._tokenizer.apply_chat_template(conversation, tokenize=False, **options), False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if BREAK in text:
            return [i for piece in text.split(BREAK) for i in self._encode(piece, add_special_tokens)]
        if self._backend is not None:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
            return ids
        with self._encode_lock:  # encoding sets the tokenizer's state
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    unk_token_id = None
    """`renderers` refuses a marker with this id. transformers fills it in with that of a marker, `<|endoftext|>`."""

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of a token, None for one that the tokenizer does not have."""
        found: int | None = self._tokenizer.convert_tokens_to_ids(tokens)
        return None if found is None or self._tokenizer.convert_ids_to_tokens(found) != tokens else found

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


class _TextCache:
    """The tokens of the texts used last, up to `limit` bytes of texts and tokens. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._tokens: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._size = 0

    def get(self, key: tuple[str, bool]) -> "array[int] | None":
        """Return the tokens of a text, which is then the last one used, or None."""
        with self._lock:
            ids = self._tokens.get(key)
            if ids is not None:
                self._tokens.move_to_end(key)
            return ids

    def put(self, key: tuple[str, bool], ids: "array[int]") -> None:
        """Keep the tokens of a text that is not very long, and forget the texts used longest ago."""
        with self._lock:
            if key in self._tokens or _size(key, ids) > self._limit // _LARGEST_SHARE:
                return
            self._tokens[key] = ids
            self._size += _size(key, ids)
            while self._size > self._limit:
                self._size -= _size(*self._tokens.popitem(last=False))


def _size(key: tuple[str, bool], ids: "array[int]") -> int:
    return sys.getsizeof(key[0]) + sys.getsizeof(ids)


def _find_backend(tokenizer: Any) -> Any:
    """Return the tokenizer's `tokenizers.Tokenizer`, set to encode without truncation and padding, or None."""
    # imported after `record.py` has kept torch away
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = (PreTrainedTokenizerFast._encode_plus, PreTrainedTokenizerFast._decode)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or (kind._encode_plus, kind._decode) != own:
        return None
    if kind.encode is not PreTrainedTokenizerBase.encode or kind.decode is not PreTrainedTokenizerBase.decode:
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def vocabulary_size(tokenizer: CachingTokenizer, model: str) -> int:
    """Return the number of token ids that a model can sample: of its embeddings, or else of its tokenizer's tokens."""
    from transformers import PreTrainedConfig

    size: int = 1 + max(tokenizer.get_vocab().values())
    with suppress(OSError):  # a folder may have the tokenizer alone
        config = PreTrainedConfig.get_config_dict(model)[0]
        size = max(size, (config.get("text_config") or config).get("vocab_size") or 0)
    return size


_LONGEST_CHARACTER = 32
"""Tokens. A longer run whose text ends with U+FFFD is text: the bytes of no character are so long."""


class TokenTexts:
    """Text of sampled tokens, one token after the other. `decode` returns the text of several.

    As in `DecodeStream` of tokenizers, tokens are decoded behind the tokens of the last text. That class takes
    quadratic time for a run of bytes that are no characters.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        """The tokens of the last text, and those that have none yet."""
        self._num_known = 0
        self._known = ""
        """The last text."""

    def add(self, token_id: int) -> str:
        """Return the text of the tokens since the last text; "" while it ends within a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(self._window) - self._num_known
        if text.endswith("\ufffd") and waiting < _LONGEST_CHARACTER:
            return ""
        return self._move(text)

    def finish(self) -> str:
        """Return the text of the tokens that have none yet."""
        return self._move(self._decode(self._window))

    def _move(self, text: str) -> str:
        new = text[len(self._known) :]
        self._window = self._window[self._num_known :]
        self._num_known = len(self._window)
        self._known = self._decode(self._window)
        return new
