"""Replies of the Responses API: the response object and its output items."""

from typing import Any

from rolltap.addons.dialects.model_call import (
    Reply,
    ReplyContext,
    ServedModel,
    ToolCall,
    Usage,
    WireTool,
    dump_json,
    sign,
)
from rolltap.addons.dialects.openai_responses.codex_catalogue import catalogue
from rolltap.addons.dialects.openai_responses.compaction import is_compaction, seal
from rolltap.addons.dialects.tools import freeform_input


def encode_reply(context: ReplyContext, reply: Reply, usage: Usage) -> bytes:
    """Return the body of a reply that is not streamed."""
    return dump_json(response(context, **ending(reply, usage), output=output_items(context, reply)))


def encode_token_count(num_tokens: int) -> bytes:
    """Return the body of a reply to `POST /v1/responses/input_tokens`."""
    return dump_json({"object": "response.input_tokens", "input_tokens": num_tokens})


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """Return the body of a reply to Codex's request for its catalogue of models."""
    return dump_json(catalogue(models))


def response(
    context: ReplyContext,
    *,
    status: str,
    output: list[dict[str, Any]],
    error: dict[str, str] | None = None,
    incomplete_details: dict[str, str] | None = None,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the response object.

    It repeats parameters of the request, except `instructions` and `tools`: they are long, and each response event of a
    stream would contain them.
    """
    model_call = context.model_call
    return {
        "id": f"resp_{context.call_id}",
        "object": "response",
        "created_at": context.created,
        "status": status,
        "error": error,
        "incomplete_details": incomplete_details,
        "instructions": None,
        "max_output_tokens": model_call.max_tokens,
        "metadata": {},
        "model": model_call.model,
        "output": output,
        "parallel_tool_calls": model_call.requested_sampling.get("parallel_tool_calls", True),
        "previous_response_id": model_call.client_metadata.get("previous_response_id"),
        "conversation": {"id": model_call.stores[0].rpartition("/")[2]} if model_call.stores else None,
        "store": False,
        "temperature": model_call.requested_sampling.get("temperature"),
        "tool_choice": model_call.requested_sampling.get("tool_choice", "auto"),
        "tools": [],
        "top_p": model_call.requested_sampling.get("top_p"),
        "usage": usage,
    }


def ending(reply: Reply, usage: Usage) -> dict[str, Any]:
    """Return the fields of a response that are known only when its reply is complete."""
    truncated = reply.finish_reason == "length"
    return {
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted separately
            "total_tokens": usage.prompt + usage.completion,
        },
    }


def output_items(context: ReplyContext, reply: Reply) -> list[dict[str, Any]]:
    """Return the output items of a reply: reasoning, text, tool calls."""
    if is_compaction(context):
        return [{"id": item_id(context, "cmp", 0), "type": "compaction", "encrypted_content": seal(reply.content)}]
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        items.append(reasoning_item(context, reply.reasoning))
    if reply.content or not reply.tool_calls:
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        items.append(message_item(context, len(items), reply.content, status))
    for call in reply.tool_calls:
        items.append(_call_item(context, len(items), call))
    return items


def reasoning_item(context: ReplyContext, text: str) -> dict[str, Any]:
    """Return the item of the reasoning. It is always the first item."""
    return {
        "id": item_id(context, "rs", 0),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": sign(context.call_id),
    }


def message_item(context: ReplyContext, index: int, text: str, status: str) -> dict[str, Any]:
    """Return the item of the reply's text."""
    return {
        "id": item_id(context, "msg", index),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def item_id(context: ReplyContext, prefix: str, index: int) -> str:
    """Return the id of the item at `index` of the output."""
    return f"{prefix}_{context.call_id}_{index}"


def _call_item(context: ReplyContext, index: int, call: ToolCall) -> dict[str, Any]:
    wire = context.model_call.wire_tools.get(call.name, WireTool(call.name))
    common = {"call_id": call.id, "name": wire.name}
    if wire.namespace is not None:
        common["namespace"] = wire.namespace
    if wire.freeform:
        text = freeform_input(call.arguments)
        return {"id": item_id(context, "ctc", index), "type": "custom_tool_call", **common, "input": text}
    return {
        "id": item_id(context, "fc", index),
        "type": "function_call",
        **common,
        "arguments": call.arguments,
        "status": "completed",
    }
