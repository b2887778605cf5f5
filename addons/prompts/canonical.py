"""The canonical form of a message, for comparing an issued reply with the harness's echo of it.

Both are brought to this form, so that changes which harnesses make in an echo do not matter. Tool call ids are part of
the form: calls with different ids compare as different. The form ignores:

- the order of keys, and how a number is written (1.0, 1e0, more digits than JavaScript keeps);
- how many times arguments were encoded as JSON text;
- empty fields, and blank text of the assistant, which APIs refuse and harnesses drop;
- what the request's `echo_rule` says that its harness does to arguments.
"""

import json
from typing import Any

from rolltap.addons.dialects.types import Message, ModelCall, javascript_number

_SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def canonical(message: Message, model_call: ModelCall) -> str:
    """Return the canonical form of a message of a request, or of the reply to it.

    Reasoning and the issuing call (`call_id`) are left out.
    """
    kept = {key: value for key, value in message.items() if value and key not in ("reasoning_content", "call_id")}
    if message["role"] == "assistant" and not message["content"].strip():
        kept.pop("content", None)
    if "tool_calls" in kept:
        kept["tool_calls"] = [_canonical_tool_call(tool_call, model_call) for tool_call in kept["tool_calls"]]
    return _SORTED.encode(kept)


def _canonical_tool_call(tool_call: dict[str, Any], model_call: ModelCall) -> dict[str, Any]:
    name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
    parsed = arguments
    try:
        while isinstance(parsed, str):  # the arguments of an echo may be parsed already
            parsed = json.loads(parsed)
        if model_call.echo_rule is not None and isinstance(parsed, dict):
            tool = next((tool for tool in model_call.tools if tool["function"]["name"] == name), None)
            parsed = model_call.echo_rule(parsed, tool)
        compared = _canonical_numbers(parsed)
    except (ValueError, RecursionError):
        compared = parsed  # text that is not JSON, and values nested too deeply, are compared as they are
    return {"id": tool_call["id"], "name": name, "arguments": compared}


def _canonical_numbers(value: Any) -> Any:
    """Return `value` with each number replaced by its `javascript_number`."""
    match value:
        case bool():
            return value
        case int() | float():
            return javascript_number(value)
        case dict():
            return {key: _canonical_numbers(inner) for key, inner in value.items()}
        case list():
            return [_canonical_numbers(inner) for inner in value]
    return value
