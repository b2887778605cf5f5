"""The conversation of each call, rebuilt from the rows of the call and its ancestors.

A row holds only the messages after the parent's conversation and reply. It holds no tools when they
are the parent's.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rolltap.addons.dialects.json_values import parse_arguments
from rolltap.addons.store.records import Call
from rolltap.trainer.traces.tree import parents_first, path_to

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(slots=True, eq=False)
class CallConversation:
    """The conversation of a call.

    Stores only the messages that its parent's lacks: a chain of T calls takes O(T).
    """

    call: Call
    parent: "CallConversation | None"
    """The recorded parent's; None for a root, and when the parent is not known."""
    new_messages: list[Message]
    """The messages of the request after the parent's conversation and reply, as `Call` has them."""
    reply: Message | None
    """The assistant message, the arguments of tool calls as JSON text; None without a reply."""
    tools: list[Tool] | None
    """The tools shown to the model; None when they are not known."""
    incomplete: str | None
    """Why messages of the conversation are missing, in words; None when it is complete."""

    def messages(self) -> list[Message]:
        """Return the messages of the request; when `incomplete`, those that are known."""
        return [message for message, _ in self._sent()]

    def context(self) -> list[int]:
        """Return the indices in `messages` of the assistant messages that were sent with a request.

        No call of the conversation sampled them: a program wrote them, or repeated what another
        conversation sampled.
        """
        found = []
        for number, (message, is_new) in enumerate(self._sent()):
            if is_new and message["role"] == "assistant":
                found.append(number)
        return found

    def _sent(self) -> Iterator[tuple[Message, bool]]:
        """Yield the messages of the request, each with False for the reply of a call before."""
        for each in path_to(self, attrgetter("parent")):
            for message in each.new_messages:
                yield message, True
            if each is not self and each.reply is not None:
                yield each.reply, False


def rebuild_conversations(calls: Sequence[Call]) -> list[CallConversation]:
    """Return the conversation of each call of one session, in the order of `calls`.

    A call is `incomplete` when its parent is not among the calls or has no reply, when its
    ancestors form a cycle, and when it is a root without recorded messages. Its descendants are
    then incomplete as well.
    """
    known = {call.call_id: call for call in calls}
    parents = {call_id: call.parent_id for call_id, call in known.items()}
    rebuilt: dict[str, CallConversation] = {}
    for call_id, parent_id in parents_first(parents):
        call = known[call_id]
        messages = call.parsed_messages
        tools = call.parsed_tools
        parent = None
        incomplete = None
        if parent_id is not None:
            parent = rebuilt[parent_id]
            if call.tools is None:
                tools = parent.tools
            incomplete = parent.incomplete
            if parent.reply is None:
                incomplete = f"its parent {parent_id} has no reply"
        elif call.parent_id in known:
            incomplete = "its ancestors form a cycle"
        elif call.parent_id is not None:
            incomplete = f"its parent {call.parent_id} is not in the run"
        elif not messages:
            incomplete = "its messages were not recorded"
        reply = call.parsed_reply
        rebuilt[call_id] = CallConversation(call, parent, messages, reply, tools, incomplete)
    return [rebuilt[call.call_id] for call in calls]


def on_the_wire(message: Message) -> Message:
    """Return a message as Chat Completions' wire has it.

    Arguments of tool calls are JSON text, and there are no keys of rolltap.
    """
    return _with_arguments(message, _argument_text)


def for_template(message: Message) -> Message:
    """Return a message as chat templates take it.

    Arguments of tool calls are parsed, or text when they are not JSON.
    """
    return _with_arguments(message, parsed_arguments)


def parsed_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call, parsed if they are JSON text."""
    if isinstance(arguments, str):
        return parse_arguments(arguments)
    return arguments


def _argument_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    changed = dict(message)
    changed.pop("call_id", None)
    if message.get("tool_calls"):
        changed["tool_calls"] = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            function["arguments"] = change(function["arguments"])
            changed["tool_calls"].append({**call, "function": function})
    return changed
