"""Streamed replies of Chat Completions."""

import json
from typing import Any

from rolltap.addons.dialects.model_call import DialectError, Reply, ReplyContext, Usage, dump_json
from rolltap.addons.dialects.openai import encode_error
from rolltap.addons.dialects.openai_chat.reply import first_fields, usage_counts, wire_tool_calls


class StreamEncoder:
    """Encoder of one streamed reply as server-sent events."""

    content_type = "text/event-stream"

    def __init__(self, context: ReplyContext) -> None:
        self._context = context
        self._fields = first_fields(context, "chat.completion.chunk")

    def start(self) -> bytes:
        """Return the first event."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return the events of new text, reasoning before content."""
        events = b""
        if reasoning:
            events += self._chunk({"reasoning_content": reasoning})
        if content:
            events += self._chunk({"content": content})
        return events

    def keep_alive(self) -> bytes:
        """Return an empty delta, because Qwen Code's idle timer ignores SSE comments."""
        return self._chunk({})

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the events of the tool calls and of the end."""
        events = b""
        for i, call in enumerate(wire_tool_calls(self._context, reply)):
            events += self._chunk({"tool_calls": [{"index": i, **call}]})
        events += self._chunk({}, reply.finish_reason)
        if self._context.model_call.include_usage:
            events += _event({**self._fields, "choices": [], "usage": usage_counts(usage)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: DialectError) -> bytes:
        """Return the event of a failure after `start`.

        As in vLLM, `code` is the HTTP status, because the headers are already sent. Qwen Code retries on a 5xx `code`
        and does not retry without one.
        """
        body = json.loads(encode_error(error))
        body["error"]["code"] = error.status
        return _event(body)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _event({**self._fields, "choices": [choice]})


def _event(value: Any) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"
