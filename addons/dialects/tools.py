"""Tools as the model sees them: functions in the OpenAI form, whatever their form on the wire."""

import json
from typing import Any

from rolltap.addons.dialects.types import FREEFORM_ARGUMENT, Tool, parse_arguments

_UNPARSED = "INVALID_JSON"
"""The key under which arguments that are not a JSON object travel as text."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """A tool with JSON arguments, described by a JSON schema."""
    described = {} if description is None else {"description": description}
    function = {"name": name, **described, "parameters": _NO_PARAMETERS if parameters is None else parameters}
    return {"type": "function", "function": function}


def freeform_tool(name: str, description: str | None, grammar: str | None) -> Tool:
    """A function of one text for a tool whose input is free text; its grammar, if any, goes into the description."""
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
    """The text that the model gave a freeform tool; all of the arguments when they are not as described."""
    parsed = parse_arguments(arguments)
    text = parsed.get(FREEFORM_ARGUMENT) if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments


def as_object(arguments: str) -> dict[str, Any]:
    """Sampled arguments as the object that some APIs demand; text that is not one is wrapped, so that `from_object`
    gives back what was sampled."""
    parsed = parse_arguments(arguments)
    if isinstance(parsed, dict) and not _is_wrapped(parsed):
        try:
            json.dumps(parsed, allow_nan=False)
        except (ValueError, RecursionError):
            pass  # Python reads NaN and 1e400, JSON has neither
        else:
            return parsed
    return wrapped(arguments)


def wrapped(arguments: str) -> dict[str, Any]:
    """Arguments that cannot be sent as they are, as the one text of an object."""
    return {_UNPARSED: arguments}


def from_object(arguments: dict[str, Any]) -> Any:
    """The arguments of an echoed call, unwrapped."""
    return parse_arguments(arguments[_UNPARSED]) if _is_wrapped(arguments) else arguments


def _is_wrapped(arguments: dict[str, Any]) -> bool:
    return arguments.keys() == {_UNPARSED} and isinstance(arguments[_UNPARSED], str)
