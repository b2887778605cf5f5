"""A message as a string that is equal for equal messages, however a harness wrote them.

Both the reply that was issued and its echo are brought to this form, so it may lose what harnesses change in an echo.
A tool call's id is ours and in the string: two calls are never taken for one. What is lost:

- the order of keys and how a number is written (1.0, 1e0, more digits than JavaScript keeps);
- whether arguments that are a JSON text were parsed once or twice;
- blank text of the assistant, which APIs refuse and harnesses drop;
- what the request's own `echo_rule` says that its harness does to arguments.
"""

import json
from typing import Any

from rolltap.addons.dialects.types import Message, ModelCall, javascript_number

_SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def canonical(message: Message, model_call: ModelCall) -> str:
    """A message of a request or of the reply to it as a string; its reasoning and opaque fields have no part in it."""
    kept = {key: value for key, value in message.items() if value and key not in ("reasoning_content", "call_id")}
    if message["role"] == "assistant" and not message["content"].strip():
        kept.pop("content", None)
    if "tool_calls" in kept:
        kept["tool_calls"] = [_call(call, model_call) for call in kept["tool_calls"]]
    return _SORTED.encode(kept)


def _call(call: dict[str, Any], model_call: ModelCall) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    parsed = arguments
    try:
        while isinstance(parsed, str):  # an echo may have been parsed once already
            parsed = json.loads(parsed)
        if model_call.echo_rule is not None and isinstance(parsed, dict):
            tool = next((tool for tool in model_call.tools if tool["function"]["name"] == name), None)
            parsed = model_call.echo_rule(parsed, tool)
        normal = _numbers(parsed)
    except (ValueError, RecursionError):
        normal = parsed  # what is not JSON stays the text that it is
    return {"id": call["id"], "name": name, "arguments": normal}


def _numbers(value: Any) -> Any:
    """A value with its numbers as JavaScript writes them."""
    match value:
        case bool():
            return value
        case int() | float():
            return javascript_number(value)
        case dict():
            return {key: _numbers(inner) for key, inner in value.items()}
        case list():
            return [_numbers(inner) for inner in value]
    return value
