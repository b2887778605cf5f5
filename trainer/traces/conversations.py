"""The conversation of each call, rebuilt from what its row adds to its parent's.

A row holds only the messages after the parent's conversation and reply, and no tools where they are the parent's.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rolltap.addons.store.records import Call
from rolltap.trainer.traces.tree import parents_first, path_to

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(slots=True, eq=False)
class CallConversation:
    """A call in its conversation. It holds only its own messages, so T turns hold O(T) of them."""

    call: Call
    parent: "CallConversation | None"
    """The turn of the recorded parent; None for a root, and where `incomplete` says why."""
    new_messages: list[Message]
    """The messages of the request after the parent's conversation and reply, as `dialects.types.Message`."""
    reply: Message | None
    """The assistant message, its arguments as JSON text; None when the call did not complete."""
    tools: list[Tool] | None
    """The tools shown to the model; None when they are not known."""
    incomplete: str | None
    """Why the messages are not the whole conversation, in words; None when they are."""

    def messages(self) -> list[Message]:
        """The messages of the request: what is known of them when `incomplete`."""
        messages: list[Message] = []
        for turn in path_to(self, lambda turn: turn.parent):
            messages += turn.new_messages
            if turn is not self and turn.reply is not None:
                messages.append(turn.reply)
        return messages


def rebuild_conversations(calls: Sequence[Call]) -> list[CallConversation]:
    """The turns of one session's calls, in the order of `calls`, which may be any.

    Nothing is guessed: a call is `incomplete`, and so is what continues it, when its parent is not among the calls or
    has no reply, when its ancestors form a circle, and when no messages were recorded.
    """
    known = {call.call_id: call for call in calls}
    turns: dict[str, CallConversation] = {}
    for call_id, parent_id in parents_first({call.call_id: call.parent_id for call in calls}):
        call, parent = known[call_id], None if parent_id is None else turns[parent_id]
        messages = json.loads(call.messages)
        tools = json.loads(call.tools) if call.tools is not None else parent.tools if parent else None
        reply = json.loads(call.reply) if call.reply is not None else None
        if parent is not None:
            fault = parent.incomplete if parent.reply is not None else f"its parent {parent_id} has no reply"
        elif call.parent_id is not None:
            circle = call.parent_id in known
            fault = "its ancestors form a circle" if circle else f"its parent {call.parent_id} is not in the run"
        else:
            fault = None if messages else "its messages were not recorded"
        turns[call_id] = CallConversation(call, parent, messages, reply, tools, fault)
    return [turns[call.call_id] for call in calls]


def on_the_wire(message: Message) -> Message:
    """A message as Chat Completions writes it: the arguments of tool calls as JSON text, none of our own keys."""
    return _with_arguments(message, _as_text)


def for_template(message: Message) -> Message:
    """A message as chat templates take it: arguments parsed, and those that are not JSON as the sampled text."""
    return _with_arguments(message, _parsed)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    message = {key: value for key, value in message.items() if key != "call_id"}
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
