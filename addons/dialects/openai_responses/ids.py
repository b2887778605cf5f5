"""Ids in a request of the Responses API: of earlier responses, and of their items.

| field | stands for |
| --- | --- |
| an `item_reference` in `input` | an item of an earlier reply |
| `previous_response_id` | the conversation of an earlier call without its `instructions`, and the reply |

Responses and their items have the ids `resp_CALL`, and a prefix, `_CALL_` and an index. A reply is rebuilt from the row
of its call. The row has tools as the model sees them: a call of a freeform tool or of one in a namespace becomes a
`function_call` of that function. It is decoded to the same message.

All replies can be named, also if their requests have `store: false`. Errors are in the words of OpenAI's API.
"""

import re
from typing import Any

from rolltap.addons.dialects.call import DialectError, Message, ModelCall, ReplyContext
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.openai import WORDING
from rolltap.addons.dialects.openai_responses.reply import output_items
from rolltap.addons.dialects.stored import FindCall, StoredCall, conversation, shown_id

_PREFIX = "resp_"
INSTRUCTIONS = "instructions"
"""Key of the recorded options: True when the first message of the call is the request's `instructions`."""


def names_stored(request: Fields) -> bool:
    """Return True for a request with an id that `resolve` must find."""
    items = request.maybe("input", list) or []
    return request["previous_response_id"] is not None or any(map(_is_reference, items))


def resolve(request: Fields, find: FindCall) -> tuple[Fields, list[Message]]:
    """Return the request with items in the place of references, and the messages before its input.

    Raises `DialectError` for an id of nothing.
    """
    resolved = request.replaced({**request.values, "input": _input_items(request, find)})
    if request["previous_response_id"] is None:
        return resolved, []
    return resolved, _previous_messages(request.identifier("previous_response_id"), find)


def _previous_messages(response_id: str, find: FindCall) -> list[Message]:
    call = _find_response(response_id, find)
    messages = None if call is None else conversation(call, find)
    if call is None or messages is None:
        why = f"Previous response with id {shown_id(response_id)} not found."
        raise DialectError(why, code="previous_response_not_found")
    return messages[1:] if call.asked.get(INSTRUCTIONS) else messages


def _find_response(response_id: str, find: FindCall) -> StoredCall | None:
    call_id = response_id.removeprefix(_PREFIX)
    return None if call_id == response_id else find(call_id)


def _is_reference(item: Any) -> bool:
    """Return True for an `item_reference`, whose type may be left out."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)


def _input_items(request: Fields, find: FindCall) -> list[Any]:
    """Return the input as a list of items, with output items of earlier replies in the place of references.

    Raises `DialectError` for a reference to nothing, and for two to the same item, as OpenAI does: a short request
    would become a long one.
    """
    text = request.maybe("input", str)
    if text is not None:
        return [{"role": "user", "content": text}] if text else []
    named: set[str] = set()
    issued: dict[str, dict[str, dict[str, Any]]] = {}  # a reply may have thousands of items, each named on its own
    resolved = []
    for number, item in enumerate(request.elements("input", "a non-empty string or list of items")):
        if _is_reference(item):
            item_id = Fields(item, WORDING, (request, "input", number)).identifier("id")
            if item_id in named:
                why = "Remove duplicate items from your input and try again."
                raise DialectError(f"Duplicate item found with id {shown_id(item_id)}. {why}")
            named.add(item_id)
            response_id = f"{_PREFIX}{item_id.partition('_')[2].rpartition('_')[0]}"
            if response_id not in issued:
                call = _find_response(response_id, find)
                issued[response_id] = {} if call is None else {item["id"]: item for item in _reply_items(call)}
            item = issued[response_id].get(re.sub("^ctc_", "fc_", item_id))
            if item is None:
                raise DialectError(f"Item with id {shown_id(item_id)} not found.", status=404, code="not_found")
        resolved.append(item)
    return resolved


def _reply_items(call: StoredCall) -> list[dict[str, Any]]:
    """Return the output items of a call's reply."""
    model_call = ModelCall("", [], [], requested_sampling=call.asked)
    return output_items(ReplyContext(call.call_id, 0, "", model_call), call.as_reply())
