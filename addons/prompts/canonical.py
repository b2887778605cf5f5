"""A message as a string that is equal for equal messages, however a harness wrote them.

Both the reply that was issued and its echo are brought to this form, so it may lose what harnesses change in an echo.
A tool call's id is ours and in the string: two calls are never taken for one. What is lost:

- the order of keys and how a number is written (1.0, 1e0, more digits than JavaScript keeps);
- what Claude Code changes in arguments: it adds those that have a default in the tool's schema; takes the quotes from
  numbers, true and false; strips the blanks at line ends from what it writes to files; and drops from a command
  `cd FOLDER && ` where it is in that folder, and a backslash of two before a semicolon;
- blank text before a tool call, which Claude Code drops.
"""

import json
import re
from typing import Any

from rolltap.addons.dialects.types import Message, Tool

Defaults = dict[str, dict[str, Any]]
"""Tool -> argument -> its default, of those that have one, as `canonical` writes it."""

_SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
_NUMBER = re.compile(r"-?\d{1,300}(\.\d{1,300})?")
_CHANGE_FOLDER = re.compile(r"\bcd [^&|;\n]{1,4096} && ")
_ESCAPED_SEMICOLON = re.compile(r"\\+;")


def canonical(message: Message, defaults: Defaults) -> str:
    """`message` as a string. The reasoning and the opaque fields have no part in it."""
    kept = {key: value for key, value in message.items() if value and key not in ("reasoning_content", "call_id")}
    if message["role"] == "assistant" and not message["content"].strip():
        kept.pop("content", None)
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call, defaults) for call in kept["tool_calls"]]
    return _SORTED.encode(kept)


def tool_defaults(tools: list[Tool]) -> Defaults:
    """The defaults in the tools' schemas."""
    defaults: Defaults = {}
    for tool in tools:
        parameters = tool["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(properties, dict):
            defaults[tool["function"]["name"]] = {
                name: _argument(schema["default"])
                for name, schema in properties.items()
                if isinstance(schema, dict) and "default" in schema
            }
    return defaults


def _call(call: dict[str, Any], defaults: Defaults) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        normal = _arguments(parsed, defaults.get(name, {})) if isinstance(parsed, dict) else _argument(parsed)
    except (ValueError, RecursionError):
        normal = arguments  # what is not JSON stays the text that it is
    return {"id": call["id"], "name": name, "arguments": normal}


def _arguments(arguments: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in arguments.items():
        if key == "command" and isinstance(value, str):
            value = _ESCAPED_SEMICOLON.sub(r"\\;", _CHANGE_FOLDER.sub("", value))
        value = _argument(value)
        if key not in defaults or value != defaults[key]:
            kept[key] = value
    return kept


def _argument(value: Any) -> Any:
    """A value of which numbers, true and false are texts."""
    if isinstance(value, str):
        return _number(float(value)) if _NUMBER.fullmatch(value) else _lines(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, dict):
        return {key: _argument(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_argument(inner) for inner in value]
    return value


def _number(value: float) -> str:
    """JavaScript has one kind of number, and writes 1.0 as 1."""
    try:
        value = float(value)
        return str(int(value) if value.is_integer() else value)
    except OverflowError:
        return str(value)


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n"))  # strips \r too
