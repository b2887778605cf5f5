"""Control tokens of a chat format in the texts of messages: programs and pages may forge turns.

A tokenizer takes the text `<|im_start|>` for the token, wherever it stands, and chat templates and
renderers put the texts of messages and their own tokens into one text. Each control token in a
message is therefore broken, by a text of this process, before the prompt is written.
`CachingTokenizer` encodes the pieces between such breaks each by itself.
"""

import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

BREAK = secrets.token_hex(8)
"""The text at which encoding begins anew. No program can know it. JSON and templates keep it."""


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
