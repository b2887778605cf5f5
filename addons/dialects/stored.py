"""Replies and conversations that a session stored, and requests that name them by their ids.

A stored object (a conversation, the mark of a deleted response) is a list of entries that only grows.
Its path names it. An object of another session is unknown.

Items are free JSON. A program may put a secret into any field, as it may into options (see `recordable`):
of each, only that is stored which the model sees or which names it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rolltap.addons.dialects.fields import LONGEST_ID, LONGEST_NAME
from rolltap.addons.dialects.json_values import (
    MOST_LEVELS_OF_A_BODY,
    TooManyValues,
    described,
    is_word,
    recordable,
    recordable_tools,
)
from rolltap.addons.dialects.model_call import (
    DialectError,
    Message,
    ModelCall,
    Reply,
    Usage,
    parse_arguments,
    parse_json,
    signed_call,
)

Keep = Callable[[Any], Any]
"""A function from a value to what is stored of it. None stands for nothing."""
Shape = Mapping[str, "Keep | Shape"]
"""The fields of an object that are stored, each with its function or, for an object or a list of objects, its shape."""


def kept(value: Any, shape: Shape) -> Any:
    """Return what is stored of an object of this shape, or of a list of them. A text is stored as it is."""
    if isinstance(value, list):
        return [kept(element, shape) for element in value]
    if not isinstance(value, dict):
        return text(value)
    found = {}
    for key, inner in value.items():
        if (how := shape.get(key)) is not None:
            found[key] = how(inner) if callable(how) else kept(inner, how)
    return {key: inner for key, inner in found.items() if inner is not None}


def _stored(kind: type, holds: Callable[[Any], bool] = lambda value: True) -> Keep:
    """Return the function that stores values of this type for which `holds`."""
    return lambda value: value if isinstance(value, kind) and holds(value) else None


text = _stored(str)
"""Stores a text that the model sees."""
label = _stored(str, lambda name: len(name) <= LONGEST_NAME)
"""Stores a name, which the model sees or a program lists."""
identifier = _stored(str, lambda value: len(value) <= LONGEST_ID)
word = _stored(str, is_word)
"""Stores a word of an API."""
flag = _stored(bool)
fields_of_a_tool = _stored(dict)
"""Stores an object that the model sees: a schema, arguments, a result."""
own_signature = _stored(str, lambda value: signed_call(value) is not None)
"""Stores a signature that was issued here. Those of others may be as long as a reply."""


def hosted_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return a hosted tool in its recordable form, or None for one that is too long for it."""
    (recorded,) = recordable_tools([tool])
    return recorded if isinstance(recorded, dict) else None


def labels(value: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an object in its recordable form."""
    recorded = recordable({"metadata": value})["metadata"]
    return recorded if isinstance(recorded, dict) else {}


Entry = dict[str, Any]
"""One entry of a stored object, with the id of its call, if any, under `call`."""
DELETED: Entry = {"deleted": True}
"""The last entry of an object that was deleted."""
_SHORT = 100
"""Characters of the JSON text of `DELETED` at most."""
_ID = re.compile(r"(resp|conv|msg|fc|ctc|rs|cmp)_\w{1,64}", re.ASCII)
"""An id as the Responses API issues them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall:
    """A completed call, as its row has it. The fields of JSON text are those of `Call`."""

    call_id: str
    parent_id: str | None
    model: str
    messages: str
    reply: str
    sampling: str
    finish_reason: str | None
    created: int
    """Seconds since the epoch."""
    usage: Callable[[], Usage]
    """Counts the tokens: it reads them all."""

    @property
    def asked(self) -> dict[str, Any]:
        """The options of the request, in their recorded form."""
        asked: dict[str, Any] = json.loads(self.sampling).get("asked", {})
        return asked

    def as_reply(self) -> Reply:
        """Return the reply as it was sent."""
        return Reply.of_message(json.loads(self.reply), self.finish_reason)

    def as_message(self) -> Message:
        """Return the reply as a message of a later request."""
        message: Message = {**json.loads(self.reply), "call_id": self.call_id}
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
        return message


@dataclass(frozen=True, slots=True)
class Stored:
    """The completed calls and the objects of a session: all that an id in its requests may stand for."""

    calls: Mapping[str, StoredCall] = field(default_factory=dict)
    objects: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Path -> the JSON text of each entry."""
    damaged: bool = False
    """True when the row of an entry is damaged: no object is known then, because the row may be that of any."""

    def conversation(self, call_id: str) -> list[Message] | None:
        """Return the messages of a call's request and its reply, or None when they are not all known."""
        path: list[StoredCall] = []
        following: str | None = call_id
        while following is not None:
            call = self.calls.get(following)
            if call is None or len(path) == len(self.calls):  # no call is its own ancestor
                return None
            path.append(call)
            following = call.parent_id
        messages: list[Message] = []
        for call in reversed(path):
            messages += [*json.loads(call.messages), call.as_message()]
        return messages

    def entries(self, path: str) -> list[Entry] | None:
        """Return the entries of an object, or None when there is none or it was deleted.

        Raises `DialectError` when they are more values than a body may have, and when a row is damaged.
        """
        texts = self._texts(path)
        if texts is None or self.is_deleted(path):
            return None
        try:
            entries: list[Entry] = parse_json(f"[{','.join(texts)}]", MOST_LEVELS_OF_A_BODY + 3)
        except TooManyValues as error:
            raise DialectError(f"What is stored is too large: {error}.", status=413, code="request_too_large") from None
        return entries

    def is_deleted(self, path: str) -> bool:
        """Return True for an object that was deleted."""
        texts = self._texts(path) or ()
        return len(texts) > 0 and len(texts[-1]) < _SHORT and json.loads(texts[-1]) == DELETED

    def _texts(self, path: str) -> Sequence[str] | None:
        if self.damaged:
            raise DialectError(
                "The recorder cannot read what this session stored: an entry is damaged, see `rolltap verify`.",
                status=500,
                code="not_recorded",
            )
        return self.objects.get(path)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request to an API of stored objects."""

    method: str
    target: str
    """Path and query."""
    body: bytes
    new_id: str
    """An id for what the request creates, in 32 characters."""
    now: int
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The body of the answer, and the entry that the request adds to the object `path`; None adds nothing.

    `hidden` is the number of images, audio and files that the request had, which have a text in their place.
    """

    body: dict[str, Any]
    path: str = ""
    entry: Entry | None = None
    hidden: int = 0


class NamesStored(DialectError):
    """Raised by `decode` for a request that names what its session stored.

    `decoded` decodes it with that, and raises `DialectError`, for an id that stands for nothing too.
    """

    def __init__(
        self,
        complete: Callable[[Stored], ModelCall | None],
        as_repeated: Callable[[Stored], ModelCall | None] = lambda stored: None,
    ) -> None:
        super().__init__("The request names what is stored, and nothing is.", status=404, code="not_found")
        self._complete, self._as_repeated = complete, as_repeated

    def decoded(self, stored: Stored) -> list[ModelCall]:
        """Return the request decoded. Before it, as it was asked first, for a request that may be a retry."""
        return [call for call in (self._as_repeated(stored), self._complete(stored)) if call is not None]


def shown_id(object_id: str) -> str:
    """Return an id for an error message, which is recorded. A text that is none may be a secret."""
    return f"'{object_id}'" if _ID.fullmatch(object_id) else described(object_id)
