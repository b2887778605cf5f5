"""Completed calls of a session, and requests that name them by the ids of their replies."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from rolltap.addons.dialects.call import (
    DialectError,
    Message,
    ModelCall,
    Object,
    message_tool_call,
    parse_arguments,
)
from rolltap.addons.dialects.json_values import described

NAMING_API = "openai-responses"
"""The API whose requests can name earlier replies."""
_ID = re.compile(r"(resp|msg|fc|ctc|rs|cmp)_\w{1,64}", re.ASCII)
"""An id as the Responses API issues them."""


@dataclass(frozen=True, kw_only=True)
class StoredCall:
    """A completed call, as later requests of its session can name it.

    Attributes:
        parent: The call whose conversation and reply are before `messages`; None if nothing is.
        reply: The reply as it is recorded: arguments of tool calls are JSON texts.
        asked: The options of the request, in their recorded form.
    """

    call_id: str
    parent: Self | None
    messages: list[Message]
    reply: Message
    asked: Object

    @cached_property
    def echo(self) -> Message:
        """The reply as a message of a later request: the same object each time."""
        echo = {**self.reply, "call_id": self.call_id}
        if "tool_calls" in echo:
            tool_calls = []
            for call in self.reply["tool_calls"]:
                function = call["function"]
                arguments = parse_arguments(function["arguments"])
                tool_calls.append(message_tool_call(call["id"], function["name"], arguments))
            echo["tool_calls"] = tool_calls
        return echo

    def conversation(self) -> list[Message]:
        """Return the messages of the call's request and its reply."""
        calls = [self]
        while calls[-1].parent is not None:
            calls.append(calls[-1].parent)
        messages: list[Message] = []
        for call in reversed(calls):
            messages += [*call.messages, call.echo]
        return messages


FindCall = Callable[[str], StoredCall | None]
"""Finds a completed call of the session by its id."""


class NeedsStoredState(DialectError):
    """Raised by `decode` for a request that names replies by their ids.

    `complete` decodes it with the calls of the session. It raises `DialectError`, also for an id of
    no call.
    """

    def __init__(self, complete: Callable[[FindCall], ModelCall]) -> None:
        why = "The request names a reply, and none is known."
        super().__init__(why, status=404, code="not_found")
        self.complete = complete


def shown_id(object_id: str) -> str:
    """Return an id for an error message, which is recorded. Another text may be a secret."""
    return f"'{object_id}'" if _ID.fullmatch(object_id) else described(object_id)
