"""Decoding of the Gemini API's `contents` to messages."""

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rolltap.addons.dialects.call import (
    DialectError,
    Message,
    assistant_message,
    message_tool_call,
    signed_call,
    tool_call_id,
)
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.google.protobuf import camel_case_fields, message_field, repeated_field
from rolltap.addons.dialects.json_values import is_word
from rolltap.addons.dialects.media import hide, placeholder
from rolltap.addons.dialects.tools import from_object

_DATA_FIELDS = ("functionCall", "functionResponse", "text")
_PARTS = [
    ("contents", "parts"),
    ("contents", "parts", "functionResponse", "parts"),
    ("contents", "parts", "function_response", "parts"),
]
"""Places of the parts that may be no text, in both spellings of their fields."""
_OTHER_FIELDS = frozenset({"thought", "thoughtSignature", "partMetadata", "mediaResolution", "videoMetadata"})


def hide_media(request: Fields) -> int:
    """Replace the images, audio and files of a request, also those in results of functions: see `hide`."""
    return hide(request.values, _PARTS, _text_for, None)


def _text_for(part: dict[str, Any]) -> str | None:
    fields = camel_case_fields(part)
    data = fields.get("inlineData", fields.get("fileData"))
    return placeholder(camel_case_fields(data).get("mimeType"), "file") if isinstance(data, dict) else None


def system_message(request: Fields) -> list[Message]:
    """Return the `systemInstruction` as a list of at most one message. Raises `DialectError`."""
    text = request.maybe("systemInstruction", str)
    if text is None:
        texts = [_text(part) for part in repeated_field(message_field(request, "systemInstruction"), "parts")]
        # each part is a separate text ("You are a cat.", "Your name is Neko."), not a piece of one text
        text = "\n\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def conversation(request: Fields) -> list[Message]:
    """Decode the messages in `contents`. Raises `DialectError`.

    A function call without an id gets the one that it was issued with, which follows from the signature of its turn:
    LiteLLM drops the id and keeps the signature. Without a signature it gets a numbered id. A function response answers
    an open call of the last model turn: the call with its id, else the first call with its name.
    """
    decoded = _Conversation()
    for model, contents in groupby(repeated_field(request, "contents"), key=_by_model):
        if model:
            decoded.add_model(contents)
        else:
            for content in contents:
                decoded.add_user(content)
    if not decoded.messages:
        raise DialectError("* GenerateContentRequest.contents: contents is not specified")
    return decoded.messages


def _by_model(content: Fields) -> bool:
    return bool(content["role"]) and content.choice("role", ("user", "model", "function")) == "model"


class _Conversation:
    """The messages decoded so far, and the function calls without a response."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._calls: list[str] = []
        """The id of each function call."""
        self._answered: set[int] = set()
        """The calls with a response, by their index in `_calls`."""
        self._by_id: defaultdict[str, deque[int]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[int]] = defaultdict(deque)
        """The calls of the last model turn."""

    def add_model(self, contents: Iterable[Fields]) -> None:
        """Add consecutive contents of the model, which are one message."""
        self._by_id.clear()
        self._by_name.clear()
        texts, thoughts = list[str](), list[str]()
        tool_calls: list[dict[str, Any]] = []
        parts = [part for content in contents for part in repeated_field(content, "parts")]
        signed = (signed_call(part.maybe("thoughtSignature", str)) for part in parts)
        call_id = next(filter(None, signed), None)
        for part in parts:
            if _kind(part) == "functionCall":
                own_id = tool_call_id(call_id, len(tool_calls)) if call_id else None
                tool_calls.append(self._tool_call(message_field(part, "functionCall"), own_id))
            else:
                (thoughts if part["thought"] is True else texts).append(_text(part))
        self.messages.append(assistant_message("".join(texts), "".join(thoughts), tool_calls, call_id))

    def add_user(self, content: Fields) -> None:
        """Add a content of the user: tool messages for its function responses, then its text."""
        texts, responses = [], []
        for part in repeated_field(content, "parts"):
            if _kind(part) == "functionResponse":
                responses.append(self._response(message_field(part, "functionResponse")))
            else:
                texts.append(_text(part))
        self.messages += responses
        text = "".join(texts)
        if text or not responses:
            self.messages.append({"role": "user", "content": text})

    def _tool_call(self, call: Fields, own_id: str | None) -> dict[str, Any]:
        name, arguments = call.name("name"), call.optional("args", Fields.object) or {}
        index = len(self._calls)
        used_id = call.optional("id", Fields.identifier) or own_id or f"call_{index + 1}"
        self._calls.append(used_id)
        self._by_id[used_id].append(index)
        self._by_name[name].append(index)
        return message_tool_call(used_id, name, from_object(arguments))

    def _response(self, response: Fields) -> Message:
        name, answered_id = response.name("name"), response.optional("id", Fields.identifier) or ""
        answered = self._first_open(self._by_id[answered_id])
        if answered is None:
            answered = self._first_open(self._by_name[name])
        if answered is not None:
            self._answered.add(answered)
            answered_id = self._calls[answered]
        text = "\n".join([_response_text(response), *map(_text, repeated_field(response, "parts"))])
        return {"role": "tool", "content": text, "tool_call_id": answered_id, "name": name}

    def _first_open(self, calls: deque[int]) -> int | None:
        """Return the first call without a response, and forget it and those before it."""
        while calls:
            if (index := calls.popleft()) not in self._answered:
                return index
        return None


def _kind(part: Fields) -> str:
    """Return the data field of a part. A part without data, for instance with a signature only, is an empty text."""
    fields = part.values
    kind = next((kind for kind in _DATA_FIELDS if kind in fields), "text")
    unknown = [] if kind in fields else [field for field in fields if field not in _OTHER_FIELDS]
    if unknown:
        field = unknown[0] if is_word(unknown[0]) else None  # an error is recorded, and this name is the harness's
        raise DialectError(f"'{part.place(field)}' is not supported: this model takes text only.")
    return kind


def _text(part: Fields) -> str:
    kind = _kind(part)
    if kind != "text":
        raise DialectError(f"'{part.place(kind)}' is not allowed in the content of this role.")
    return part.optional("text", Fields.text) or ""


def _response_text(response: Fields) -> str:
    """Return a function's response as the model sees it.

    An object becomes its only field when that is the string `output`, as in the API reference, or `result`, as in
    Google's SDKs. Another object, such as an `error`, becomes JSON with sorted keys: the fields of a protobuf struct
    have no order, and clients may send them in another order each time.
    """
    fields = response.optional("response", Fields.object) or {}
    match fields:
        case {"output": str(text)} | {"result": str(text)} if len(fields) == 1:
            return text
    return json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
