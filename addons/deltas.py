"""Text of a growing reply as it becomes certain, for streaming."""

import re

from rolltap.addons.dialects.model_call import Reply

_UNSETTLED = re.compile(r"(\s|\ufffd|<[^<>\n]{0,32})+\Z")
"""What the next token may still change: trailing white space, which parsers strip before a tool call; a character
whose bytes are not all there (decoded as U+FFFD); and what may become a tag."""


class TextDeltas:
    """What to send next of a reply that is parsed again and again while it grows.

    What was sent stays sent: `finish` makes the reply's text what the harness has seen, should the last parse have
    read the tokens differently (a `</think>` without an opening tag turns text into reasoning, for instance).
    """

    def __init__(self) -> None:
        self._reasoning = ""
        self._content = ""

    def feed(self, reply: Reply) -> tuple[str, str]:
        """New reasoning and new content of a partial reply."""
        return self._send(_UNSETTLED.sub("", reply.reasoning), _UNSETTLED.sub("", reply.content))

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
