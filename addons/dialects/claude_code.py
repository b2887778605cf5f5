"""A normal form for tool call arguments that Claude Code rewrites between a reply and its echo of
the reply.

The rewriting was observed on the wire with Claude Code 2.1.329:

| sampled | sent back |
| --- | --- |
| numbers and booleans as texts | as numbers and booleans |
| white space at the ends of lines, `\\r` included | without |
| an argument is left out | with the default of the tool's schema |
| `cd FOLDER && `, where Claude Code is in that folder | without |
| two backslashes before `;` | one |

Other clients of the Messages API may not rewrite arguments, so the rule is used only for requests
that are identified as Claude Code's.
"""

import re
from typing import Any

from rolltap.addons.dialects.call import Tool
from rolltap.addons.dialects.json_values import Object, javascript_number, parse_arguments

_LONGEST_DEFAULT = 256
_NUMBER = re.compile(r"-?\d{1,300}(\.\d{1,300})?")
# Each of these consumes a run of characters whole, so that texts of a session cost linear time.
_COMMAND = re.compile(r"([^&|;\n]+)(&& )?")
_CHANGE_FOLDER = re.compile(r"\bcd .")
_BACKSLASHES = re.compile(r"\\+(;?)")


def is_claude_code(user_id: str | None) -> bool:
    """Return True for Claude Code's `metadata.user_id`: JSON with a device id and a session id."""
    match parse_arguments(user_id or ""):
        case {"device_id": str(), "session_id": str()}:
            return True
    return False


def normal_arguments(arguments: Object, tool: Tool | None) -> Object:
    """Return the normal form of `arguments`: an `EchoRule` for Claude Code."""
    properties: Object = {}
    match tool:
        case {"function": {"parameters": {"properties": dict(properties)}}}:
            pass
    normal: Object = {}
    for key, value in arguments.items():
        if key == "command" and isinstance(value, str):
            value = _BACKSLASHES.sub(_one_backslash, _COMMAND.sub(_without_cd, value))
        value = _plain_text(value)
        if not _is_default(value, properties.get(key)):
            normal[key] = value
    return normal


def _plain_text(value: Any) -> Any:
    """Return `value` with numbers and booleans as texts, and without white space at line ends."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return str(javascript_number(value))
        case str() if _NUMBER.fullmatch(value):
            return str(javascript_number(float(value)))
        case str():
            return "\n".join(line.rstrip() for line in value.split("\n"))
        case dict():
            return {key: _plain_text(inner) for key, inner in value.items()}
        case list():
            return [_plain_text(inner) for inner in value]
    return value


def _one_backslash(match: re.Match[str]) -> str:
    return "\\;" if match[1] else match[0]


def _without_cd(match: re.Match[str]) -> str:
    """Return a part of a command without the `cd FOLDER && ` at its end."""
    text, end = match.groups()
    if end and text.endswith(" "):
        found = _CHANGE_FOLDER.search(text, 0, len(text) - 1)
        if found:
            return text[: found.start()]
    return match[0]


def _is_default(value: Any, schema: Any) -> bool:
    """Return True when `value`, as plain text, is the default in an argument's schema.

    Long texts and objects with fields do not count: they would be compared with each call of a
    conversation.
    """
    match schema:
        case {"default": str(default)}:
            return len(default) <= _LONGEST_DEFAULT and bool(value == _plain_text(default))
        case {"default": list(default) | dict(default)}:
            return not default and value == default
        case {"default": default}:
            return bool(value == _plain_text(default))
    return False
