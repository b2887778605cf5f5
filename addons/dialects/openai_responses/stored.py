"""Completed calls of a session, and requests that name them by the ids of their replies.

| field | stands for |
| --- | --- |
| an `item_reference` in `input` | an item of an earlier reply |
| `previous_response_id` | an earlier call's conversation without `instructions`, and its reply |

Responses and their items have the ids `resp_CALL`, and a prefix, `_CALL_` and an index. A reply is
rebuilt from the row of its call. The row has tools as the model sees them: a call of a freeform
tool or of one in a namespace becomes a `function_call` of that function, and is decoded to the same
message.

All replies can be named, also if their requests have `store: false`. Errors are in the words of
OpenAI's API.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from rolltap.addons.dialects.call import (
    DialectError,
    Message,
    ModelCall,
    Reply,
    ReplyContext,
    message_tool_call,
)
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.json_values import Object, described, parse_arguments
from rolltap.addons.dialects.openai_responses.reply import output_items

NAMING_API = "openai-responses"
"""The API whose requests can name earlier replies."""
INSTRUCTIONS = "instructions"
"""Key of the recorded options: True if the call's first message is the request's `instructions`."""
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

    @cached_property
    def items(self) -> dict[str, Object]:
        """The output items of the reply by their ids. There may be thousands."""
        asked = ModelCall("", [], [], requested_sampling=self.asked)
        context = ReplyContext(self.call_id, 0, "", asked)
        items: dict[str, Object] = {}
        for item in output_items(context, Reply.of_message(self.reply, None)):
            items[item["id"]] = item
        return items


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


def is_reference(item: Any) -> bool:
    """Return True for an `item_reference`, whose type may be left out."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def previous_messages(fields: Fields, find: FindCall) -> list[Message]:
    """Return the conversation of the previous response of a request. Raises `DialectError`."""
    response_id = fields.optional("previous_response_id", Fields.identifier)
    if response_id is None:
        return []
    prefix, _, call_id = response_id.partition("_")
    call = find(call_id) if prefix == "resp" else None
    if call is None:
        why = f"Previous response with id {_shown_id(response_id)} not found."
        raise DialectError(why, code="previous_response_not_found")
    messages = call.conversation()
    return messages[1:] if call.asked.get(INSTRUCTIONS) else messages


def with_items(fields: Fields, find: FindCall) -> Fields:
    """Return a request whose `input` has items in the place of references.

    Raises `DialectError` for an id of nothing, and for a second reference to an item, as OpenAI
    does: a short request would become a long one.
    """
    items = list(fields.maybe("input", list) or [])
    named = set()
    for index, item in enumerate(items):
        if not is_reference(item):
            continue
        item_id = fields.element("input", index, item).identifier("id")
        if item_id in named:
            why = "Remove duplicate items from your input and try again."
            raise DialectError(f"Duplicate item found with id {_shown_id(item_id)}. {why}")
        named.add(item_id)
        call_id = item_id.partition("_")[2].rpartition("_")[0]
        call = find(call_id)
        issued_id = re.sub("^ctc_", "fc_", item_id)
        if call is None or issued_id not in call.items:
            why = f"Item with id {_shown_id(item_id)} not found."
            raise DialectError(why, status=404, code="not_found")
        items[index] = call.items[issued_id]
    return fields.replaced({**fields.values, "input": items or fields["input"]})


def _shown_id(object_id: str) -> str:
    """Return an id for an error message, which is recorded. Another text may be a secret."""
    return f"'{object_id}'" if _ID.fullmatch(object_id) else described(object_id)
