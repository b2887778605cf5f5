"""OpenAI Chat Completions, as the OpenAI SDKs, LiteLLM and most harnesses speak it.

Field names follow the OpenAI API reference; `reasoning_content` is the extension that reasoning models' servers and
clients share.
"""

import contextlib
import json
from typing import Any

from rolltap.addons.dialects.model_call import (
    DialectError,
    Message,
    ModelCall,
    Reply,
    Tool,
    ToolCall,
    Usage,
    parse_json,
)

NAME = "openai-chat"

PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/chat/completions",
        "/api/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/compatible-mode/v1/chat/completions",
    }
)
"""Exact paths under which providers serve this API. Any host counts: what is not captured is refused anyway."""

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
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
]


def decode(body: bytes) -> ModelCall:
    """The request in `body`. Raises `DialectError` for what the API itself would refuse."""
    try:
        request = parse_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise DialectError(f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(request, dict):
        raise DialectError("The request body must be a JSON object.")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DialectError("'messages' must be a non-empty list.")
    if request.get("n") not in (None, 1):
        raise DialectError("'n' must be 1.")
    stream = request.get("stream")
    options = request.get("stream_options")
    return ModelCall(
        model=str(request.get("model") or ""),
        messages=[_message(m, f"messages[{i}]") for i, m in enumerate(messages)],
        tools=_tools(request),
        stream=stream is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=_max_tokens(request),
        asked={key: request[key] for key in _WISHES if request.get(key) is not None},
    )


def _max_tokens(request: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        value = request.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DialectError(f"'{key}' must be a positive integer.")
        return value
    return None


def _tools(request: dict[str, Any]) -> list[Tool]:
    tools = request.get("tools") or []
    if not isinstance(tools, list):
        raise DialectError("'tools' must be a list.")
    if request.get("tool_choice") == "none":
        return []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DialectError(f"'tools[{i}]' must be a function tool with a name.")
    return tools


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
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DialectError(f"'{where}' must be a function call with a name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # the model may have sampled something else than JSON; that stays text
        with contextlib.suppress(ValueError, RecursionError):
            arguments = parse_json(arguments)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }


def encode_reply(reply_id: str, model: str, created: int, reply: Reply, usage: Usage) -> bytes:
    """The body of a reply to a request that did not ask for a stream."""
    message = reply.to_message()
    if reply.tool_calls and not reply.content:
        message["content"] = None
    return _json(
        {
            "id": reply_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}],
            "usage": _usage(usage),
        }
    )


def encode_error(error: DialectError) -> bytes:
    """The body of an error reply."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return _json({"error": {"message": str(error), "type": kind, "param": None, "code": error.code}})


def encode_models(names: list[str], created: int) -> bytes:
    """The body of a reply to `GET /v1/models`."""
    models = [{"id": name, "object": "model", "created": created, "owned_by": "rolltap"} for name in names]
    return _json({"object": "list", "data": models})


class StreamEncoder:
    """Server-sent events of one streamed reply, in the order `start`, any of `delta` and `keep_alive`, `finish`."""

    def __init__(self, reply_id: str, model: str, created: int, *, include_usage: bool = False) -> None:
        self._head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._include_usage = include_usage

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
        """An event that changes nothing. An empty delta, because Qwen Code's idle timer ignores SSE comments."""
        return self._chunk({})

    def finish(self, tool_calls: list[ToolCall], finish_reason: str, usage: Usage) -> bytes:
        """The tool calls and the events that end the stream."""
        events = b""
        for i, call in enumerate(tool_calls):
            function = {"name": call.name, "arguments": call.arguments}
            events += self._chunk(
                {"tool_calls": [{"index": i, "id": call.id, "type": "function", "function": function}]}
            )
        events += self._chunk({}, finish_reason)
        if self._include_usage:
            events += _event({**self._head, "choices": [], "usage": _usage(usage)})
        return events + b"data: [DONE]\n\n"

    def error(self, error: DialectError) -> bytes:
        """The event for a failure after the stream began; nothing follows it."""
        return b"data: " + encode_error(error) + b"\n\n"

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return _event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"
