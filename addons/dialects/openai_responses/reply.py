"""Replies of the Responses API: the response object, its output items, compactions, and Codex's
catalogue of models.

Codex's compaction replaces the history of a conversation by a summary of the model:

1. Codex appends a `compaction_trigger` item to the input.
2. The reply is exactly one `compaction` item. Its `encrypted_content`, opaque to Codex, contains
   the summary.
3. In later requests Codex sends that item in place of the history. It is decoded to a user
   message.

A request to `/responses/compact`, as some versions of Codex send it, is answered as one with a
trigger.

`encrypted_content` is neither encrypted nor authenticated. A forged one has the effect of a user
message.
"""

import base64
import binascii
from typing import Any

from rolltap.addons.dialects.call import (
    DialectError,
    Message,
    ModelCall,
    Reply,
    ReplyContext,
    ServedModel,
    ToolCall,
    Usage,
    WireTool,
    sign,
)
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.json_values import Object, well_formed
from rolltap.addons.dialects.tools import freeform_input


def is_compact(target: str) -> bool:
    """Return True for a request to `/responses/compact`. Its reply is a compaction, no response."""
    return target.partition("?")[0].endswith("/compact")


def response(context: ReplyContext, status: str, **known: Any) -> Object:
    """Return the response object. `known` are the fields that are known by now.

    It repeats what the request asks for, also what is not applied. Until it ends, it repeats the
    recordable form of options alone: each keep-alive of a stream has it.
    """
    model_call = context.model_call
    asked = model_call.requested_sampling
    if status != "in_progress":
        asked = asked | model_call.repeated
    repeated: Object = {}
    for key, (kinds, default) in REPEATED.items():
        repeated[key] = default
        if type(asked.get(key)) in kinds:
            repeated[key] = asked[key]
    tools = []
    for tool in asked.get("tools", ()):
        tools.append(_TOOL | tool if tool["type"] == "function" else tool)
    return {
        "id": f"resp_{context.call_id}",
        "object": "response",
        "created_at": context.created,
        "completed_at": None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": model_call.max_tokens,
        "model": model_call.model,
        "output": [],
        "previous_response_id": model_call.client_metadata.get("previous_response_id"),
        "conversation": None,
        **repeated,
        "reasoning": {"effort": None, "summary": None, **repeated["reasoning"]},
        "service_tier": "default",
        "text": {"format": {"type": "text"}, **repeated["text"]},
        "tools": tools,
        "top_logprobs": 0,
        "usage": None,
        **known,
    }


_TOOL = {"description": None, "parameters": None, "strict": None}
_NUMBER = (int, float)
REPEATED: dict[str, tuple[tuple[type, ...], Any]] = {
    **dict.fromkeys(("temperature", "top_p"), (_NUMBER, 1.0)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (_NUMBER, 0.0)),
    **dict.fromkeys(("instructions", "prompt_cache_key", "safety_identifier"), ((str,), None)),
    **dict.fromkeys(("parallel_tool_calls", "store"), ((bool,), True)),
    **dict.fromkeys(("metadata", "reasoning", "text"), ((dict,), {})),
    "max_tool_calls": ((int,), None),
    "tool_choice": ((str, dict), "auto"),
    "truncation": ((str,), "disabled"),
}
"""Fields of a request that its response repeats: the types of their values, and the default."""


def ending(context: ReplyContext, reply: Reply, usage: Usage) -> Object:
    """Return the fields of a response that are known only when its reply is complete."""
    fields: Object = {
        "status": "completed",
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        },
    }
    if reply.finish_reason == "length":
        fields["status"] = "incomplete"
        fields["incomplete_details"] = {"reason": "max_output_tokens"}
    elif usage.ended is not None:
        # a reply that is given again was complete before
        fields["completed_at"] = max(context.created, int(usage.ended.timestamp()))
    return fields


def output_items(context: ReplyContext, reply: Reply) -> list[Object]:
    """Return the output items of a reply: reasoning, text, tool calls."""
    if is_compaction(context):
        summary = _seal(reply.content)
        item_id = _item_id(context, "cmp", 0)
        item = {"id": item_id, "type": "compaction", "encrypted_content": summary}
        return [item]
    items: list[Object] = []
    if reply.reasoning:
        items.append(reasoning_item(context, reply.reasoning))
    if reply.content or not reply.tool_calls:
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        items.append(message_item(context, len(items), reply.content, status))
    for call in reply.tool_calls:
        items.append(_call_item(context, len(items), call))
    return items


def reasoning_item(context: ReplyContext, text: str) -> Object:
    """Return the item of the reasoning. It is always the first item."""
    return {
        "id": _item_id(context, "rs", 0),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": sign(context.call_id),
    }


def message_item(
    context: ReplyContext,
    index: int,
    text: str,
    status: str,
) -> Object:
    """Return the item of the reply's text."""
    return {
        "id": _item_id(context, "msg", index),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _item_id(context: ReplyContext, prefix: str, index: int) -> str:
    """Return the id of the item at `index` of the output."""
    return f"{prefix}_{context.call_id}_{index}"


def _call_item(context: ReplyContext, index: int, call: ToolCall) -> Object:
    wire = context.model_call.wire_tools.get(call.name, WireTool(call.name))
    common = {"call_id": call.id, "name": wire.name}
    if wire.namespace is not None:
        common["namespace"] = wire.namespace
    if wire.freeform:
        text = freeform_input(call.arguments)
        item_id = _item_id(context, "ctc", index)
        return {
            "id": item_id,
            "type": "custom_tool_call",
            **common,
            "input": text,
        }
    return {
        "id": _item_id(context, "fc", index),
        "type": "function_call",
        **common,
        "arguments": call.arguments,
        "status": "completed",
    }


_COMPACTION = "compaction"
"""Key of the recorded options: True when the reply is a compaction item."""
_MARK = "rolltap-summary:"
_SUMMARY_REQUEST = (
    "The conversation is about to be replaced by a summary of it. Write that summary now, and "
    "nothing else: the task, the user's wishes, what was done and found, what is left to do, and "
    "every name, path and value that is needed to go on with the work."
)
_HEADING = "Summary of the conversation so far:\n\n"


def ask_for_summary(model_call: ModelCall) -> None:
    """Append the request for a summary, and mark the call as a compaction. Its reply is a text."""
    model_call.messages.append({"role": "user", "content": _SUMMARY_REQUEST})
    model_call.client_metadata["compaction"] = "trigger"
    model_call.requested_sampling[_COMPACTION] = True
    model_call.may_call = False


def is_compaction(context: ReplyContext) -> bool:
    """Return True when the reply must be a compaction item."""
    return context.model_call.requested_sampling.get(_COMPACTION) is True


def _seal(summary: str) -> str:
    return base64.b64encode(f"{_MARK}{well_formed(summary)}".encode()).decode()


def summary_message(item: Fields) -> Message:
    """Return the message in the place of a history. Raises `DialectError` for a foreign item."""
    sealed = item.maybe("encrypted_content", str) or ""
    try:
        text = base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    if not text.startswith(_MARK):
        why = f"'{item.place('encrypted_content')}' was not issued here and cannot be read."
        raise DialectError(why, code="invalid_encrypted_content")
    return {"role": "user", "content": _HEADING + text.removeprefix(_MARK)}


def is_summary(message: Message) -> bool:
    """Return True for a message in the place of a history."""
    is_heading: bool = message["content"].startswith(_HEADING)
    return is_heading


_LONGEST_TOOL_OUTPUT = 10_000
"""Tokens, as in Codex's own catalogue."""
_CODEX_PROMPT = (
    "You are Codex, a coding agent in the user's terminal. Work in the current directory with the "
    "tools that you have. Look before you change anything, edit files with shell commands, check "
    "what you did, and go on until the task is done. End with a short account of what you changed."
)
"""The system prompt. Codex takes it from the catalogue, and adds its own text about skills and the
environment."""


def catalogue_entry(model: ServedModel) -> Object:
    """Return the entry of a model in Codex's catalogue. Codex uses the first model as its default.

    Codex requests it from chatgpt.com when it has an API key, and takes its default model, its
    tools and the size of the context window from it. OpenAI does not document the format. The
    fields are those that Codex 0.169 requires, and those that choose its tools.
    """
    return {
        "slug": model.name,
        "display_name": model.name,
        "priority": 0,
        "visibility": "list",
        "supported_in_api": True,
        "context_window": model.context_window,
        # Codex's own limit is close to the full window; a model that reasons before its summary
        # needs more room
        "auto_compact_token_limit": model.context_window * 3 // 4,
        # Codex counts four bytes as one token, but one byte can be a token: an eighth may really
        # be half the window
        "truncation_policy": {
            "mode": "tokens",
            "limit": min(_LONGEST_TOOL_OUTPUT, model.context_window // 8),
        },
        "input_modalities": ["text"],
        "base_instructions": _CODEX_PROMPT,
        # function tools only: a shell; no freeform apply_patch, which would need
        # `apply_patch_tool_type`; no namespaces of sub-agents
        "shell_type": "unified_exec",
        "experimental_supported_tools": [],
        "multi_agent_version": "disabled",
        "use_responses_lite": False,
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [],
        "support_verbosity": False,
    }
