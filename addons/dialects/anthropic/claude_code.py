"""Claude Code's rewriting of a tool call's arguments, between the reply that it is given and its echo of that reply.

All of it was seen on the wire (2.1.329). Other programs may speak the Messages API without it, so a request must show
that it is Claude Code's.
"""

import re
from typing import Any

from rolltap.addons.dialects.types import Tool, javascript_number, parse_arguments

_NUMBER = re.compile(r"-?\d{1,300}(\.\d{1,300})?")
_CHANGE_FOLDER = re.compile(r"\bcd [^&|;\n]{1,4096} && ")
_ESCAPED_SEMICOLON = re.compile(r"\\+;")


def is_claude_code(user_id: str | None) -> bool:
    """Whether a request's `metadata.user_id` is Claude Code's: JSON that names a device and a session."""
    match parse_arguments(user_id or ""):
        case {"device_id": str(), "session_id": str()}:
            return True
    return False


def normal_arguments(arguments: dict[str, Any], tool: Tool | None) -> dict[str, Any]:
    """The arguments in a form that is the same before and after Claude Code's rewriting. An `EchoRule`."""
    if isinstance(command := arguments.get("command"), str):
        arguments = {**arguments, "command": _one_backslash(_without_change_of_folder(command))}
    return _without_defaults({key: _plain_text(value) for key, value in arguments.items()}, tool)


def _plain_text(value: Any) -> Any:
    """Claude Code takes the quotes from numbers, true and false: here, all of them are texts."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(javascript_number(value))
        case str():
            return str(javascript_number(float(value))) if _NUMBER.fullmatch(value) else _without_blanks(value)
        case dict():
            return {key: _plain_text(inner) for key, inner in value.items()}
        case list():
            return [_plain_text(inner) for inner in value]
    return value


def _without_blanks(text: str) -> str:
    """Claude Code strips the blanks at line ends from what it writes to files."""
    return "\n".join(line.rstrip() for line in text.split("\n"))  # strips \r too


def _without_change_of_folder(command: str) -> str:
    """Claude Code drops `cd FOLDER && ` where it is in that folder."""
    return _CHANGE_FOLDER.sub("", command)


def _one_backslash(command: str) -> str:
    """Claude Code drops a backslash of two before a semicolon."""
    return _ESCAPED_SEMICOLON.sub(r"\\;", command)


def _without_defaults(arguments: dict[str, Any], tool: Tool | None) -> dict[str, Any]:
    """Claude Code adds the arguments that have a default in the tool's schema."""
    match tool:
        case {"function": {"parameters": {"properties": dict(properties)}}}:
            defaults = {
                name: _plain_text(schema["default"])
                for name, schema in properties.items()
                if isinstance(schema, dict) and "default" in schema
            }
            return {k: v for k, v in arguments.items() if k not in defaults or v != defaults[k]}
    return arguments
