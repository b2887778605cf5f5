"""Replies and errors of the Messages API, whole and streamed, and its list of models."""

from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import unquote

from rolltap.addons.dialects import dialect
from rolltap.addons.dialects.call import (
    ContextOverflow,
    DialectError,
    Reply,
    ReplyContext,
    ServedModel,
    Usage,
    dump_json,
    sign,
)
from rolltap.addons.dialects.tools import as_object

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def encode_reply(context: ReplyContext, reply: Reply, usage: Usage) -> bytes:
    """Return the body of a reply that is not streamed."""
    content: list[dict[str, Any]] = []
    if reply.reasoning and context.model_call.reasoning != "hidden":
        thinking = reply.reasoning if context.model_call.reasoning == "shown" else ""
        content.append({"type": "thinking", "thinking": thinking, "signature": sign(context.call_id)})
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": as_object(call.arguments)})
    return dump_json({**first_fields(context), "content": content, **stop_fields(reply), "usage": usage_counts(usage)})


def encode_error(error: DialectError) -> bytes:
    """Return the body of an error reply."""
    message = str(error)
    if isinstance(error, ContextOverflow):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    kind = _ERROR_TYPES.get(error.status) or _ERROR_TYPES[400 if error.status < 500 else 500]
    return dump_json({"type": "error", "error": {"type": kind, "message": message}})


def encode_token_count(num_tokens: int) -> bytes:
    """Return the body of a reply to `POST /v1/messages/count_tokens`."""
    return dump_json({"input_tokens": num_tokens})


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """Return the body of a reply to `GET /v1/models`, or to `GET /v1/models/NAME` with any name."""
    name = unquote(target.partition("?")[0].partition("/v1/models/")[2])
    if name:
        return dump_json(_model(name, models[0].context_window, created))
    page = {"has_more": False, "first_id": models[0].name, "last_id": models[-1].name}
    return dump_json({"data": [_model(m.name, m.context_window, created) for m in models], **page})


def _model(name: str, context_window: int, created: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": context_window,
        "max_tokens": context_window,
    }


def first_fields(context: ReplyContext) -> dict[str, Any]:
    """Return the first fields of a message."""
    return {"id": f"msg_{context.call_id}", "type": "message", "role": "assistant", "model": context.model_call.model}


def stop_fields(reply: Reply) -> dict[str, Any]:
    """Return the fields that say why the message ends."""
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish_reason]
    if reply.finish_reason == "stop" and reply.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": reason, "stop_sequence": None}


def usage_counts(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object. In this API `input_tokens` does not include tokens read from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


class StreamEncoder(dialect.StreamEncoder):
    """Encoder of one streamed reply as server-sent events. Content blocks do not overlap."""

    def __init__(self, context: ReplyContext) -> None:
        super().__init__(context)
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
