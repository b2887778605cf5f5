"""A streamed reply of Chat Completions."""

import json
from typing import Any

from rolltap.addons.dialects.openai import encode_error
from rolltap.addons.dialects.openai_chat.reply import first_fields, usage_counts, wire_calls
from rolltap.addons.dialects.types import DialectError, Reply, ReplyContext, Usage, dump_json


class StreamEncoder:
    """Server-sent events of one streamed reply."""

    content_type = "text/event-stream"

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._fields = first_fields(context, "chat.completion.chunk")

    def start(self) -> bytes:
        """The first event."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, reasoning: str, content: str) -> bytes:
        """New text, reasoning before content."""
        events = b""
        if reasoning:
            events += self._chunk({"reasoning_content": reasoning})
        if content:
            events += self._chunk({"content": content})
        return events

    def keep_alive(self) -> bytes:
        """An empty delta, because Qwen Code's idle timer ignores SSE comments."""
        return self._chunk({})

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """The tool calls and the events that end the stream."""
        events = b""
        for i, call in enumerate(wire_calls(self._context, reply)):
            events += self._chunk({"tool_calls": [{"index": i, **call}]})
        events += self._chunk({}, reply.finish_reason)
        if self._context.model_call.include_usage:
            events += _event({**self._fields, "choices": [], "usage": usage_counts(usage)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: DialectError) -> bytes:
        """The event for a failure after the stream began.

        Its `code` is the status that the headers can no longer tell, as vLLM writes it. Qwen Code asks again for 5xx,
        and gives up without one.
        """
        told = json.loads(encode_error(error))
        told["error"]["code"] = error.status
        return _event(told)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _event({**self._fields, "choices": [choice]})


def _event(value: Any) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"
