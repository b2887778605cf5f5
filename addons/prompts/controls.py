"""Control tokens of a chat format in the texts of messages: a program, or a page that a tool reads, may forge turns.

A tokenizer takes the text `<|im_start|>` for the token, wherever it stands, and chat templates and renderers put the
texts of messages and their own tokens into one text. Each control token in a message is therefore broken, by a text of
this process, before the prompt is written. `CachingTokenizer` encodes the pieces between such breaks each by itself.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from rolltap.addons.dialects.model_call import Message, Tool, assistant_message, message_tool_call
from rolltap.addons.dialects.tools import function_tool

T = TypeVar("T")
Render = Callable[[list[Message], list[Tool], bool], list[int]]
"""Returns the token ids of messages and tools, and with True those of the generation prompt."""

BREAK = secrets.token_hex(8)
"""The text at which encoding begins anew. No program can know it, so that no message has it. JSON and templates keep
it."""


class ControlTokens:
    """The tokens of a tokenizer that a text in a message must not become.

    They are those that it calls special, those that end a reply, and those that `render` writes around a user's message
    and at the begin of a reply: some tokenizers call these ordinary. Tokens for reasoning and tool calls are what the
    tokenizer calls them.
    """

    def __init__(self, tokenizer: Any, render: Render, stop_ids: list[int]) -> None:
        added = tokenizer.added_tokens_decoder
        ids = {i for i, token in added.items() if token.special} | {*stop_ids}
        with suppress(Exception):  # templates raise for messages that they do not support
            asked: list[Message] = [{"role": "user", "content": "Hello"}]
            turn, prompt = ([i for i in render(asked, [], end) if i in added] for end in (False, True))
            ids |= {*turn[-2:], *prompt[len(turn) :][:1]}
        # a text of one character cannot be broken
        texts = {i: added[i].content for i in ids if i in added and len(added[i].content) > 1}
        found = "|".join(map(re.escape, sorted(texts.values(), key=len, reverse=True))) or "(?!)"
        self._found = re.compile(found)
        self._begins = re.compile(f"(?={found})(.)", re.DOTALL)  # overlapping ones too
        self._tokenizer, self._texts, self._stop_ids = tokenizer, texts, stop_ids
        self.exposed: str | None = None
        """Why these texts become control tokens all the same; None when they do not."""

    def broken(self, value: T) -> T:
        """Return a value of JSON with a `BREAK` in each control token of its texts."""
        changed: Any = value
        if self.exposed is not None:
            return value
        if isinstance(value, str):
            changed = self._begins.sub(rf"\g<1>{BREAK}", value) if self._found.search(value) else value
        elif isinstance(value, dict):
            changed = {self.broken(key): self.broken(inner) for key, inner in value.items()}
        elif isinstance(value, list):
            changed = [self.broken(inner) for inner in value]
        return changed  # type: ignore[no-any-return]

    def found(self, value: Any) -> str | None:
        """Return the number of control tokens in the texts of a value, and why they are exposed; None without any."""
        count = len(self._found.findall(json.dumps(value, ensure_ascii=False)))
        why = "" if self.exposed is None else f", as control tokens: {self.exposed}"
        return f"{count}{why}" if count else None

    def test(self, render: Render) -> None:
        """Find out whether `render`, which is given broken texts, keeps them texts: see `exposed`."""
        text = f"x{next((self._texts[i] for i in self._stop_ids if i in self._texts), '')}x"
        for forged, plain in zip(_conversations(text), _conversations("x"), strict=True):
            try:
                prompts = render(*forged, True), render(*plain, True)
            except Exception:
                continue  # as above
            written, expected = ("".join(self._tokenizer.decode(ids).split()) for ids in prompts)
            found, own = (sum(i in self._texts for i in ids) for ids in prompts)
            if (written.replace(text, "x"), found) != (expected, own):
                self.exposed = "the renderer changes texts, or encodes them by itself"


def _conversations(text: str) -> Iterator[tuple[list[Message], list[Tool]]]:
    """Yield conversations with a text in the places that come from the wire."""
    asked: Message = {"role": "user", "content": text}
    yield [asked], []
    result: Message = {"role": "tool", "content": text, "tool_call_id": "c0", "name": "look"}
    call = message_tool_call("c0", "look", {"at": text})
    yield [asked, assistant_message("", "", [call]), result], [function_tool("look", text, {"type": "object"})]
