"""The ids in a request of the Responses API: earlier responses, their items, and conversations.

| field | stands for |
| --- | --- |
| an `item_reference` in `input` | an item of an earlier reply |
| `previous_response_id` | the conversation of an earlier call without its `instructions`, and the reply |
| `conversation` | the items of a conversation, to which the request and its reply are added |

All replies can be named, those to requests with `store: false` too. Errors are in the words of OpenAI's API.
"""

from typing import Any

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.openai_responses.conversations import find_conversation
from rolltap.addons.dialects.openai_responses.earlier import find_call, is_reference, with_items
from rolltap.addons.dialects.stored import Entry, Stored, shown_id
from rolltap.addons.dialects.types import DialectError, Message

INSTRUCTIONS = "instructions"
"""Key of the recorded options: True when the first message of the call is the request's `instructions`."""


def names_stored(request: Fields) -> bool:
    """Return True for a request with an id that `resolve` must find."""
    items = request.maybe("input", list) or []
    return (
        request["previous_response_id"] is not None
        or bool(request["conversation"])
        or any(isinstance(item, dict) and is_reference(item) for item in items)
    )


def resolve(request: Fields, stored: Stored) -> tuple[Fields, list[Message], tuple[str, Entry] | None]:
    """Return the request with items in the place of ids, the messages before them, and what it adds to a conversation.

    Raises `DialectError` for an id that stands for nothing.
    """
    previous, conversation = request["previous_response_id"], request["conversation"]
    if previous is not None and conversation:
        raise DialectError("Mutually exclusive parameters: 'previous_response_id' and 'conversation'.")
    resolved = request.replaced({**request.values, "input": _input_items(request, stored)})
    if previous is not None:
        return resolved, _previous_messages(request.identifier("previous_response_id"), stored), None
    if not conversation:
        return resolved, [], None
    named = request.maybe("conversation", str) or request.inner("conversation").identifier("id")
    path, found = find_conversation(named, stored)
    added = {"items": resolved.values["input"]}
    whole = resolved.replaced({**resolved.values, "input": [*found.items, *added["items"]]})
    return whole, [], (path, added)


def _input_items(request: Fields, stored: Stored) -> list[Any]:
    text = request.maybe("input", str)
    if text is not None:
        return [{"role": "user", "content": text}] if text else []
    return with_items(request, "input", stored)


def _previous_messages(response_id: str, stored: Stored) -> list[Message]:
    call = find_call(response_id, stored)
    messages = None if call is None else stored.conversation(call.call_id)
    if call is None or messages is None:
        why = f"Previous response with id {shown_id(response_id)} not found."
        raise DialectError(why, code="previous_response_not_found")
    return messages[1:] if call.asked.get(INSTRUCTIONS) else messages
