"""The part of a cached content that a session stores."""

from typing import Any

from rolltap.addons.dialects.google.protobuf import camel_case_fields
from rolltap.addons.dialects.kept import (
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

_CALL: Shape = {"id": identifier, "name": text, "args": fields_of_a_tool}
_RESPONSE: Shape = {"id": identifier, "name": text, "response": fields_of_a_tool, "parts": {"text": text}}
_PARTS: Shape = {
    **{"text": text, "thought": flag, "thoughtSignature": own_signature},
    **{"functionCall": _CALL, "functionResponse": _RESPONSE},
}
_CONTENT: Shape = {"role": word, "parts": _PARTS}
_FUNCTION: Shape = {
    **{"name": label, "description": text},
    **{"parameters": fields_of_a_tool, "parametersJsonSchema": fields_of_a_tool},
}


def _names(names: Any) -> list[str]:
    return [name for name in names if label(name)] if isinstance(names, list) else []


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Store tools: functions as the model sees them, hosted ones in their recordable form."""
    return [_tool(camel_case_fields(tool)) for tool in (tools if isinstance(tools, list) else [tools])]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    functions = tool.pop("functionDeclarations", None)
    stored = {} if functions is None else {"functionDeclarations": kept(functions, _FUNCTION, camel_case_fields)}
    for kind, value in tool.items():
        stored |= hosted_tool({kind: value}) or {}
    return stored


_CACHED: Shape = {
    **{"model": label, "displayName": label, "systemInstruction": _CONTENT, "contents": _CONTENT},
    **{"tools": _tools, "toolConfig": {"functionCallingConfig": {"mode": word, "allowedFunctionNames": _names}}},
}


def kept_content(content: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a cached content that can be decoded and has no images, audio and files."""
    stored: dict[str, Any] = kept(content, _CACHED, camel_case_fields)
    return stored
