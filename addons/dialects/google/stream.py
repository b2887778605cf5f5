"""Streamed replies of the Gemini API: server-sent events, or a JSON array."""

import json
from typing import Any
from urllib.parse import parse_qs

from rolltap.addons.dialects.google.reply import encode_error, last_parts, response, text_parts
from rolltap.addons.dialects.model_call import DialectError, Reply, ReplyContext, Usage, dump_json


def stream_encoder(context: ReplyContext) -> "EventStreamEncoder":
    """Return an encoder of server-sent events if the query has `alt=sse`, else of a JSON array."""
    query = parse_qs(context.target.partition("?")[2])
    alt = query.get("alt", query.get("$alt"))
    return EventStreamEncoder(context) if alt == ["sse"] else ArrayStreamEncoder(context)


class EventStreamEncoder:
    """Encoder of one streamed reply as server-sent events, each of which contains one chunk."""

    content_type = "text/event-stream"

    def __init__(self, context: ReplyContext) -> None:
        self._context = context

    def start(self) -> bytes:
        """Return no bytes, because clients parse each event as a chunk of the reply."""
        return b""

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return a chunk of new text, reasoning before content. Reasoning that is not sent becomes a keep-alive."""
        parts = text_parts(self._context, reasoning, content)
        return self._chunk(response(self._context, parts)) if parts else self.keep_alive()

    def keep_alive(self) -> bytes:
        """Return a blank line, because Gemini CLI's parser does not accept SSE comments."""
        return b"\n"

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the last chunk, with the function calls and the usage."""
        return self._chunk(response(self._context, last_parts(self._context, reply), reply, usage))

    def error(self, error: DialectError) -> bytes:
        """Return the chunk of a failure after `start`."""
        return self._chunk(json.loads(encode_error(error)))

    def _chunk(self, value: dict[str, Any]) -> bytes:
        # ASCII, because Google's Python SDK also splits lines at U+0085, U+2028 and U+2029
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\r\n\r\n"


class ArrayStreamEncoder(EventStreamEncoder):
    """Encoder of one streamed reply as a JSON array of chunks."""

    content_type = "application/json"
    _separator = b""

    def start(self) -> bytes:
        """Return the beginning of the array."""
        return b"["

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the last chunk and the end of the array."""
        return super().finish(reply, usage) + b"]"

    def error(self, error: DialectError) -> bytes:
        """Return the chunk of a failure and the end of the array."""
        return super().error(error) + b"]"

    def _chunk(self, value: dict[str, Any]) -> bytes:
        separator, self._separator = self._separator, b",\r\n"
        return separator + dump_json(value)
