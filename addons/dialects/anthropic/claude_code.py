"""A normal form for tool call arguments that Claude Code rewrites between a reply and its echo of the reply.

The rewriting was observed on the wire with Claude Code 2.1.329. Other clients of the Messages API may not rewrite
arguments, so the rule is used only for requests that are identified as Claude Code's.
"""

import re
from typing import Any

from rolltap.addons.dialects.call import Tool, javascript_number, parse_arguments

_LONGEST_DEFAULT = 256
_NUMBER = re.compile(r"-?\d{1,300}(\.\d{1,300})?")
# Each of these consumes a run of characters whole, so that texts of a session cost linear time.
_COMMAND = re.compile(r"([^&|;\n]+)(&& )?")
_CHANGE_FOLDER = re.compile(r"\bcd .")
_BACKSLASHES = re.compile(r"\\+(;?)")


def is_claude_code(user_id: str | None) -> bool:
    """Return True when a request's `metadata.user_id` is Claude Code's: JSON with a device id and a session id."""
    match parse_arguments(user_id or ""):
        case {"device_id": str(), "session_id": str()}:
            return True
    return False


def normal_arguments(arguments: dict[str, Any], tool: Tool | None) -> dict[str, Any]:
    """Return the normal form of `arguments`: an `EchoRule` for Claude Code."""
    if isinstance(command := arguments.get("command"), str):
        # Claude Code removes `cd FOLDER && ` when it is in that folder already, and one of two backslashes before `;`
        command = _BACKSLASHES.sub(lambda match: "\\;" if match[1] else match[0], _COMMAND.sub(_without_cd, command))
        arguments = {**arguments, "command": command}
    return _without_defaults({key: _plain_text(value) for key, value in arguments.items()}, tool)


def _plain_text(value: Any) -> Any:
    """Return `value` with numbers and booleans as strings, and without white space at line ends, `\\r` included.

    Claude Code turns "1" and "true" into 1 and true, and strips the white space from file contents.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(javascript_number(value))
        case str():
            if _NUMBER.fullmatch(value):
                return str(javascript_number(float(value)))
            return "\n".join(line.rstrip() for line in value.split("\n"))
        case dict():
            return {key: _plain_text(inner) for key, inner in value.items()}
        case list():
            return [_plain_text(inner) for inner in value]
    return value


def _without_cd(match: re.Match[str]) -> str:
    """Return a part of a command without the `cd FOLDER && ` at its end."""
    text, end = match.groups()
    found = _CHANGE_FOLDER.search(text, 0, len(text) - 1) if end and text.endswith(" ") else None
    return text[: found.start()] if found else match[0]


def _without_defaults(arguments: dict[str, Any], tool: Tool | None) -> dict[str, Any]:
    """Return the arguments that differ from the defaults in the tool's schema: Claude Code adds missing defaults."""
    match tool:
        case {"function": {"parameters": {"properties": dict(properties)}}}:
            return {key: value for key, value in arguments.items() if not _is_default(value, properties.get(key))}
    return arguments


def _is_default(value: Any, schema: Any) -> bool:
    """Return True when `value`, as plain text, is the default in an argument's schema.

    Long texts and objects with fields do not count: they would be compared with each call of a conversation.
    """
    if not isinstance(schema, dict) or "default" not in schema:
        return False
    default = schema["default"]
    if isinstance(default, str | list | dict) and len(default) > (_LONGEST_DEFAULT if isinstance(default, str) else 0):
        return False
    return bool(value == _plain_text(default))
