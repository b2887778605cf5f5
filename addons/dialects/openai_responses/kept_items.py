"""The part of the items of a conversation that a session stores."""

from typing import Any

from rolltap.addons.dialects.stored import (
    Shape,
    fields_of_a_tool,
    flag,
    hosted_tool,
    identifier,
    kept,
    label,
    own_signature,
    text,
    word,
)

_COMMON: Shape = {"type": word, "id": identifier, "status": word}
_PARTS: Shape = {"type": word, "text": text, "refusal": text}
_CALL: Shape = {**_COMMON, "call_id": identifier, "name": text, "namespace": label}
_RESULT: Shape = {**_COMMON, "call_id": identifier, "output": _PARTS}
_FORMAT: Shape = {"type": word, "syntax": word, "definition": text}
_TOOL: Shape = {
    **{"type": word, "name": label, "description": text},
    **{"parameters": fields_of_a_tool, "strict": flag, "format": _FORMAT},
}
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
