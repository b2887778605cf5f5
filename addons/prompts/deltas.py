"""Text of a growing reply as it becomes certain, for streaming."""

import re
from collections.abc import Sequence

from rolltap.addons.dialects.types import Reply

_LONGEST_TAG = 33
_OPEN_TAG = re.compile(r"<[^<>\n]*\Z")


class TextDeltas:
    """Chooses the text to send next of a reply that is parsed again and again while it grows.

    What was sent stays sent: `finish` makes the reply's text what the harness has seen, should the last parse have
    read the tokens differently (a `</think>` without an opening tag turns text into reasoning, for instance).
    """

    def __init__(self) -> None:
        self._reasoning = ""
        self._content = ""

    def feed(self, reply: Reply) -> tuple[str, str]:
        """New reasoning and new content of a partial reply."""
        return self._send(_settled(reply.reasoning), _settled(reply.content))

    def finish(self, reply: Reply) -> tuple[str, str]:
        """The rest of the text of the complete reply."""
        sent = self._send(reply.reasoning, reply.content)
        reply.reasoning, reply.content = self._reasoning, self._content
        return sent

    def _send(self, reasoning: str, content: str) -> tuple[str, str]:
        new_reasoning = reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else ""
        new_content = content[len(self._content) :] if content.startswith(self._content) else ""
        self._reasoning += new_reasoning
        self._content += new_content
        return new_reasoning, new_content


def cut_at_stop(reply: Reply, stops: Sequence[str], *, partial: bool) -> None:
    """End a reply before the first of the `stops` in its text. Of a `partial` reply, what may become one is left out
    as well."""
    for field in ("reasoning", "content"):
        text: str = getattr(reply, field)
        found = min(((text.index(stop), stop) for stop in stops if stop in text), default=None)
        if found:
            setattr(reply, field, text[: found[0]])
            reply.stop, reply.tool_calls = found[1], []
            if field == "reasoning":
                reply.content = ""
            return
        if partial:
            setattr(reply, field, text[: len(text) - _overlap(text, stops)])


def _overlap(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` begin one of the `stops`."""
    lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def _settled(text: str) -> str:
    """`text` without what the next token may still change at its end: white space, which parsers strip before a tool
    call; a character whose bytes are not all there (decoded as U+FFFD); and what may become a tag."""
    end = len(text)
    while end:
        if text[end - 1].isspace() or text[end - 1] == "\ufffd":
            end -= 1
        elif tag := _OPEN_TAG.search(text, max(0, end - _LONGEST_TAG), end):
            end = tag.start()
        else:
            break
    return text[:end]
