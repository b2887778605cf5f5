"""Decoding of the Gemini API's `contents` to messages."""

import json
from typing import Any

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.google.protobuf import message_field, repeated_field
from rolltap.addons.dialects.tools import from_object
from rolltap.addons.dialects.types import DialectError, Message, message_tool_call, signed_call

_DATA_FIELDS = ("functionCall", "functionResponse", "text")
_OTHER_FIELDS = frozenset({"thought", "thoughtSignature", "partMetadata", "mediaResolution", "videoMetadata"})


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

    A function call without an id gets a numbered id. A function response answers an open call of the last model turn:
    the call with its id, else the first call with its name.
    """
    decoded = _Conversation()
    for content in repeated_field(request, "contents"):
        if content["role"] and content.choice("role", ("user", "model", "function")) == "model":
            decoded.add_model(content)
        else:
            decoded.add_user(content)
    if not decoded.messages:
        raise DialectError("* GenerateContentRequest.contents: contents is not specified")
    return decoded.messages


class _Conversation:
    """The messages decoded so far, and the function calls without a response."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._num_calls = 0
        self._open_calls: list[tuple[str, str]] = []
        """Id and name of each function call of the last model turn that has no response yet."""

    def add_model(self, content: Fields) -> None:
        """Add a content of the model. Consecutive contents of the model are one message."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open_calls = []
        turn = self.messages[-1]
        for part in repeated_field(content, "parts"):
            if _kind(part) == "functionCall":
                turn.setdefault("tool_calls", []).append(self._tool_call(message_field(part, "functionCall")))
            elif part["thought"] is not True:
                turn["content"] += _text(part)
            elif text := _text(part):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            call_id = signed_call(part.maybe("thoughtSignature", str))
            if call_id is not None:
                turn.setdefault("call_id", call_id)

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

    def _tool_call(self, call: Fields) -> dict[str, Any]:
        name, arguments = call.name("name"), call.optional("args", Fields.object) or {}
        self._num_calls += 1
        tool_call_id = call.optional("id", Fields.text) or f"call_{self._num_calls}"
        self._open_calls.append((tool_call_id, name))
        return message_tool_call(tool_call_id, name, from_object(arguments))

    def _response(self, response: Fields) -> Message:
        name, tool_call_id = response.name("name"), response.optional("id", Fields.text) or ""
        if response["parts"]:
            raise DialectError(f"'{response.place('parts')}' is not supported: this model takes text only.")
        candidates = [call for call in self._open_calls if call[0] == tool_call_id]
        candidates = candidates or [call for call in self._open_calls if call[1] == name]
        if candidates:
            self._open_calls.remove(candidates[0])
            tool_call_id = candidates[0][0]
        return {"role": "tool", "content": _response_text(response), "tool_call_id": tool_call_id}


def _kind(part: Fields) -> str:
    """Return the data field of a part. A part without data, for instance with a signature only, is an empty text."""
    fields = part.values
    kind = next((kind for kind in _DATA_FIELDS if kind in fields), "text")
    unknown = [] if kind in fields else [field for field in fields if field not in _OTHER_FIELDS]
    if unknown:
        raise DialectError(f"'{part.place(unknown[0])}' is not supported: this model takes text only.")
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
