"""Conversations on which renderers, chat templates and families are tried at the start."""

from rolltap.addons.dialects.call import Message, assistant_message, message_tool_call
from rolltap.addons.dialects.dialect import name_results
from rolltap.addons.dialects.tools import function_tool

_SCHEMA = {name: {"type": name} for name in ("string", "integer", "boolean", "array", "object")}
_PARAMETERS = {"type": "object", "properties": _SCHEMA}
TOOLS = [function_tool(name, "Looks.", _PARAMETERS) for name in ("look", "listen")]
_ONE = message_tool_call("functions.look:0", "look", {"string": "é"})
_AWKWARD = message_tool_call(
    "functions.listen:1",
    "listen",
    {
        "string": ' "x"\n<y> {z}, 3 ',
        "integer": 3,
        "boolean": True,
        "array": [1, {"a": "b"}],
    },
)
USER: Message = {"role": "user", "content": "Look."}
TURNS: dict[str, Message] = {
    "one call": assistant_message("", "", [_ONE]),
    "awkward arguments": assistant_message("", "", [_AWKWARD]),
    "two calls": assistant_message("", "", [_ONE, _AWKWARD]),
    "text": assistant_message("Nothing there.", "", []),
    "reasoning": assistant_message("Nothing there.", "I look around.", []),
    "reasoning and a call": assistant_message("", "I look around.", [_ONE]),
}
"""Turns that a family must read as the model's prompts write them."""


def answered(turn: Message) -> list[Message]:
    """Return a conversation of a user's message, a turn with calls, and their results."""
    messages = [USER, turn]
    for call in turn["tool_calls"]:
        messages.append({"role": "tool", "content": "Seen.", "tool_call_id": call["id"]})
    return name_results(messages)
