"""Conversations of the Responses API, the ids in its requests, and requests about what is stored.

A conversation is a list of items to which requests and their replies are added.

The entries of a conversation:

| fields | meaning |
| --- | --- |
| `created_at`, `metadata`, `key`, `items` | it was created |
| `key`, `items` | items were added |
| `call`, `items`, `request` | the items of a call's request, and then those of its reply; the digest of its body |
| `metadata` | it has other metadata |
| `removed` | the id of an item that was deleted |

Of items and metadata only that is stored which a run may hold. An item without an id has one made of its entry's `key`
or `call`.

The ids in a request of the Responses API: earlier responses, their items, and conversations.

| field | stands for |
| --- | --- |
| an `item_reference` in `input` | an item of an earlier reply |
| `previous_response_id` | the conversation of an earlier call without its `instructions`, and the reply |
| `conversation` | the items of a conversation, to which the request and its reply are added |

All replies can be named, those to requests with `store: false` too. Errors are in the words of OpenAI's API.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs

from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.model_call import DialectError, Message, ModelCall, dump_json
from rolltap.addons.dialects.openai import WORDING
from rolltap.addons.dialects.openai_responses.items import (
    decode_input,
    find_call,
    hide_items,
    is_reference,
    kept_items,
    reply_items,
    serve_response,
    with_items,
)
from rolltap.addons.dialects.openai_responses.tools import ToolNames
from rolltap.addons.dialects.stored import DELETED, Entry, Stored, StoredAnswer, StoredRequest, labels, shown_id

_PREFIXES = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}
_TEXT_TYPES = {"assistant": "output_text"}
_PAGE, _LONGEST_PAGE = 20, 100
"""Items of a page, without a `limit` and at most, as in the API reference."""
_PAGE_BYTES = 1024 * 1024
"""Bytes of a page, unless its first item has more."""
_ITEMS_WORDING = replace(WORDING, name=lambda key: {"input": "items"}.get(key, key))
"""Wording of errors about items that are decoded as the input of a request."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as its entries have made it. Items have ids."""

    created_at: int
    metadata: dict[str, Any]
    items: list[dict[str, Any]]


def find_conversation(
    conversation_id: str, stored: Stored, repeated: str | None = None
) -> tuple[str, Conversation | None]:
    """Return the path of a conversation, and the conversation. Raises `DialectError` for one that is unknown.

    With `repeated`, the conversation is as it was before the newest call in it, and None when that call's request had
    another digest.
    """
    path = f"/conversations/{conversation_id}"
    entries = stored.entries(path)
    if entries is None:
        why = f"Conversation with id {shown_id(conversation_id)} not found."
        raise DialectError(why, status=404, code="not_found")
    if repeated is not None:
        newest = max((number for number, entry in enumerate(entries) if "call" in entry), default=0)
        if entries[newest].get("request") != repeated:
            return path, None
        entries = entries[:newest]
    return path, _replay(entries, stored)


def _serve_conversation(request: StoredRequest, asked: re.Match[str], stored: Stored) -> StoredAnswer:
    """Answer a request to `/v1/conversations[/ID[/items[/ITEM]]]`. Raises `DialectError`."""
    conversation_id: str | None = asked["conversation"]
    if conversation_id is None:
        return _create(request, stored)
    path, found = find_conversation(conversation_id, stored)
    assert found is not None
    if asked["item"]:
        return _serve_item(request, path, conversation_id, found, asked["item"])
    if asked["items"]:
        if request.method == "GET":
            return StoredAnswer(_page(found.items, request.target))
        items, hidden = _given_items(_body(request), stored)
        entry: Entry = {"key": request.new_id, "items": items}
        return StoredAnswer(_listed(_with_ids(entry, items)), path, entry, hidden)
    match request.method:
        case "DELETE":
            body = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
            return StoredAnswer(body, path, DELETED)
        case "POST":
            metadata = labels(_body(request).optional("metadata", Fields.object) or {})
            changed = replace(found, metadata=metadata)
            return StoredAnswer(_shown(conversation_id, changed), path, {"metadata": metadata})
    return StoredAnswer(_shown(conversation_id, found))


def _create(request: StoredRequest, stored: Stored) -> StoredAnswer:
    conversation_id, body = f"conv_{request.new_id}", _body(request)
    items, hidden = _given_items(body, stored)
    entry = {
        "created_at": request.now,
        "key": request.new_id,
        "metadata": labels(body.optional("metadata", Fields.object) or {}),
        "items": items,
    }
    found = _replay([entry], stored)
    return StoredAnswer(_shown(conversation_id, found), f"/conversations/{conversation_id}", entry, hidden)


def _serve_item(
    request: StoredRequest, path: str, conversation_id: str, found: Conversation, item_id: str
) -> StoredAnswer:
    item = next((item for item in found.items if item["id"] == item_id), None)
    if item is None:
        raise DialectError(f"Item with id {shown_id(item_id)} not found.", status=404, code="not_found")
    if request.method == "DELETE":
        return StoredAnswer(_shown(conversation_id, found), path, {"removed": item_id})
    return StoredAnswer(item)


def _replay(entries: list[Entry], stored: Stored) -> Conversation:
    """Return what the entries of a conversation make of it."""
    items: list[dict[str, Any]] = []
    metadata: dict[str, Any] = {}
    for entry in entries:
        metadata = entry.get("metadata", metadata)
        items += _with_ids(entry, entry.get("items", []))
        if "call" in entry:
            items += reply_items(stored.calls[entry["call"]])
        if "removed" in entry:
            items = [item for item in items if item["id"] != entry["removed"]]
    return Conversation(entries[0]["created_at"], metadata, items)


def _with_ids(entry: Entry, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    key = entry.get("key") or entry.get("call")
    return [_with_id(item, f"{key}_i{index}") for index, item in enumerate(items)]


def _with_id(item: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an item as the API lists it: with an id and a type, and a text as a part."""
    kind = item.get("type") or "message"
    listed = {**item, "type": kind}
    if not isinstance(item.get("id"), str):
        listed["id"] = f"{_PREFIXES.get(str(kind), 'item')}_{key}"
    if kind == "message":
        text: Any = item.get("content")
        if isinstance(text, str):
            text = [{"type": _TEXT_TYPES.get(str(item.get("role")), "input_text"), "text": text}]
        listed["content"] = [
            {**part, "annotations": []} if part.get("type") == "output_text" else part for part in text or []
        ]
        listed.setdefault("status", "completed")
    return listed


def _body(request: StoredRequest) -> Fields:
    return Fields(parse_object(request.body) if request.body else {}, WORDING)


def _given_items(body: Fields, stored: Stored) -> tuple[list[dict[str, Any]], int]:
    """Return what is stored of the items in a body, and the number of images, audio and files among them.

    Raises `DialectError` for items that no request could have.
    """
    list(body.objects("items", "a list of items"))
    hidden = hide_items(body, "items")
    items = with_items(body, "items", stored)
    asked = {"input": [*items, {"role": "user", "content": ""}]}
    decode_input(Fields(asked, _ITEMS_WORDING), [], ModelCall("", [], []), ToolNames())
    return kept_items(items), hidden


def _shown(conversation_id: str, found: Conversation) -> dict[str, Any]:
    dated = {"created_at": found.created_at, "metadata": found.metadata}
    return {"id": conversation_id, "object": "conversation", **dated}


def _page(items: list[dict[str, Any]], target: str) -> dict[str, Any]:
    """Return the page of a list of items that the query of `target` asks for, newest first by default."""
    query = {key: values[-1] for key, values in parse_qs(target.partition("?")[2]).items()}
    ordered = items if query.get("order") == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    begin = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    limit = query.get("limit", "")
    most = min(max(int(limit), 1), _LONGEST_PAGE) if re.fullmatch("[0-9]{1,9}", limit) else _PAGE
    page: list[dict[str, Any]] = []
    room = _PAGE_BYTES
    for item in ordered[begin : begin + most]:
        room -= len(dump_json(item))
        if page and room < 0:
            break
        page.append(item)
    return _listed(page, has_more=begin + len(page) < len(ordered))


def _listed(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    ids = [item["id"] for item in items] or [""]
    return {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}


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


_PATH = re.compile(
    r"/v1/(?:responses/(?P<response>resp_[^/]+)"
    r"|conversations(?:/(?P<conversation>conv_[^/]+)(?P<items>/items(?:/(?P<item>[^/]+))?)?)?)"
)


def is_served(method: str, path: str) -> bool:
    """Return True for a request that `serve` answers."""
    match = _PATH.fullmatch(path)
    if match is None:
        return False
    if match["response"] or match["item"]:
        return method in ("GET", "DELETE")
    if match["items"]:
        return method in ("GET", "POST")
    return method == "POST" or (match["conversation"] is not None and method in ("GET", "DELETE"))


def serve(request: StoredRequest, stored: Stored) -> StoredAnswer:
    """Answer a request. Raises `DialectError`."""
    match = _PATH.fullmatch(request.target.partition("?")[0])
    if match is None or not is_served(request.method, match[0]):
        raise DialectError("This path is not served here.", status=404, code="not_found")
    if match["response"]:
        return serve_response(request, match["response"], stored)
    return _serve_conversation(request, match, stored)
