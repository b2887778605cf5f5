"""OpenAI Chat Completions, as the OpenAI SDKs, LiteLLM and most harnesses speak it.

Field names follow the OpenAI API reference; `reasoning_content` is the extension that reasoning models' servers and
clients share.
"""

import json
from typing import Any
from urllib.parse import unquote

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.fields import parse_object, positive_integer, stop_texts
from rolltap.addons.dialects.openai_error import encode_error as encode_error
from rolltap.addons.dialects.tools import echoed_call, freeform_input, freeform_tool
from rolltap.addons.dialects.types import (
    FREEFORM_ARGUMENT,
    DialectError,
    Head,
    Message,
    ModelCall,
    Reply,
    ServedModel,
    Usage,
    WireTool,
    dump_json,
    parse_arguments,
)

NAME = "openai-chat"

_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/chat/completions",
        "/api/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/compatible-mode/v1/chat/completions",
    }
)
_MODELS = "/v1/models"

_WISHES = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "logprobs",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
]


def operation(method: str, path: str) -> Operation | None:
    """What a request asks for. Providers serve this API under several paths, and any host counts."""
    if method == "POST" and path in _PATHS:
        return "generate"
    if method == "GET" and (path == _MODELS or path.startswith(_MODELS + "/")):
        return "models"
    return None


def decode(body: bytes, target: str) -> ModelCall:
    """The request in `body`. Raises `DialectError` for what the API itself would refuse."""
    request = parse_object(body)
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DialectError("'messages' must be a non-empty list.")
    if request.get("n") not in (None, 1):
        raise DialectError("'n' must be 1.")
    options = request.get("stream_options")
    model_call = ModelCall(
        model=str(request.get("model") or ""),
        messages=[_message(m, f"messages[{i}]") for i, m in enumerate(messages)],
        tools=[],
        stream=request.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=_max_tokens(request),
        stop=stop_texts(request.get("stop"), "stop"),
        schema=_schema(request.get("response_format")),
        asked={key: request[key] for key in _WISHES if request.get(key) is not None},
    )
    _read_tools(request, model_call)
    metadata = request.get("metadata")
    if isinstance(metadata, dict):
        model_call.hints = {f"metadata.{key}": value for key, value in metadata.items() if isinstance(value, str)}
    return model_call


def _max_tokens(request: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        if request.get(key) is not None:
            return positive_integer(request[key], key)
    return None


def _schema(wanted: Any) -> dict[str, Any] | None:
    if not isinstance(wanted, dict) or wanted.get("type") not in ("json_object", "json_schema"):
        return None
    described = wanted.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    return schema if isinstance(schema, dict) else {}


def _read_tools(request: dict[str, Any], model_call: ModelCall) -> None:
    tools = request.get("tools") or []
    if not isinstance(tools, list):
        raise DialectError("'tools' must be a list.")
    if request.get("tool_choice") == "none":
        return
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise DialectError(f"'tools[{i}]' must be a tool with a type.")
        if kind not in ("function", "custom"):
            model_call.hosted_tools.append(tool)
            continue
        described = tool.get(kind)
        if not isinstance(described, dict) or not _named(described):
            raise DialectError(f"'tools[{i}]' must be a {kind} tool with a name.")
        if kind == "function":
            model_call.tools.append(tool)
        else:
            name, form = described["name"], described.get("format")
            grammar = form.get("grammar") if isinstance(form, dict) else None
            grammar = grammar.get("definition") if isinstance(grammar, dict) else None
            model_call.tools.append(freeform_tool(name, described.get("description"), grammar))
            model_call.wire_tools[name] = WireTool(name, freeform=True)


def _named(described: dict[str, Any]) -> bool:
    return isinstance(described.get("name"), str) and bool(described["name"])


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DialectError(f"'{where}' must be an object.")
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise DialectError(f"'{where}.role' must be system, developer, user, assistant or tool, not {role!r}.")
    decoded: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            decoded["reasoning_content"] = reasoning
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise DialectError(f"'{where}.tool_calls' must be a list.")
        if calls:
            decoded["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    if role == "tool":
        decoded["tool_call_id"] = str(message.get("tool_call_id") or "")
    return decoded


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DialectError(f"'{where}' must be a string or a list of parts.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise DialectError(f"'{where}[{i}]' has type {kind!r}; this model takes text only.")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    call_id = str(call.get("id") or "") if isinstance(call, dict) else ""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and _named(function):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_arguments(arguments)
        return echoed_call(call_id, function["name"], {} if arguments is None else arguments)
    custom = call.get("custom") if isinstance(call, dict) else None
    if isinstance(custom, dict) and _named(custom):
        return echoed_call(call_id, custom["name"], {FREEFORM_ARGUMENT: str(custom.get("input") or "")})
    raise DialectError(f"'{where}' must be a function call with a name.")


def encode_reply(head: Head, reply: Reply, usage: Usage) -> bytes:
    """The body of a reply to a request that did not ask for a stream."""
    message = reply.to_message()
    if reply.tool_calls:
        message["tool_calls"] = _wire_calls(head, reply)
        message["content"] = message["content"] or None
    return dump_json(
        {
            **_first_fields(head, "chat.completion"),
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}],
            "usage": _usage(usage),
        }
    )


def encode_token_count(tokens: int) -> bytes:
    """This API has no request to count tokens."""
    raise NotImplementedError


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """The body of a reply to `GET /v1/models`, or to `GET /v1/models/NAME`: every name is answered by the engine."""
    path = target.partition("?")[0]
    if path != _MODELS:
        return dump_json(_model(unquote(path.removeprefix(_MODELS + "/")), models[0].context, created))
    return dump_json({"object": "list", "data": [_model(m.name, m.context, created) for m in models]})


def _model(name: str, context: int, created: int) -> dict[str, Any]:
    # max_model_len is vLLM's extension
    return {"id": name, "object": "model", "created": created, "owned_by": "rolltap", "max_model_len": context}


def stream_encoder(head: Head) -> "StreamEncoder":
    """The encoder of a streamed reply."""
    return StreamEncoder(head)


class StreamEncoder:
    """Server-sent events of one streamed reply."""

    content_type = "text/event-stream"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._fields = _first_fields(head, "chat.completion.chunk")

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
        for i, call in enumerate(_wire_calls(self._head, reply)):
            events += self._chunk({"tool_calls": [{"index": i, **call}]})
        events += self._chunk({}, reply.finish_reason)
        if self._head.model_call.include_usage:
            events += _event({**self._fields, "choices": [], "usage": _usage(usage)})
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


def _first_fields(head: Head, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{head.call_id}",
        "object": kind,
        "created": head.created,
        "model": head.model_call.model,
    }


def _wire_calls(head: Head, reply: Reply) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for call in reply.tool_calls:
        if call.name in head.model_call.wire_tools:
            custom = {"name": call.name, "input": freeform_input(call.arguments)}
            calls.append({"id": call.id, "type": "custom", "custom": custom})
        else:
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _event(value: Any) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"
