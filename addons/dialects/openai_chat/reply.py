"""Replies of Chat Completions, whole and streamed, and its list of models."""

import json
from typing import Any
from urllib.parse import unquote

from rolltap.addons.dialects import dialect
from rolltap.addons.dialects.call import DialectError, Reply, ReplyContext, ServedModel, Usage, dump_json
from rolltap.addons.dialects.openai import encode_error
from rolltap.addons.dialects.tools import freeform_input


def encode_reply(context: ReplyContext, reply: Reply, usage: Usage) -> bytes:
    """Return the body of a reply that is not streamed."""
    message = reply.to_message()
    if reply.tool_calls:
        message["tool_calls"] = wire_tool_calls(context, reply)
        message["content"] = message["content"] or None
    return dump_json(
        {
            **first_fields(context, "chat.completion"),
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}],
            "usage": usage_counts(usage),
        }
    )


def encode_token_count(num_tokens: int) -> bytes:
    """Raise `NotImplementedError`: Chat Completions has no operation to count tokens."""
    raise NotImplementedError


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """Return the body of a reply to `GET /v1/models`, or to `GET /v1/models/NAME` with any name."""
    name = unquote(target.partition("?")[0].partition("/v1/models/")[2])
    if name:
        return dump_json(_model(name, models[0].context_window, created))
    return dump_json({"object": "list", "data": [_model(m.name, m.context_window, created) for m in models]})


def _model(name: str, context_window: int, created: int) -> dict[str, Any]:
    # max_model_len is vLLM's extension
    return {"id": name, "object": "model", "created": created, "owned_by": "rolltap", "max_model_len": context_window}


def first_fields(context: ReplyContext, kind: str) -> dict[str, Any]:
    """Return the first fields of a reply and of each chunk of a stream."""
    return {
        "id": f"chatcmpl-{context.call_id}",
        "object": kind,
        "created": context.created,
        "model": context.model_call.model,
    }


def wire_tool_calls(context: ReplyContext, reply: Reply) -> list[dict[str, Any]]:
    """Return the reply's tool calls, each as a function call or a custom call according to the request's tool."""
    calls: list[dict[str, Any]] = []
    for call in reply.tool_calls:
        if call.name in context.model_call.wire_tools:
            custom = {"name": call.name, "input": freeform_input(call.arguments)}
            calls.append({"id": call.id, "type": "custom", "custom": custom})
        else:
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def usage_counts(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


class StreamEncoder(dialect.StreamEncoder):
    """Encoder of one streamed reply as server-sent events."""

    def __init__(self, context: ReplyContext) -> None:
        super().__init__(context)
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
