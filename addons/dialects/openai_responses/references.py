"""The ids in a request of the Responses API: earlier responses, their items, and conversations.

| field | stands for |
| --- | --- |
| an `item_reference` in `input` | an item of an earlier reply |
| `previous_response_id` | the conversation of an earlier call without its `instructions`, and the reply |
| `conversation` | the items of a conversation, to which the request and its reply are added |

All replies can be named, those to requests with `store: false` too. Errors are in the words of OpenAI's API.
"""

from dataclasses import dataclass, field
from typing import Any

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.openai_responses.conversations import find_conversation
from rolltap.addons.dialects.openai_responses.earlier import find_call, is_reference, with_items
from rolltap.addons.dialects.stored import Stored, shown_id
from rolltap.addons.dialects.types import DialectError, Message

_LASTING = ("system", "developer")
"""Roles of messages that a compaction does not replace."""
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


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request with items in the place of ids."""

    request: Fields
    before: list[Message]
    """Messages before the input."""
    conversation: str | None = None
    """The path of the conversation that the request is added to."""
    added: list[Any] = field(default_factory=list)
    """The items that are added to it."""


def resolve(request: Fields, stored: Stored, repeated: str | None = None) -> Resolved | None:
    """Return the request with items in the place of ids.

    With `repeated`, the digest of the request's body, the conversation is as the newest call in it was asked, whose
    request had that digest: a retry is asked of a conversation that has the reply. Returns None without such a call.

    Raises `DialectError` for an id that stands for nothing.
    """
    previous, conversation = request["previous_response_id"], request["conversation"]
    if previous is not None and conversation:
        raise DialectError("Mutually exclusive parameters: 'previous_response_id' and 'conversation'.")
    if repeated is not None and not conversation:
        return None
    resolved = request.replaced({**request.values, "input": _input_items(request, stored)})
    if previous is not None:
        return Resolved(resolved, _previous_messages(request.identifier("previous_response_id"), stored))
    if not conversation:
        return Resolved(resolved, [])
    named = request.maybe("conversation", str) or request.inner("conversation").identifier("id")
    path, found = find_conversation(named, stored, repeated)
    if found is None:
        return None
    added = resolved.values["input"]
    whole = resolved.replaced({**resolved.values, "input": [*_since_compaction(found.items), *added]})
    return Resolved(whole, [], path, added)


def _since_compaction(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items without the history that the newest compaction item stands for. Instructions and tools stay."""
    newest = max((index for index, item in enumerate(items) if item["type"] == "compaction"), default=0)
    lasting = [item for item in items[:newest] if item["type"] == "additional_tools" or item.get("role") in _LASTING]
    return [*lasting, *items[newest:]]


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
