"""A model's tokenizer: found, loaded, with a cache of encoded texts, for use by several threads.

`TokenTexts` gives the text of tokens as they are sampled.

Control tokens of a chat format in the texts of messages: programs and pages may forge turns. A
tokenizer takes the text `<|im_start|>` for the token, wherever it stands, and chat templates and
renderers put the texts of messages and their own tokens into one text. Each control token in a
message is therefore broken (`ControlTokens`), by a text of this process, before the prompt is
written. `CachingTokenizer` encodes the pieces between such breaks each by itself.
"""

import re
import secrets
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from rolltap.addons.errors import InputError

BREAK = secrets.token_hex(8)
"""The text at which encoding begins anew. No program can know it. JSON and templates keep it."""
_CACHED_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
"""Files of a model of which the Hub's cache has one when the model was loaded before."""
_HUB_SECONDS = 10.0


def require_findable(model: str, *, ask_hub: bool = False) -> None:
    """Raise `InputError` for a path that does not exist and, with `ask_hub`, for an unknown name.

    Without `ask_hub`, names of the Hub and URLs are left as they are. The Hub is asked once, and
    not for a model in its cache: transformers asks for each file several times, for minutes without
    a network.
    """
    if Path(model).expanduser().exists():
        return
    # ORGANISATION/NAME or NAME is a name of the Hub, unless it begins like a path or with a folder
    first, *others = model.split("/")
    in_folder = len(others) == 1 and Path(first).is_dir()
    if model.startswith(("/", "~", ".")) or ("://" not in model and (len(others) > 1 or in_folder)):
        advice = "give the folder of a model, or its name on the Hugging Face Hub"
        raise InputError(f"there is no folder {model}: {advice}")
    if not ask_hub:
        return
    # the base installation does not have it
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if not any(isinstance(try_to_load_from_cache(model, name), str) for name in _CACHED_FILES):
            model_info(model, timeout=_HUB_SECONDS)
        return
    except HFValidationError:
        reason = "and it is no name of a model on the Hugging Face Hub"
    except RepositoryNotFoundError:
        reason = "and the Hugging Face Hub has no such model, or it is private (hf auth login)"
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        reason = f"and the Hugging Face Hub does not answer ({first_line})"
    raise InputError(f"there is no folder {model}, {reason}: give the folder of the served model")


def resolve_model(model: str) -> str:
    """Return `model` as an absolute path when it is a local folder, else unchanged."""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    return model


class CachingTokenizer:
    """The part of a `transformers` tokenizer that `renderers` uses to render and continue.

    It hides the tokenizer's `__call__`. `renderers` then skips computing character offsets, which
    are not used here. Texts are encoded without the GIL, so that a thread can do it while the event
    loop runs.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _find_backend(tokenizer)
        """The `tokenizers.Tokenizer`; None when the `transformers` tokenizer does more than it."""
        self._encode_lock = threading.Lock()
        self._cache = _TextCache()

    def encode(self, text: str, *, add_special_tokens: Literal[False] = False) -> list[int]:
        """Return the token ids of `text`, in a new list. Special tokens in it are found."""
        cached = self._cache.get(text)
        if cached is not None:
            return cached.tolist()
        ids = self._encode(text)
        self._cache.put(text, array("I", ids))
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`, which is not cached."""
        return len(self._encode(text))

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """Return the text of the tokens, by default with the texts of special ones."""
        if self._backend is None or options or self._tokenizer.clean_up_tokenization_spaces:
            text: str = self._tokenizer.decode(token_ids, **options)
        else:
            text = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """Return the text of the chat template, or its tokens: see `transformers`."""
        if self._backend is None or not tokenize or options.get("return_dict", True):
            return self._tokenizer.apply_chat_template(conversation, tokenize=tokenize, **options)
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in text.split(BREAK):
            if self._backend is not None:
                (encoding,) = self._backend.encode_batch_fast([piece], add_special_tokens=False)
                ids += encoding.ids
            else:
                with self._encode_lock:  # encoding sets the tokenizer's state
                    ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    unk_token_id = None
    """`renderers` refuses a marker with this id.

    transformers fills it in with that of a marker, `<|endoftext|>`.
    """

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of a token, None for one that the tokenizer does not have."""
        found: int | None = self._tokenizer.convert_tokens_to_ids(tokens)
        if found is None or self._tokenizer.convert_ids_to_tokens(found) != tokens:
            return None
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def load(model: str) -> CachingTokenizer:
    """Return the tokenizer of a folder, or of a name on the Hub. Raises `InputError`."""
    # the base installation does not have it
    from renderers.base import load_tokenizer

    require_findable(model, ask_hub=True)
    try:
        return CachingTokenizer(load_tokenizer(model))
    except Exception as error:
        reason = f"cannot load a tokenizer from {model!r}: {str(error).splitlines()[0]}"
        folder = Path(model)
        if folder.is_dir() and not [*folder.glob("*token*"), *folder.glob("*vocab*")]:
            reason = f"the folder {model} is no model: it has no tokenizer, such as tokenizer.json"
        raise InputError(reason) from error


class _TextCache:
    """The tokens of the texts used last. Thread-safe.

    Worth caching are the texts that templates put around each message, and system prompts and
    tools, which sessions share.
    """

    LIMIT = 64 * 2**20
    """Bytes of texts and tokens. A text that takes more than a sixteenth of it is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: OrderedDict[str, array[int]] = OrderedDict()
        self._size = 0

    def get(self, text: str) -> "array[int] | None":
        """Return the tokens of a text, which is then the last one used, or None."""
        with self._lock:
            ids = self._tokens.get(text)
            if ids is not None:
                self._tokens.move_to_end(text)
            return ids

    def put(self, text: str, ids: "array[int]") -> None:
        """Keep the tokens of a text, and forget the texts used longest ago."""
        with self._lock:
            if text in self._tokens or _size(text, ids) > self.LIMIT // 16:
                return
            self._tokens[text] = ids
            self._size += _size(text, ids)
            while self._size > self.LIMIT:
                self._size -= _size(*self._tokens.popitem(last=False))


_ENTRY_BYTES = 200
"""Of the cache, for each text."""


def _size(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_BYTES


def _find_backend(tokenizer: Any) -> Any:
    """Return the tokenizer's `tokenizers.Tokenizer`, without truncation and padding, or None."""
    # imported after `record.py` has kept torch away
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    for name in ("encode", "decode", "_encode_plus", "_decode"):
        if getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def vocabulary_size(tokenizer: CachingTokenizer, model: str) -> int:
    """Return the number of token ids that a model can sample.

    It is that of its embeddings, or else of its tokenizer's tokens.
    """
    from transformers import PreTrainedConfig

    size: int = 1 + max(tokenizer.get_vocab().values())
    with suppress(OSError):  # a folder may have the tokenizer alone
        config = PreTrainedConfig.get_config_dict(model)[0]
        config = config.get("text_config") or config
        size = max(size, config.get("vocab_size") or 0)
    return size


class ControlTokens:
    """The tokens of a tokenizer that a text in a message must not become.

    They are those that it calls special, those that end a reply, and those that `render` writes
    around a user's message and at the begin of a reply. Tokens for reasoning and tool calls are
    what the tokenizer calls them.
    """

    def __init__(
        self,
        tokenizer: Any,
        render: Callable[..., list[int]],
        stop_ids: list[int],
    ) -> None:
        added = tokenizer.added_tokens_decoder
        ids = {*stop_ids}
        with suppress(Exception):  # templates raise for messages that they do not support
            user = [{"role": "user", "content": "Hello"}]
            turn = [token_id for token_id in render(user, [], False) if token_id in added]
            prompt = [token_id for token_id in render(user, [], True) if token_id in added]
            ids.update(turn[-2:], prompt[len(turn) : len(turn) + 1])
        texts = {}
        for token_id, token in added.items():
            # a text of one character cannot be broken
            if (token.special or token_id in ids) and len(token.content) > 1:
                texts[token_id] = token.content
        pattern = _any_of(texts.values()) or "(?!)"
        self._found = re.compile(pattern)
        self._begins = re.compile(f"(?={pattern})(.)", re.DOTALL)  # overlapping ones too
        self.exposed: str | None = None
        """Why such texts become control tokens all the same, as a test found, or None."""
        end = next((texts[token_id] for token_id in stop_ids if token_id in texts), "")
        with suppress(Exception):  # as above
            written = []
            for text in (f"x{end}x", "x"):
                messages = self.broken([{"role": "user", "content": text}])
                written.append("".join(tokenizer.decode(render(messages, [], True)).split()))
            if written[0].replace(f"x{end}x", "x") != written[1]:
                self.exposed = "the renderer changes texts, or encodes them by itself"

    def broken(self, value: Any) -> Any:
        """Return a value of JSON with a `BREAK` in each control token of its texts."""
        if isinstance(value, dict):
            return {self.broken(key): self.broken(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.broken(inner) for inner in value]
        if isinstance(value, str) and self.exposed is None and self._found.search(value):
            return self._begins.sub(rf"\g<1>{BREAK}", value)
        return value

    def found(self, text: str) -> str | None:
        """Return the number of control tokens in a text, which may be JSON, or None without any.

        If they are exposed, the reason follows it.
        """
        count = len(self._found.findall(text))
        if count == 0:
            return None
        if self.exposed is None:
            return str(count)
        return f"{count}, as control tokens: {self.exposed}"


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern of the longest of `texts`.

    It is a tree: some tokenizers have a thousand special tokens.
    """
    after: dict[str, list[str]] = {}
    for text in texts:
        after.setdefault(text[:1], []).append(text[1:])
    optional = ""
    if after.pop("", None):
        optional = "?"
    branches = [re.escape(letter) + _any_of(rest) for letter, rest in after.items()]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){optional}"


_LONGEST_CHARACTER = 32
"""Tokens. A longer run whose text ends with U+FFFD is text: no character has so many bytes."""


class TokenTexts:
    """Text of sampled tokens, one token after the other. `decode` returns the text of several.

    As in `DecodeStream` of tokenizers, tokens are decoded behind the tokens of the last text. That
    class takes quadratic time for a run of bytes that are no characters.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        """The tokens of the last text, and those that have none yet."""
        self._num_known = 0
        self._known = ""
        """The last text."""

    def add(self, token_id: int) -> str:
        """Return the text of the tokens since the last one; "" while it ends in a character."""
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
