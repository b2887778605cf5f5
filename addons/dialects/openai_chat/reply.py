"""A reply of Chat Completions, and the models that it can come from."""

from typing import Any
from urllib.parse import unquote

from rolltap.addons.dialects.tools import freeform_input
from rolltap.addons.dialects.types import Reply, ReplyContext, ServedModel, Usage, dump_json


def encode_reply(context: ReplyContext, reply: Reply, usage: Usage) -> bytes:
    """The body of a reply to a request that did not ask for a stream."""
    message = reply.to_message()
    if reply.tool_calls:
        message["tool_calls"] = wire_calls(context, reply)
        message["content"] = message["content"] or None
    return dump_json(
        {
            **first_fields(context, "chat.completion"),
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}],
            "usage": usage_counts(usage),
        }
    )


def encode_token_count(tokens: int) -> bytes:
    """This API has no request to count tokens."""
    raise NotImplementedError


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """The body of a reply to `GET /v1/models`, or to `GET /v1/models/NAME`: every name is answered by the engine."""
    name = unquote(target.partition("?")[0].partition("/v1/models/")[2])
    if name:
        return dump_json(_model(name, models[0].context, created))
    return dump_json({"object": "list", "data": [_model(m.name, m.context, created) for m in models]})


def _model(name: str, context: int, created: int) -> dict[str, Any]:
    # max_model_len is vLLM's extension
    return {"id": name, "object": "model", "created": created, "owned_by": "rolltap", "max_model_len": context}


def first_fields(context: ReplyContext, kind: str) -> dict[str, Any]:
    """The fields that a reply and each chunk of a stream begin with."""
    return {
        "id": f"chatcmpl-{context.call_id}",
        "object": kind,
        "created": context.created,
        "model": context.model_call.model,
    }


def wire_calls(context: ReplyContext, reply: Reply) -> list[dict[str, Any]]:
    """The reply's tool calls in the forms of the request's tools."""
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
    """The token counts."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
