"""Text deltas of a growing reply, for streaming."""

import re
from collections.abc import Sequence

from rolltap.addons.dialects.types import Reply

_LONGEST_TAG = 33
"""Characters. A `<` further than this from the end of the text is not taken for the beginning of a tag."""
_OPEN_TAG = re.compile(r"<[^<>\n]*\Z")
LOOSE = "".join(c for c in map(chr, range(0x3001)) if c.isspace()) + "\ufffd"
"""White space and U+FFFD."""


class TextDeltas:
    """Text deltas of a reply that grows: by parsing it again (`feed`), or by the text of new tokens (`grow`).

    Sent text cannot be taken back. A later parse may contradict it: a `</think>` without an opening tag, for instance,
    turns text into reasoning. `finish` then replaces the reply's text by the text that was sent. Text that may be the
    beginning of one of `stop_texts` is held back: as in vLLM, one character less than the longest of them.
    """

    def __init__(self, stop_texts: Sequence[str] = ()) -> None:
        self._stop_texts = stop_texts
        self._held = _held_back(stop_texts)
        self.stopped = False
        """True after a stop text: the reply has ended."""
        self._sent_reasoning = ""
        self._sent_content = ""
        self._rest = ""
        """The text of the growing field that is not sent yet."""

    def feed(self, reply: Reply) -> tuple[str, str]:
        """Return the new reasoning and the new content of a partial reply, without text that may still change.

        Content ends the reasoning: all of it is returned when content begins, and none after the first content.
        """
        begun = bool(reply.content)
        cut_at_stop(reply, self._stop_texts, partial=True)
        self.stopped = reply.stop is not None
        reasoning = reply.reasoning if begun else settled(reply.reasoning)
        return self._send(reasoning, settled(reply.content))

    def expect(self, field: str, text: str) -> bool:
        """Prepare `grow`: `field` is `text` so far, and grows. Returns False when what was sent says otherwise."""
        sent = self._sent_content if field == "content" else self._sent_reasoning
        if not text.startswith(sent) or (field == "reasoning" and self._sent_content):
            return False
        self._rest = text[len(sent) :]
        return True

    def grow(self, field: str, text: str) -> tuple[str, str]:
        """Return the new reasoning and the new content when `text` is appended to the expected `field`.

        O(length of `text` and of what is held back).
        """
        self._rest += text
        if self.stopped or not (self._held or text.strip(LOOSE)):
            return "", ""
        stop = find_stop(self._rest, self._stop_texts)
        if stop is not None:
            self.stopped = True
            new = self._rest[: stop[0]]
        else:
            new = settled(self._rest[: max(0, len(self._rest) - self._held)])
            self._rest = self._rest[len(new) :]
        if field == "content":
            self._sent_content += new
            return "", new
        self._sent_reasoning += new
        return new, ""

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
    With `partial`, the end that may be the beginning of a stop text is removed too: the next tokens may complete it.
    """
    for field in ("reasoning", "content"):
        text: str = getattr(reply, field)
        found = find_stop(text, stop_texts)
        if found:
            setattr(reply, field, text[: found[0]])
            reply.stop, reply.tool_calls = found[1], []
            if field == "reasoning":
                reply.content = ""
            return
        if partial and (field == "content" or not reply.content):  # content ends the reasoning
            setattr(reply, field, text[: max(0, len(text) - _held_back(stop_texts))])


def find_stop(text: str, stop_texts: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of the first stop text in `text`, and the stop text; None without one."""
    places = ((text.find(stop), stop) for stop in stop_texts)
    return min((found for found in places if found[0] >= 0), default=None)


def _held_back(stop_texts: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin a stop text."""
    return max((len(stop) - 1 for stop in stop_texts), default=0)


def settled(text: str) -> str:
    """Return `text` without the suffix that the next token may change.

    The suffix is made of white space, which parsers strip before a tool call; U+FFFD, which stands for a character
    whose bytes are incomplete; and the beginning of a tag. O(length of the suffix).
    """
    text = text.rstrip(LOOSE)
    tag = _OPEN_TAG.search(text, max(0, len(text) - _LONGEST_TAG))
    return text[: tag.start()].rstrip(LOOSE) if tag else text
