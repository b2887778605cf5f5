"""Ids in a request of the Responses API: of earlier responses, and of their items.

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
from functools import cache, partial
from typing import Any

from rolltap.addons.dialects.call import (
    DialectError,
    Message,
    ModelCall,
    Object,
    Reply,
    ReplyContext,
)
from rolltap.addons.dialects.openai_responses.reply import output_items
from rolltap.addons.dialects.stored import FindCall, shown_id

INSTRUCTIONS = "instructions"
"""Key of the recorded options: True if the call's first message is the request's `instructions`."""


def is_reference(item: Any) -> bool:
    """Return True for an `item_reference`, whose type may be left out."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def previous_messages(response_id: str, find: FindCall) -> list[Message]:
    """Return the conversation of an earlier call. Raises `DialectError` for an id of none."""
    prefix, _, call_id = response_id.partition("_")
    call = find(call_id) if prefix == "resp" else None
    if call is None:
        why = f"Previous response with id {shown_id(response_id)} not found."
        raise DialectError(why, code="previous_response_not_found")
    messages = call.conversation()
    return messages[1:] if call.asked.get(INSTRUCTIONS) else messages


class StoredItems:
    """Output items of earlier replies, for one request."""

    def __init__(self, find: FindCall) -> None:
        self._issued = cache(partial(_issued_items, find))
        """A reply may have thousands of items, each named on its own."""
        self._named: set[str] = set()

    def item(self, item_id: str) -> Object:
        """Return an item.

        Raises `DialectError` for an id of nothing, and for a second reference to an item, as OpenAI
        does: a short request would become a long one.
        """
        if item_id in self._named:
            why = "Remove duplicate items from your input and try again."
            raise DialectError(f"Duplicate item found with id {shown_id(item_id)}. {why}")
        self._named.add(item_id)
        call_id = item_id.partition("_")[2].rpartition("_")[0]
        item = self._issued(call_id).get(re.sub("^ctc_", "fc_", item_id))
        if item is None:
            why = f"Item with id {shown_id(item_id)} not found."
            raise DialectError(why, status=404, code="not_found")
        return item


def _issued_items(find: FindCall, call_id: str) -> dict[str, Object]:
    """Return the items of a call's reply by their ids."""
    call = find(call_id)
    if call is None:
        return {}
    context = ReplyContext(call_id, 0, "", ModelCall("", [], [], requested_sampling=call.asked))
    reply = Reply.of_message(call.reply, None)
    return {item["id"]: item for item in output_items(context, reply)}
