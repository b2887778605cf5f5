"""Tools as the model sees them: functions in the OpenAI form, independent of their form on the wire."""

import json
from typing import Any

from rolltap.addons.dialects.call import FREEFORM_ARGUMENT, Reply, Tool, parse_arguments

_UNPARSED = "INVALID_JSON"
"""The key of the object that carries arguments which are not a JSON object, as text."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """Return a tool whose arguments are described by a JSON schema."""
    described = {} if description is None else {"description": description}
    function = {"name": name, **described, "parameters": _NO_PARAMETERS if parameters is None else parameters}
    return {"type": "function", "function": function}


def freeform_tool(name: str, description: str | None, grammar: str | None) -> Tool:
    """Return a function with one string argument for a tool that takes free text.

    A grammar becomes part of the description.
    """
    text = description or ""
    if grammar:
        text = f"{text}\n\nThe input must match this grammar:\n{grammar}".strip()
    argument = {FREEFORM_ARGUMENT: {"type": "string"}}
    return function_tool(name, text, {"type": "object", "properties": argument, "required": [FREEFORM_ARGUMENT]})


def freeform_input(arguments: str) -> str:
    """Return the string argument of a call to a freeform tool, or `arguments` unchanged when they have none."""
    parsed = parse_arguments(arguments)
    text = parsed.get(FREEFORM_ARGUMENT) if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments


def calls_as_text(reply: Reply) -> None:
    """Replace the tool calls of a reply, in place, by lines of JSON at the end of its content.

    For requests that forbid tool calls. Their APIs never reply with a call, and harnesses read the text of the reply.
    """
    lines = [
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in reply.tool_calls
    ]
    reply.content = "\n".join(filter(None, [reply.content, *lines]))
    reply.tool_calls = []


def as_object(arguments: str) -> dict[str, Any]:
    """Return sampled arguments as the JSON object that some APIs require.

    Text that is not a JSON object is wrapped; `from_object` unwraps it.
    """
    parsed = parse_arguments(arguments)
    return parsed if isinstance(parsed, dict) and not _is_wrapped(parsed) else wrapped(arguments)


def wrapped(arguments: str) -> dict[str, Any]:
    """Return an object that carries the arguments as text."""
    return {_UNPARSED: arguments}


def from_object(arguments: dict[str, Any]) -> Any:
    """Return the arguments of an echoed call, unwrapped.

    `from_object(as_object(text))` equals `parse_arguments(text)`.
    """
    return parse_arguments(arguments[_UNPARSED]) if _is_wrapped(arguments) else arguments


def _is_wrapped(arguments: dict[str, Any]) -> bool:
    return arguments.keys() == {_UNPARSED} and isinstance(arguments[_UNPARSED], str)
