"""A streamed reply of the Gemini API: server-sent events, or a JSON array."""

import json
from typing import Any
from urllib.parse import parse_qs

from rolltap.addons.dialects.google.reply import encode_error, last_parts, response, text_parts
from rolltap.addons.dialects.types import DialectError, Reply, ReplyContext, Usage, dump_json


def stream_encoder(context: ReplyContext) -> "EventStreamEncoder":
    """The encoder of a streamed reply: server-sent events if the query asks for them, else a JSON array."""
    query = parse_qs(context.target.partition("?")[2])
    wanted = query.get("alt", query.get("$alt"))
    return EventStreamEncoder(context) if wanted == ["sse"] else ArrayStreamEncoder(context)


class EventStreamEncoder:
    """Server-sent events of one streamed reply."""

    content_type = "text/event-stream"

    def __init__(self, context: ReplyContext) -> None:
        self._context = context

    def start(self) -> bytes:
        """Nothing: clients take each event for a chunk of the reply."""
        return b""

    def delta(self, reasoning: str, content: str) -> bytes:
        """New text, reasoning before content."""
        return self._chunk(response(self._context, text_parts(reasoning, content)))

    def keep_alive(self) -> bytes:
        """A blank line, because Gemini CLI's parser takes no comments."""
        return b"\n"

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """The chunk that ends the stream."""
        return self._chunk(response(self._context, last_parts(self._context, reply), reply, usage))

    def error(self, error: DialectError) -> bytes:
        """The chunk for a failure after the stream began."""
        return self._chunk(json.loads(encode_error(error)))

    def _chunk(self, value: dict[str, Any]) -> bytes:
        # in ASCII, because Google's Python SDK splits lines at U+0085, U+2028 and U+2029 too
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\r\n\r\n"


class ArrayStreamEncoder(EventStreamEncoder):
    """The same chunks in a JSON array."""

    content_type = "application/json"
    _before = b""

    def start(self) -> bytes:
        """The array's begin."""
        return b"["

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """The chunk that ends the stream, and the array's end."""
        return super().finish(reply, usage) + b"]"

    def error(self, error: DialectError) -> bytes:
        """The chunk for a failure after the stream began, and the array's end."""
        return super().error(error) + b"]"

    def _chunk(self, value: dict[str, Any]) -> bytes:
        before, self._before = self._before, b",\r\n"
        return before + dump_json(value)
