"""Items of the Responses API: decoded to messages, found by their ids, and stored with a conversation.

One reply is several items: reasoning, message, tool calls. Harnesses send them back as consecutive items, which are
decoded to one assistant message.

Earlier responses and their items have the ids `resp_CALL`, and a prefix, `_CALL_` and an index. A reply is rebuilt from
the row of its call. The row has tools as the model sees them: a call of a freeform tool or of one in a namespace
becomes a `function_call` of that function. It is decoded to the same message.
"""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.json_values import described
from rolltap.addons.dialects.model_call import (
    FREEFORM_ARGUMENT,
    DialectError,
    Message,
    ModelCall,
    ReplyContext,
    assistant_message,
    message_tool_call,
    parse_arguments,
    signed_call,
)
from rolltap.addons.dialects.openai import WORDING, content_text, hide_media, part_texts
from rolltap.addons.dialects.openai_responses.reply import ask_for_summary, ending, output_items, response, unseal
from rolltap.addons.dialects.openai_responses.tools import ToolNames, read_tools
from rolltap.addons.dialects.stored import (
    DELETED,
    Shape,
    Stored,
    StoredAnswer,
    StoredCall,
    StoredRequest,
    fields_of_a_tool,
    flag,
    hosted_tool,
    identifier,
    kept,
    label,
    own_signature,
    shown_id,
    text,
    word,
)

_PREFIX = "resp_"


def find_call(response_id: str, stored: Stored) -> StoredCall | None:
    """Return the completed call of a response, or None when there is none or the response was deleted."""
    call_id = response_id.removeprefix(_PREFIX)
    return None if call_id == response_id or stored.is_deleted(_path(response_id)) else stored.calls.get(call_id)


def is_reference(item: dict[str, Any]) -> bool:
    """Return True for an `item_reference`, whose type may be left out."""
    return item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)


def with_items(fields: Fields, key: str, stored: Stored) -> list[Any]:
    """Return a list of items with output items of earlier replies in the place of references.

    Raises `DialectError` for a reference to nothing, and for two to the same item, as OpenAI does: a short request
    would become a long one.
    """
    named: set[str] = set()
    issued: dict[str, dict[str, dict[str, Any]]] = {}  # a reply may have thousands of items, each named on its own
    resolved = []
    for number, item in enumerate(fields.elements(key, "a non-empty string or list of items")):
        if isinstance(item, dict) and is_reference(item):
            item_id = Fields(item, WORDING, (fields, key, number)).identifier("id")
            if item_id in named:
                why = "Remove duplicate items from your input and try again."
                raise DialectError(f"Duplicate item found with id {shown_id(item_id)}. {why}")
            named.add(item_id)
            response_id = f"{_PREFIX}{item_id.partition('_')[2].rpartition('_')[0]}"
            if response_id not in issued:
                call = find_call(response_id, stored)
                issued[response_id] = {} if call is None else {item["id"]: item for item in reply_items(call)}
            item = issued[response_id].get(re.sub("^ctc_", "fc_", item_id))
            if item is None:
                raise DialectError(f"Item with id {shown_id(item_id)} not found.", status=404, code="not_found")
        resolved.append(item)
    return resolved


def reply_items(call: StoredCall) -> list[dict[str, Any]]:
    """Return the output items of a call's reply."""
    return output_items(_context(call), call.as_reply())


def serve_response(request: StoredRequest, response_id: str, stored: Stored) -> StoredAnswer:
    """Answer `GET` and `DELETE /v1/responses/ID`. Raises `DialectError`."""
    call = find_call(response_id, stored)
    if call is None:
        raise DialectError(f"Response with id {shown_id(response_id)} not found.", status=404, code="not_found")
    if request.method == "DELETE":
        body = {"id": response_id, "object": "response", "deleted": True}
        return StoredAnswer(body, _path(response_id), DELETED)
    context = _context(call)
    return StoredAnswer(response(context, output=reply_items(call), **ending(context, call.as_reply(), call.usage())))


def _path(response_id: str) -> str:
    return f"/responses/{response_id}"


def _context(call: StoredCall) -> ReplyContext:
    model_call = ModelCall(call.model, [], [], requested_sampling=call.asked)
    return ReplyContext(call.call_id, call.created, "", model_call)


_Item = tuple[str, Fields]
"""The type of an item, and the item."""
_INPUT = "a non-empty string or list of items"
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_KEYS = dict.fromkeys(("input_text", "output_text", "summary_text", "text"), "text") | {"refusal": "refusal"}


def hide_items(request: Fields, key: str) -> int:
    """Replace the images, audio and files of a list of items: see `hide`."""
    return hide_media(request.values, (key, "content"), (key, "output"))


def decode_input(request: Fields, before: list[Message], model_call: ModelCall, names: ToolNames) -> None:
    """Append the messages of `instructions` and `input` to `model_call`, and add the tools among the items.

    `before` are messages between the two.
    Raises `DialectError` for an unknown item and for content other than text.
    """
    instructions = request.optional("instructions", Fields.text)
    if instructions is not None:
        model_call.messages.append({"role": "system", "content": instructions})
    model_call.messages += before
    if not request["input"] and not before:
        raise request.refusal("input", _INPUT)
    text = request.maybe("input", str)
    if text is not None:
        model_call.messages.append({"role": "user", "content": text})
        return
    items: list[_Item] = []
    for item in request.objects("input", _INPUT):
        kind = item.optional("type", Fields.text) or "message"
        if kind == "additional_tools":
            read_tools(item, model_call, names)
        else:
            items.append((kind, item))
    triggered = bool(items) and items[-1][0] == "compaction_trigger"
    for assistant, run in groupby(items[:-1] if triggered else items, key=_by_assistant):
        if assistant:
            model_call.messages.append(_assistant_message(run, names))
        else:
            model_call.messages += [_other_message(kind, item) for kind, item in run]
    if not model_call.messages:
        raise DialectError("'input' must hold at least one message.")
    if triggered:
        ask_for_summary(model_call)


def _by_assistant(kind_and_item: _Item) -> bool:
    kind, item = kind_and_item
    if kind == "message":
        return bool(item["role"] == "assistant")
    return kind in ("reasoning", "function_call", "custom_tool_call")


def _assistant_message(run: Iterable[_Item], names: ToolNames) -> Message:
    texts, reasoning = list[str](), list[str]()
    tool_calls: list[dict[str, Any]] = []
    call_id = None
    for kind, item in run:
        if kind == "message":
            texts.append(content_text(item, "content", _TEXT_KEYS))
        elif kind == "reasoning":
            reasoning += part_texts(item, "summary", _TEXT_KEYS)
            call_id = signed_call(item.maybe("encrypted_content", str)) or call_id
        else:
            tool_calls.append(_tool_call(kind, item, names))
    # replies encoded here have one text and one summary; several are joined as paragraphs
    return assistant_message("\n\n".join(texts), "\n\n".join(filter(None, reasoning)), tool_calls, call_id)


def _tool_call(kind: str, item: Fields, names: ToolNames) -> dict[str, Any]:
    name = names.of(item.optional("namespace", Fields.text), item.text("name"))
    if kind == "function_call":
        arguments = parse_arguments(item.text("arguments"))
    else:
        arguments = {FREEFORM_ARGUMENT: item.text("input")}
    return message_tool_call(item.identifier("call_id"), name, arguments)


def _other_message(kind: str, item: Fields) -> Message:
    match kind:
        case "message":
            role = item.choice("role", _ROLES)
            content = content_text(item, "content", _TEXT_KEYS)
            return {"role": "user" if role == "user" else "system", "content": content}
        case "function_call_output" | "custom_tool_call_output":
            content = content_text(item, "output", _TEXT_KEYS)
            return {"role": "tool", "content": content, "tool_call_id": item.identifier("call_id")}
        case "compaction":
            summary = unseal(item.maybe("encrypted_content", str))
            if summary is None:
                why = f"'{item.place('encrypted_content')}' was not issued here and cannot be read."
                raise DialectError(why, code="invalid_encrypted_content")
            return {"role": "user", "content": summary}
        case "compaction_trigger":
            why = "is a compaction trigger, which must be the last item"
        case _:
            why = f"has type {described(kind)}, which this model neither issues nor reads"
    raise DialectError(f"'{item.place()}' {why}.")


_COMMON: Shape = {"type": word, "id": identifier, "status": word}
_PARTS: Shape = {"type": word, "text": text, "refusal": text}
_CALL: Shape = {**_COMMON, "call_id": identifier, "name": text, "namespace": label}
_RESULT: Shape = {**_COMMON, "call_id": identifier, "output": _PARTS}
_FORMAT: Shape = {"type": word, "syntax": word, "definition": text}
_FUNCTION: Shape = {"name": label, "description": text, "parameters": fields_of_a_tool, "strict": flag}
_TOOL: Shape = {"type": word, **_FUNCTION, "format": _FORMAT}
_NAMESPACE: Shape = {**_TOOL, "tools": _TOOL}


def _tools(tools: Any) -> list[Any]:
    """Store tools: functions as the model sees them, hosted ones in their recordable form."""
    kept_tools = [
        kept(tool, _NAMESPACE) if tool.get("type") in ("function", "custom", "namespace") else hosted_tool(tool)
        for tool in (tools if isinstance(tools, list) else [])
    ]
    return [tool for tool in kept_tools if tool is not None]


_ITEMS: dict[str, Shape] = {
    "message": {**_COMMON, "role": word, "content": _PARTS},
    "reasoning": {**_COMMON, "summary": _PARTS, "encrypted_content": own_signature},
    "function_call": {**_CALL, "arguments": text},
    "custom_tool_call": {**_CALL, "input": text},
    "function_call_output": _RESULT,
    "custom_tool_call_output": _RESULT,
    "compaction": {**_COMMON, "encrypted_content": text},
    "additional_tools": {**_COMMON, "role": word, "tools": _tools},
}
"""Type of an item -> what is stored of it. A `compaction_trigger` belongs to one request, and is not."""


def kept_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is stored of items that can be decoded and have no images, audio and files."""
    kinds = [item.get("type") or "message" for item in items]
    return [kept(item, _ITEMS[kind]) for item, kind in zip(items, kinds, strict=True) if kind in _ITEMS]
