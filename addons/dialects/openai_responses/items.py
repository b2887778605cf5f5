"""Items of the Responses API, decoded to messages.

One reply is several items: reasoning, message, tool calls. Harnesses send them back as consecutive items, which are
decoded to one assistant message.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rolltap.addons.dialects.call import (
    FREEFORM_ARGUMENT,
    DialectError,
    Message,
    ModelCall,
    assistant_message,
    message_tool_call,
    parse_arguments,
    signed_call,
)
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.json_values import described
from rolltap.addons.dialects.openai import content_text, hide_media, part_texts
from rolltap.addons.dialects.openai_responses.reply import ask_for_summary, unseal
from rolltap.addons.dialects.openai_responses.tools import ToolNames, read_tools

_Item = tuple[str, Fields]
"""The type of an item, and the item."""
_INPUT = "a non-empty string or list of items"
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_KEYS = dict.fromkeys(("input_text", "output_text", "summary_text", "text"), "text") | {"refusal": "refusal"}


def hide_items(request: Fields) -> int:
    """Replace the images, audio and files of the input: see `hide`."""
    return hide_media(request.values, ("input", "content"), ("input", "output"))


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
