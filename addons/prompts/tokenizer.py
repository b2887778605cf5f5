"""A tokenizer with a cache of encoded texts, for use by several threads; and the markup in what it decodes.

Markup is all that a renderer may read as more than plain text. Renderers find reasoning and tool calls by added tokens
(`<|channel|>`, `<tool_call>`), or by text where a tokenizer has no such token: `</think>`, and DeepSeek's tags, which
hold a U+FF5C. The plain text of a chat template's reply loses the texts of added tokens too.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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


_TEXTS = ["</?think>", "\uff5c", "</?tool_call>", "<function=", "<atem:", r"<\|"]


class Markup:
    """The added tokens of a tokenizer, by id and by text."""

    def __init__(self, tokenizer: CachingTokenizer) -> None:
        self._tokenizer = tokenizer
        added: Mapping[str, int] = tokenizer.get_added_vocab()
        texts = sorted((text for text in added if text.strip()), key=len, reverse=True)  # some are white space
        self._ids = frozenset(added[text] for text in texts)
        self._pattern = re.compile("|".join([*map(re.escape, texts), *_TEXTS]))
        self.longest = max(map(len, [*texts, *_TEXTS]))
        """The length of the longest text of an added token in characters."""

    def in_tokens(self, token_ids: Sequence[int]) -> bool:
        """Return whether one of the tokens is an added one."""
        return not self._ids.isdisjoint(token_ids)

    def in_text(self, text: str) -> bool:
        """Return whether the text holds markup."""
        return self._pattern.search(text) is not None

    def around_last(self, token_ids: list[int]) -> tuple[str, str]:
        """Return the texts before and after the last markup. Without markup, all text is after it.

        The text before is cut to a length in tokens of that after it, and some more.
        """
        start = next((n for n in range(len(token_ids), 0, -1) if token_ids[n - 1] in self._ids), 0)
        after = self.decode(token_ids[start:])
        places = [place.span() for place in self._pattern.finditer(after)]
        if places:
            begin, end = places[-1]
            return after[:begin], after[end:]
        return self.decode(token_ids[max(0, 2 * start - len(token_ids) - 8) : max(0, start - 1)]), after

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens, with the texts of special ones."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
