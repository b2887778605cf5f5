"""The last step of every dialect's decoding: names of tool results, bounds, and options as they may be recorded."""

import json

from rolltap.addons.dialects.fields import LONGEST_NAME
from rolltap.addons.dialects.recordable import recordable, recordable_tools
from rolltap.addons.dialects.types import DialectError, Message, ModelCall

_LONGEST_SCHEMA = 256 * 1024
"""Characters of the JSON schema of a reply. It is written to the run, and the engine makes a grammar of it."""


def decoded(model_call: ModelCall) -> ModelCall:
    """Name the tool results of a decoded request, and bring what is stored of its options to its `recordable` form.

    Raises `DialectError` when the JSON schema of the reply is too long.
    """
    if model_call.schema and len(json.dumps(model_call.schema)) > _LONGEST_SCHEMA:
        raise DialectError(f"The JSON schema of the reply is longer than {_LONGEST_SCHEMA:,} characters.")
    model_call.messages = name_results(model_call.messages)
    names = {tool["function"]["name"] for tool in model_call.tools} | {w.name for w in model_call.wire_tools.values()}
    model_call.requested_sampling = recordable(model_call.requested_sampling, names)
    model_call.hosted_tools = recordable_tools(model_call.hosted_tools)
    return model_call


def name_results(messages: list[Message]) -> list[Message]:
    """Return the messages with the `name` of its tool in each tool message that answers a tool call before it.

    Chat templates print this name. A continued prompt is made from the new messages alone, which lack the call. If
    several calls have the same id, the result answers the last one. A result of an unknown id keeps its own name. Names
    longer than a tool can have are not repeated: many results may answer one call.
    """
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if call["id"] and len(name) <= LONGEST_NAME:
                names[call["id"]] = name
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        named.append(message)
    return named
