"""Text deltas of a growing reply, for streaming."""

import re
from collections.abc import Sequence

from rolltap.addons.dialects.types import Reply

_LONGEST_TAG = 33
"""Characters. A `<` further than this from the end of the text is not taken for the beginning of a tag."""
_OPEN_TAG = re.compile(r"<[^<>\n]*\Z")


class TextDeltas:
    """Text deltas of a reply that is parsed again and again while it grows.

    Sent text cannot be taken back. A later parse may contradict it: a `</think>` without an opening tag, for instance,
    turns text into reasoning. `finish` then replaces the reply's text by the text that was sent.
    """

    def __init__(self) -> None:
        self._sent_reasoning = ""
        self._sent_content = ""

    def feed(self, reply: Reply) -> tuple[str, str]:
        """Return the new reasoning and the new content of a partial reply, without text that may still change.

        Content ends the reasoning: all of it is returned with the first content, and none afterwards.
        """
        reasoning = reply.reasoning if reply.content else _settled(reply.reasoning)
        return self._send(reasoning, _settled(reply.content))

    def finish(self, reply: Reply) -> tuple[str, str]:
        """Return the rest of the complete reply's text, and set the reply's text to all that was sent."""
        sent = self._send(reply.reasoning, reply.content)
        reply.reasoning, reply.content = self._sent_reasoning, self._sent_content
        return sent

    def _send(self, reasoning: str, content: str) -> tuple[str, str]:
        grown = reasoning.startswith(self._sent_reasoning) and not self._sent_content
        new_reasoning = reasoning[len(self._sent_reasoning) :] if grown else ""
        new_content = content[len(self._sent_content) :] if content.startswith(self._sent_content) else ""
        self._sent_reasoning += new_reasoning
        self._sent_content += new_content
        return new_reasoning, new_content


def cut_at_stop(reply: Reply, stop_texts: Sequence[str], *, partial: bool) -> None:
    """Truncate `reply` before the first stop text, in place.

    Its tool calls are dropped, and its content too when the stop text is in the reasoning.
    With `partial`, a suffix that is a proper prefix of a stop text is removed too: the next tokens may complete it.
    """
    for field in ("reasoning", "content"):
        text: str = getattr(reply, field)
        found = min(((text.index(stop), stop) for stop in stop_texts if stop in text), default=None)
        if found:
            setattr(reply, field, text[: found[0]])
            reply.stop, reply.tool_calls = found[1], []
            if field == "reasoning":
                reply.content = ""
            return
        if partial:
            setattr(reply, field, text[: len(text) - _overlap(text, stop_texts)])


def _overlap(text: str, stop_texts: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a stop text."""
    lengths = (n for stop in stop_texts for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def _settled(text: str) -> str:
    """Return `text` without the suffix that the next token may change.

    The suffix is made of white space, which parsers strip before a tool call; U+FFFD, which stands for a character
    whose bytes are incomplete; and the beginning of a tag.
    """
    end = len(text)
    while end:
        if text[end - 1].isspace() or text[end - 1] == "\ufffd":
            end -= 1
        elif tag := _OPEN_TAG.search(text, max(0, end - _LONGEST_TAG), end):
            end = tag.start()
        else:
            break
    return text[:end]
