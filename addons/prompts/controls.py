"""Control tokens of a chat format in the texts of messages: a program, or a page that a tool reads, may forge turns.

A tokenizer takes the text `<|im_start|>` for the token, wherever it stands, and chat templates and renderers put the
texts of messages and their own tokens into one text. Each control token in a message is therefore broken, by a text of
this process, before the prompt is written. `CachingTokenizer` encodes the pieces between such breaks each by itself.
"""

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

BREAK = secrets.token_hex(8)
"""The text at which encoding begins anew. No program can know it. JSON and templates keep it."""


class ControlTokens:
    """The tokens of a tokenizer that a text in a message must not become.

    They are those that it calls special, those that end a reply, and those that `render` writes around a user's message
    and at the begin of a reply. Tokens for reasoning and tool calls are what the tokenizer calls them.
    """

    def __init__(self, tokenizer: Any, render: Callable[..., list[int]], stop_ids: list[int]) -> None:
        added = tokenizer.added_tokens_decoder
        ids = {i for i, token in added.items() if token.special} | {*stop_ids}
        with suppress(Exception):  # templates raise for messages that they do not support
            user = [{"role": "user", "content": "Hello"}]
            turn, prompt = ([i for i in render(user, [], end) if i in added] for end in (False, True))
            ids |= {*turn[-2:], *prompt[len(turn) :][:1]}
        # a text of one character cannot be broken
        texts = {i: added[i].content for i in ids if i in added and len(added[i].content) > 1}
        found = _any_of([*texts.values()]) or "(?!)"
        self._found = re.compile(found)
        self._begins = re.compile(f"(?={found})(.)", re.DOTALL)  # overlapping ones too
        self.exposed: str | None = None
        """Why these texts become control tokens all the same, found by a test; None when they do not."""
        end = next((texts[i] for i in stop_ids if i in texts), "")
        with suppress(Exception):  # as above
            asked = [self.broken([{"role": "user", "content": text}]) for text in (f"x{end}x", "x")]
            written, plain = ("".join(tokenizer.decode(render(each, [], True)).split()) for each in asked)
            if written.replace(f"x{end}x", "x") != plain:
                self.exposed = "the renderer changes texts, or encodes them by itself"

    def broken(self, value: Any) -> Any:
        """Return a value of JSON with a `BREAK` in each control token of its texts."""
        if isinstance(value, dict):
            return {self.broken(key): self.broken(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.broken(inner) for inner in value]
        if not isinstance(value, str) or self.exposed is not None or not self._found.search(value):
            return value
        return self._begins.sub(rf"\g<1>{BREAK}", value)

    def found(self, text: str) -> str | None:
        """Return the number of control tokens in a text, which may be JSON, and why they are exposed; None without."""
        count = len(self._found.findall(text))
        return ", as control tokens: ".join(filter(None, [str(count), self.exposed])) if count else None


def _any_of(texts: list[str]) -> str:
    """Return a pattern of the longest of `texts`. It is a tree: some tokenizers have a thousand special tokens."""
    after: dict[str, list[str]] = {}
    for text in texts:
        after.setdefault(text[:1], []).append(text[1:])
    optional = "?" if after.pop("", None) else ""
    branches = [re.escape(letter) + _any_of(rest) for letter, rest in after.items()]
    return f"(?:{'|'.join(branches)}){optional}" if branches else ""
