"""Completed calls of a session, and requests that name them by the ids of their replies."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolltap.addons.dialects.call import DialectError, Message, ModelCall, parse_arguments
from rolltap.addons.dialects.json_values import described

_ID = re.compile(r"(resp|msg|fc|ctc|rs|cmp)_\w{1,64}", re.ASCII)
"""An id as the Responses API issues them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall:
    """A completed call, as its row has it. The fields of JSON text are those of `Call`."""

    call_id: str
    parent_id: str | None
    messages: str
    reply: str
    sampling: str

    @property
    def asked(self) -> dict[str, Any]:
        """The options of the request, in their recorded form."""
        asked: dict[str, Any] = json.loads(self.sampling).get("asked", {})
        return asked

    def as_message(self) -> Message:
        """Return the reply as a message of a later request."""
        message: Message = {**json.loads(self.reply), "call_id": self.call_id}
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
        return message


FindCall = Callable[[str], StoredCall | None]
"""Finds a completed call of the session by its id."""


def conversation(call: StoredCall, find: FindCall) -> list[Message] | None:
    """Return the messages of a call's request and its reply, or None if they are not all known."""
    path = {call.call_id: call}
    while call.parent_id is not None:
        parent = find(call.parent_id)
        if parent is None or parent.call_id in path:  # no call is its own ancestor
            return None
        path[parent.call_id] = call = parent
    messages: list[Message] = []
    for each in reversed(path.values()):
        messages += json.loads(each.messages)
        messages.append(each.as_message())
    return messages


class NamesStored(DialectError):
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
