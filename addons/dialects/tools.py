"""Tools as the model sees them: functions in the OpenAI form, independent of their form on the
wire."""

import json
from typing import Any

from rolltap.addons.dialects.call import FREEFORM_ARGUMENT, Reply, Tool
from rolltap.addons.dialects.json_values import MOST_LEVELS, Object, parse_arguments

_UNPARSED = "INVALID_JSON"
"""The key of the object that carries arguments which are not a JSON object, as text."""
_NO_PARAMETERS: Object = {"type": "object", "properties": {}}


def function_tool(
    name: str,
    description: str | None,
    parameters: Object | None,
) -> Tool:
    """Return a tool whose arguments are described by a JSON schema."""
    function: Object = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = _NO_PARAMETERS if parameters is None else parameters
    return {"type": "function", "function": function}


def freeform_tool(
    name: str,
    description: str | None,
    grammar: str | None,
) -> Tool:
    """Return a function with one string argument for a tool that takes free text.

    A grammar becomes part of the description.
    """
    text = description or ""
    if grammar:
        text = f"{text}\n\nThe input must match this grammar:\n{grammar}".strip()
    parameters = {
        "type": "object",
        "properties": {FREEFORM_ARGUMENT: {"type": "string"}},
        "required": [FREEFORM_ARGUMENT],
    }
    return function_tool(name, text, parameters)


def freeform_input(arguments: str) -> str:
    """Return the text of a call to a freeform tool, or `arguments` if they have none."""
    match parse_arguments(arguments):
        case {"input": str(text)}:  # FREEFORM_ARGUMENT
            return text
    return arguments


def calls_as_text(reply: Reply) -> None:
    """Replace the tool calls of a reply, in place, by lines of JSON at the end of its content.

    For requests that forbid tool calls. Their APIs never reply with a call, and harnesses read the
    text of the reply.
    """
    lines = [reply.content] if reply.content else []
    for call in reply.tool_calls:
        fields = {"name": call.name, "arguments": call.arguments}
        lines.append(json.dumps(fields, ensure_ascii=False))
    reply.content = "\n".join(lines)
    reply.tool_calls = []


def as_object(arguments: str, most_levels: int = MOST_LEVELS) -> Object:
    """Return sampled arguments as the JSON object that some APIs require.

    Text that is not a JSON object, or one of too many levels, is wrapped; `from_object` unwraps it.
    """
    parsed = parse_arguments(arguments, most_levels)
    if isinstance(parsed, dict) and not _is_wrapped(parsed):
        return parsed
    return {_UNPARSED: arguments}


def from_object(arguments: Object) -> Any:
    """Return the arguments of an echoed call, unwrapped.

    `from_object(as_object(text))` equals `parse_arguments(text)`.
    """
    if _is_wrapped(arguments):
        return parse_arguments(arguments[_UNPARSED])
    return arguments


def _is_wrapped(arguments: Object) -> bool:
    return arguments.keys() == {_UNPARSED} and isinstance(arguments[_UNPARSED], str)
