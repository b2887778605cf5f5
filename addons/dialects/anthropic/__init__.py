"""The Anthropic Messages API, as the Anthropic SDKs and Claude Code speak it.

Field names follow Anthropic's API reference.
"""

from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import unquote

from rolltap.addons.dialects.anthropic.content import conversation, system_message, text_field
from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.fields import parse_object, positive_integer, stop_texts
from rolltap.addons.dialects.tools import as_object, function_tool
from rolltap.addons.dialects.types import (
    ContextOverflow,
    DialectError,
    Head,
    ModelCall,
    Reply,
    ServedModel,
    Tool,
    Usage,
    dump_json,
    sign,
)

NAME = "anthropic-messages"

_MESSAGES = "/v1/messages"
_COUNT_TOKENS = "/v1/messages/count_tokens"
_MODELS = "/v1/models"

_WISHES = [
    "temperature",
    "top_p",
    "top_k",
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
    "context_management",
]

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


def operation(method: str, path: str) -> Operation | None:
    """What a request asks for. The list of models is on the same path in other APIs, which `routes` tells apart."""
    if method == "POST" and path == _MESSAGES:
        return "generate"
    if method == "POST" and path == _COUNT_TOKENS:
        return "count_tokens"
    if method == "GET" and (path == _MODELS or path.startswith(_MODELS + "/")):
        return "models"
    return None


def decode(body: bytes, target: str) -> ModelCall:
    """The request in `body`. Raises `DialectError` for what the API itself would refuse."""
    request = parse_object(body)
    counting = target.partition("?")[0] == _COUNT_TOKENS
    known, shown, hosted = _read_tools(request.get("tools"))
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        shown = []
    messages = system_message(request.get("system"), known) + conversation(request.get("messages"), known)
    if messages[-1]["role"] == "assistant" and not counting:
        raise DialectError(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )
    return ModelCall(
        model=str(request.get("model") or ""),
        messages=messages,
        tools=shown,
        stream=request.get("stream") is True,
        max_tokens=None if counting else positive_integer(request.get("max_tokens"), "max_tokens"),
        stop=stop_texts(request.get("stop_sequences"), "stop_sequences"),
        schema=_schema(request),
        asked={key: request[key] for key in _WISHES if request.get(key) is not None},
        hosted_tools=hosted,
        hints=_hints(request),
    )


def _read_tools(tools: Any) -> tuple[dict[str, Tool], list[Tool], list[Any]]:
    """All tools that can be called, by name; those that are shown from the start; and the hosted ones.

    A tool with a type of its own (web search, but also bash or the text editor) comes without a schema: only the
    provider's models know what it takes.
    """
    known: dict[str, Tool] = {}
    shown: list[Tool] = []
    hosted: list[Any] = []
    if tools is not None and not isinstance(tools, list):
        raise DialectError("tools: Input should be a list.")
    for i, tool in enumerate(tools or []):
        if not isinstance(tool, dict):
            raise DialectError(f"tools.{i}: Input should be an object.")
        if tool.get("type") not in (None, "custom"):
            hosted.append(tool)
            continue
        name = text_field(tool, "name", f"tools.{i}")
        if not name:
            raise DialectError(f"tools.{i}.name: Input should not be empty.")
        known[name] = function_tool(name, tool.get("description"), tool.get("input_schema"))
        if tool.get("defer_loading") is not True:
            shown.append(known[name])
    return known, shown, hosted


def _schema(request: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of `output_config.format`, or of `output_format`, its older name."""
    config = request.get("output_config")
    wanted = config.get("format") if isinstance(config, dict) else None
    wanted = wanted or request.get("output_format")
    schema = wanted.get("schema") if isinstance(wanted, dict) and wanted.get("type") == "json_schema" else None
    return schema if isinstance(schema, dict) else None


def _hints(request: dict[str, Any]) -> dict[str, str]:
    hints = {}
    for parent, key in (("metadata", "user_id"), ("diagnostics", "previous_message_id")):
        fields = request.get(parent)
        value = fields.get(key) if isinstance(fields, dict) else None
        if isinstance(value, str):
            hints[f"{parent}.{key}"] = value
    return hints


def encode_reply(head: Head, reply: Reply, usage: Usage) -> bytes:
    """The body of a reply to a request that did not ask for a stream."""
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": sign(head.call_id)})
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": as_object(call.arguments)})
    return dump_json({**_message_fields(head), "content": content, **_stop_fields(reply), "usage": _usage(usage)})


def encode_error(error: DialectError) -> bytes:
    """The body of an error reply."""
    message = str(error)
    if isinstance(error, ContextOverflow):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    kind = _ERROR_TYPES.get(error.status) or _ERROR_TYPES[400 if error.status < 500 else 500]
    return dump_json({"type": "error", "error": {"type": kind, "message": message}})


def encode_token_count(tokens: int) -> bytes:
    """The body of a reply to `POST /v1/messages/count_tokens`."""
    return dump_json({"input_tokens": tokens})


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """The body of a reply to `GET /v1/models`, or to `GET /v1/models/NAME`: every name is answered by the engine."""
    path = target.partition("?")[0]
    if path != _MODELS:
        return dump_json(_model(unquote(path.removeprefix(_MODELS + "/")), models[0].context, created))
    page = {"has_more": False, "first_id": models[0].name, "last_id": models[-1].name}
    return dump_json({"data": [_model(m.name, m.context, created) for m in models], **page})


def _model(name: str, context: int, created: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": context,
        "max_tokens": context,
    }


def stream_encoder(head: Head) -> "StreamEncoder":
    """The encoder of a streamed reply."""
    return StreamEncoder(head)


class StreamEncoder:
    """Server-sent events of one streamed reply: one content block after the other."""

    content_type = "text/event-stream"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._index = 0  # of the open block, else of the next
        self._open: Literal["thinking", "text"] | None = None

    def start(self) -> bytes:
        """The message without content. Its usage is not known yet; the last counts are those that clients keep."""
        fields = {**_message_fields(self._head), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**fields, "usage": _usage(Usage(0, 0))})

    def delta(self, reasoning: str, content: str) -> bytes:
        """New text, reasoning before content."""
        events = b""
        if reasoning:
            events += self._text("thinking", reasoning)
        if content:
            events += self._text("text", content)
        return events

    def keep_alive(self) -> bytes:
        """The event that this API itself sends to keep a connection open."""
        return _event("ping")

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """The tool calls and the events that end the stream."""
        events = self._close()
        for call in reply.tool_calls:
            events += self._block_start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            text = dump_json(as_object(call.arguments)).decode()
            events += self._block_delta({"type": "input_json_delta", "partial_json": text})
            events += self._block_stop()
        events += _event("message_delta", delta=_stop_fields(reply), usage=_usage(usage))
        return events + _event("message_stop")

    def error(self, error: DialectError) -> bytes:
        """The event for a failure after the stream began."""
        return b"event: error\ndata: " + encode_error(error) + b"\n\n"

    def _text(self, kind: Literal["thinking", "text"], text: str) -> bytes:
        events = b""
        if self._open != kind:
            events += self._close()
            self._open = kind
            signature = {"signature": ""} if kind == "thinking" else {}
            events += self._block_start({"type": kind, kind: "", **signature})
        return events + self._block_delta({"type": f"{kind}_delta", kind: text})

    def _close(self) -> bytes:
        events = b""
        if self._open == "thinking":
            events += self._block_delta({"type": "signature_delta", "signature": sign(self._head.call_id)})
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


def _message_fields(head: Head) -> dict[str, Any]:
    return {
        "id": f"msg_{head.call_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model_call.model,
    }


def _stop_fields(reply: Reply) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish_reason]
    if reply.finish_reason == "stop" and reply.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """The counts; a prompt's tokens are those read from the cache and, apart from them, the rest."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + dump_json({"type": kind, **fields}) + b"\n\n"
