"""Earlier responses and their items, found by their ids: `resp_CALL`, and a prefix, `_CALL_` and an index.

A reply is rebuilt from the row of its call. The row has tools as the model sees them: a call of a freeform tool or of
one in a namespace becomes a `function_call` of that function. It is decoded to the same message.
"""

import re
from typing import Any

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.openai import WORDING
from rolltap.addons.dialects.openai_responses.reply import ending, output_items, response
from rolltap.addons.dialects.stored import DELETED, Stored, StoredAnswer, StoredCall, StoredRequest, shown_id
from rolltap.addons.dialects.types import DialectError, ModelCall, ReplyContext

_PREFIX = "resp_"


def find_call(response_id: str, stored: Stored) -> StoredCall | None:
    """Return the completed call of a response, or None when there is none or the response was deleted."""
    call_id = response_id.removeprefix(_PREFIX)
    return None if call_id == response_id or stored.is_deleted(_path(response_id)) else stored.calls.get(call_id)


def is_reference(item: dict[str, Any]) -> bool:
    """Return True for an `item_reference`, whose type may be left out."""
    return item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)


def with_items(fields: Fields, key: str, stored: Stored) -> list[Any]:
    """Return a list of items with output items of earlier replies in the place of references.

    Raises `DialectError` for a reference to nothing, and for two to the same item, as OpenAI does: a short request
    would become a long one.
    """
    named: set[str] = set()
    issued: dict[str, dict[str, dict[str, Any]]] = {}  # a reply may have thousands of items, each named on its own
    resolved = []
    for number, item in enumerate(fields.elements(key, "a non-empty string or list of items")):
        if isinstance(item, dict) and is_reference(item):
            item_id = Fields(item, WORDING, (fields, key, number)).identifier("id")
            if item_id in named:
                why = "Remove duplicate items from your input and try again."
                raise DialectError(f"Duplicate item found with id {shown_id(item_id)}. {why}")
            named.add(item_id)
            response_id = f"{_PREFIX}{item_id.partition('_')[2].rpartition('_')[0]}"
            if response_id not in issued:
                call = find_call(response_id, stored)
                issued[response_id] = {} if call is None else {item["id"]: item for item in reply_items(call)}
            item = issued[response_id].get(re.sub("^ctc_", "fc_", item_id))
            if item is None:
                raise DialectError(f"Item with id {shown_id(item_id)} not found.", status=404, code="not_found")
        resolved.append(item)
    return resolved


def reply_items(call: StoredCall) -> list[dict[str, Any]]:
    """Return the output items of a call's reply."""
    return output_items(_context(call), call.as_reply())


def serve_response(request: StoredRequest, response_id: str, stored: Stored) -> StoredAnswer:
    """Answer `GET` and `DELETE /v1/responses/ID`. Raises `DialectError`."""
    call = find_call(response_id, stored)
    if call is None:
        raise DialectError(f"Response with id {shown_id(response_id)} not found.", status=404, code="not_found")
    if request.method == "DELETE":
        body = {"id": response_id, "object": "response", "deleted": True}
        return StoredAnswer(body, _path(response_id), DELETED)
    return StoredAnswer(response(_context(call), output=reply_items(call), **ending(call.as_reply(), call.usage)))


def _path(response_id: str) -> str:
    return f"/responses/{response_id}"


def _context(call: StoredCall) -> ReplyContext:
    model_call = ModelCall(call.model, [], [], requested_sampling=call.asked)
    return ReplyContext(call.call_id, call.created, "", model_call)
