"""Streamed replies of the Messages API."""

from typing import Any, Literal

from rolltap.addons.dialects.anthropic.reply import encode_error, first_fields, stop_fields, usage_counts
from rolltap.addons.dialects.model_call import DialectError, Reply, ReplyContext, Usage, dump_json, sign
from rolltap.addons.dialects.tools import as_object


class StreamEncoder:
    """Encoder of one streamed reply as server-sent events. Content blocks do not overlap."""

    content_type = "text/event-stream"

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._index = 0  # of the open block or, when none is open, of the next one
        self._open: Literal["thinking", "text"] | None = None

    def start(self) -> bytes:
        """Return the message without content. Its usage is that of the prompt; how much is cached is not known yet."""
        fields = {**first_fields(self._context), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**fields, "usage": usage_counts(Usage(self._context.prompt_tokens, 0))})

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return the events of new text, reasoning before content. Reasoning that is not sent becomes a `ping`."""
        events = b""
        if reasoning and self._context.model_call.reasoning != "hidden":
            events += self._text("thinking", reasoning)
        if content:
            events += self._text("text", content)
        return events or self.keep_alive()

    def keep_alive(self) -> bytes:
        """Return a `ping`, the event with which this API keeps connections open."""
        return _event("ping")

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the events of the tool calls and of the end."""
        events = self._close()
        for call in reply.tool_calls:
            events += self._block_start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            text = dump_json(as_object(call.arguments)).decode()
            events += self._block_delta({"type": "input_json_delta", "partial_json": text})
            events += self._block_stop()
        events += _event("message_delta", delta=stop_fields(reply), usage=usage_counts(usage))
        return events + _event("message_stop")

    def error(self, error: DialectError) -> bytes:
        """Return the event of a failure after `start`."""
        return b"event: error\ndata: " + encode_error(error) + b"\n\n"

    def _text(self, kind: Literal["thinking", "text"], text: str) -> bytes:
        events = b""
        if self._open != kind:
            events += self._close()
            self._open = kind
            signature = {"signature": ""} if kind == "thinking" else {}
            events += self._block_start({"type": kind, kind: "", **signature})
        if kind == "thinking" and self._context.model_call.reasoning == "signed":
            return events
        return events + self._block_delta({"type": f"{kind}_delta", kind: text})

    def _close(self) -> bytes:
        events = b""
        if self._open == "thinking":
            events += self._block_delta({"type": "signature_delta", "signature": sign(self._context.call_id)})
        if self._open:
            events += self._block_stop()
        self._open = None
        return events

    def _block_start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _block_stop(self) -> bytes:
        events = _event("content_block_stop", index=self._index)
        self._index += 1
        return events


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + dump_json({"type": kind, **fields}) + b"\n\n"
