"""The conversation of each call, rebuilt from the rows of the call and its ancestors.

A row holds only the messages after the parent's conversation and reply. It holds no tools when they are the parent's.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rolltap.addons.dialects.model_call import parse_arguments
from rolltap.addons.store.records import Call
from rolltap.trainer.traces.tree import parents_first, path_to

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(slots=True, eq=False)
class CallConversation:
    """The conversation of a call. Stores only the messages that its parent's lacks: a chain of T calls takes O(T)."""

    call: Call
    parent: "CallConversation | None"
    """The recorded parent's conversation; None for a root, and when the parent is not known (see `incomplete`)."""
    new_messages: list[Message]
    """The messages of the request after the parent's conversation and reply, as `dialects.types.Message`."""
    reply: Message | None
    """The assistant message, the arguments of tool calls as JSON text; None when no reply was recorded."""
    tools: list[Tool] | None
    """The tools shown to the model; None when they are not known."""
    incomplete: str | None
    """Why messages of the conversation are missing, in words; None when it is complete."""

    def messages(self) -> list[Message]:
        """Return the messages of the request; when `incomplete`, those that are known."""
        return [message for message, _ in self._sent()]

    def context(self) -> list[int]:
        """Return the indices in `messages` of the assistant messages that were sent with a request.

        No call of the conversation sampled them: a program wrote them, or repeated what another conversation sampled.
        """
        return [i for i, (message, new) in enumerate(self._sent()) if new and message["role"] == "assistant"]

    def _sent(self) -> Iterator[tuple[Message, bool]]:
        """Yield the messages of the request, each with False for the reply of a call before this one."""
        for conversation in path_to(self, lambda conversation: conversation.parent):
            yield from ((message, True) for message in conversation.new_messages)
            if conversation is not self and conversation.reply is not None:
                yield conversation.reply, False


def rebuild_conversations(calls: Sequence[Call]) -> list[CallConversation]:
    """Return the conversation of each call of one session, in the order of `calls`, which may be any.

    A call is `incomplete` when its parent is not among the calls or has no reply, when its ancestors form a cycle, and
    when it is a root without recorded messages. Its descendants are then incomplete as well.
    """
    known = {call.call_id: call for call in calls}
    rebuilt: dict[str, CallConversation] = {}
    for call_id, parent_id in parents_first({call.call_id: call.parent_id for call in calls}):
        call, parent = known[call_id], None if parent_id is None else rebuilt[parent_id]
        messages = json.loads(call.messages)
        tools = json.loads(call.tools) if call.tools is not None else parent.tools if parent else None
        reply = json.loads(call.reply) if call.reply is not None else None
        if parent is not None:
            fault = parent.incomplete if parent.reply is not None else f"its parent {parent_id} has no reply"
        elif call.parent_id is not None:
            cycle = call.parent_id in known
            fault = "its ancestors form a cycle" if cycle else f"its parent {call.parent_id} is not in the run"
        else:
            fault = None if messages else "its messages were not recorded"
        rebuilt[call_id] = CallConversation(call, parent, messages, reply, tools, fault)
    return [rebuilt[call.call_id] for call in calls]


def on_the_wire(message: Message) -> Message:
    """Return a message in Chat Completions' wire format: tool-call arguments as JSON text, no keys of rolltap."""
    return _with_arguments(
        message, lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    )


def for_template(message: Message) -> Message:
    """Return a message as chat templates take it: tool-call arguments parsed, or as text when they are not JSON."""
    return _with_arguments(message, parsed_arguments)


def parsed_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call, parsed if they are JSON text."""
    return parse_arguments(arguments) if isinstance(arguments, str) else arguments


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    message = {key: value for key, value in message.items() if key != "call_id"}
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message
