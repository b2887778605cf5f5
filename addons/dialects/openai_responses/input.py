"""The input items of the Responses API as messages.

What one reply issues as several items (reasoning, message, tool calls) comes back as the same items in a row, and is
one assistant message again.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rolltap.addons.dialects.openai_responses.compaction import ask_for_summary, unseal
from rolltap.addons.dialects.openai_responses.tools import ToolNames, read_tools
from rolltap.addons.dialects.tools import echoed_call
from rolltap.addons.dialects.types import (
    FREEFORM_ARGUMENT,
    DialectError,
    Message,
    ModelCall,
    parse_arguments,
    signed_call,
)

_Placed = tuple[str, dict[str, Any]]
"""An item and where it stands in the request."""

_TEXTS = {"input_text": "text", "output_text": "text", "summary_text": "text", "text": "text", "refusal": "refusal"}
"""The parts that are text, and the field that holds it."""


def decode_input(request: dict[str, Any], model_call: ModelCall, names: ToolNames) -> None:
    """Adds the messages of `instructions` and `input` to `model_call`, and the tools that stand among the items.

    Raises `DialectError` for an item that is unknown or holds more than text.
    """
    instructions, items = request.get("instructions"), request.get("input")
    if instructions is not None:
        model_call.messages.append({"role": "system", "content": _string(instructions, "instructions")})
    if not isinstance(items, str | list) or not items:
        raise DialectError("'input' must be a non-empty string or list of items.")
    if isinstance(items, str):
        model_call.messages.append({"role": "user", "content": items})
        return
    placed: list[_Placed] = []
    for i, item in enumerate(items):
        if not isinstance(item, dict) or not isinstance(item.get("type"), str | None):
            raise DialectError(f"'input[{i}]' must be an object whose type, if any, is a string.")
        if _kind(item) == "additional_tools":
            read_tools(item.get("tools"), f"input[{i}].tools", model_call, names)
        else:
            placed.append((f"input[{i}]", item))
    triggered = bool(placed) and _kind(placed[-1][1]) == "compaction_trigger"
    for assistant, run in groupby(placed[:-1] if triggered else placed, key=lambda item: _by_assistant(item[1])):
        if assistant:
            model_call.messages.append(_assistant_message(run, names))
        else:
            model_call.messages.extend(_other_message(item, where) for where, item in run)
    if triggered:
        ask_for_summary(model_call)
    if not model_call.messages:
        raise DialectError("'input' must hold at least one message.")


def _kind(item: dict[str, Any]) -> str:
    return item.get("type") or ("message" if "role" in item else "item_reference")


def _by_assistant(item: dict[str, Any]) -> bool:
    kind = _kind(item)
    if kind == "message":
        return item.get("role") == "assistant"
    return kind in ("reasoning", "function_call", "custom_tool_call")


def _assistant_message(run: Iterable[_Placed], names: ToolNames) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    call_id = None
    for where, item in run:
        kind = _kind(item)
        if kind == "message":
            texts.append(_text(item.get("content"), f"{where}.content"))
        elif kind == "reasoning":
            reasoning.extend(_summary(item.get("summary"), f"{where}.summary"))
            call_id = signed_call(item.get("encrypted_content")) or call_id
        else:
            calls.append(_tool_call(item, where, names))
    # A reply has one text and one summary. Where there are more, they are paragraphs.
    message: Message = {"role": "assistant", "content": "\n\n".join(texts)}
    if any(reasoning):
        message["reasoning_content"] = "\n\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if call_id is not None:
        message["call_id"] = call_id
    return message


def _summary(parts: Any, where: str) -> list[str]:
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise DialectError(f"'{where}' must be a list of parts.")
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _tool_call(item: dict[str, Any], where: str, names: ToolNames) -> dict[str, Any]:
    name = _string(item.get("name"), f"{where}.name")
    namespace = item.get("namespace")
    if namespace is not None:
        namespace = _string(namespace, f"{where}.namespace")
    if item["type"] == "function_call":
        arguments = parse_arguments(_string(item.get("arguments"), f"{where}.arguments"))
    else:
        arguments = {FREEFORM_ARGUMENT: _string(item.get("input"), f"{where}.input")}
    return echoed_call(_string(item.get("call_id"), f"{where}.call_id"), names.of(namespace, name), arguments)


def _other_message(item: dict[str, Any], where: str) -> Message:
    kind = _kind(item)
    if kind == "message":
        role = item.get("role")
        if role not in ("system", "developer", "user"):
            raise DialectError(f"'{where}.role' must be system, developer, user or assistant.")
        content = _text(item.get("content"), f"{where}.content")
        return {"role": "user" if role == "user" else "system", "content": content}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {
            "role": "tool",
            "content": _text(item.get("output"), f"{where}.output"),
            "tool_call_id": _string(item.get("call_id"), f"{where}.call_id"),
        }
    if kind == "compaction":
        summary = unseal(item.get("encrypted_content"))
        if summary is None:
            raise DialectError(
                f"'{where}.encrypted_content' was not issued here and cannot be read.", code="invalid_encrypted_content"
            )
        return {"role": "user", "content": summary}
    if kind == "item_reference":
        raise DialectError(f"'{where}' refers to an item by its id, and items are not stored. Send the item itself.")
    if kind == "compaction_trigger":
        raise DialectError(f"'{where}' is a compaction trigger, which must be the last item.")
    raise DialectError(f"'{where}' has type '{kind}', which this model neither issues nor reads.")


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DialectError(f"'{where}' must be a string or a list of parts.")
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise DialectError(f"'{where}' must be a part with a type.")
    if kind not in _TEXTS:
        raise DialectError(f"'{where}' has type '{kind}'; this model takes text only.")
    return _string(part.get(_TEXTS[kind]), f"{where}.{_TEXTS[kind]}")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DialectError(f"'{where}' must be a string.")
    return value
