"""`contents` of the Gemini API as messages."""

import json
from typing import Any

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.google.protobuf import message, repeated
from rolltap.addons.dialects.tools import from_object
from rolltap.addons.dialects.types import DialectError, Message, message_call, signed_call

_DATA = ("functionCall", "functionResponse", "text")
_BESIDE_DATA = frozenset({"thought", "thoughtSignature", "partMetadata", "mediaResolution", "videoMetadata"})


def system_message(request: Fields) -> list[Message]:
    """The system message of `systemInstruction`; none when it holds no text. Raises `DialectError`."""
    text = request.maybe("systemInstruction", str)
    if text is None:
        texts = [_text(part) for part in repeated(message(request, "systemInstruction"), "parts")]
        # each part is a text of its own ("You are a cat.", "Your name is Neko."), no piece of a streamed one
        text = "\n\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def conversation(request: Fields) -> list[Message]:
    """The messages in `contents`. Raises `DialectError`.

    Calls without an id are numbered, and responses without one answer the calls of the last model turn by name, in
    order.
    """
    said = _Conversation()
    for content in repeated(request, "contents"):
        if content["role"] and content.choice("role", ("user", "model", "function")) == "model":
            said.add_model(content)
        else:
            said.add_user(content)
    if not said.messages:
        raise DialectError("* GenerateContentRequest.contents: contents is not specified")
    return said.messages


class _Conversation:
    """The messages so far and the calls that nothing has answered."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._calls = 0
        self._open: list[tuple[str, str]] = []  # id and name of each unanswered call of the last model turn

    def add_model(self, content: Fields) -> None:
        """Consecutive contents of the model are one turn."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open = []
        turn = self.messages[-1]
        for part in repeated(content, "parts"):
            if _kind(part) == "functionCall":
                turn.setdefault("tool_calls", []).append(self._call(message(part, "functionCall")))
            elif part["thought"] is not True:
                turn["content"] += _text(part)
            elif text := _text(part):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            call_id = signed_call(part.maybe("thoughtSignature", str))
            if call_id is not None:
                turn.setdefault("call_id", call_id)

    def add_user(self, content: Fields) -> None:
        """Function responses become tool messages, before the user's text."""
        texts, responses = [], []
        for part in repeated(content, "parts"):
            if _kind(part) == "functionResponse":
                responses.append(self._response(message(part, "functionResponse")))
            else:
                texts.append(_text(part))
        self.messages += responses
        text = "".join(texts)
        if text or not responses:
            self.messages.append({"role": "user", "content": text})

    def _call(self, call: Fields) -> dict[str, Any]:
        name, arguments = call.name("name"), call.optional("args", Fields.object) or {}
        self._calls += 1
        call_id = call.optional("id", Fields.text) or f"call_{self._calls}"
        self._open.append((call_id, name))
        return message_call(call_id, name, from_object(arguments))

    def _response(self, response: Fields) -> Message:
        name, call_id = response.name("name"), response.optional("id", Fields.text) or ""
        if response["parts"]:
            raise DialectError(f"'{response.place('parts')}' is not supported: this model takes text only.")
        answered = [call for call in self._open if call[0] == call_id]
        answered = answered or [call for call in self._open if call[1] == name]
        if answered:
            self._open.remove(answered[0])
            call_id = answered[0][0]
        return {"role": "tool", "content": _response_text(response), "tool_call_id": call_id}


def _kind(part: Fields) -> str:
    """Which of `_DATA` a part holds; a signature alone, or nothing, is an empty text."""
    fields = part.values
    kind = next((kind for kind in _DATA if kind in fields), "text")
    unknown = [] if kind in fields else [field for field in fields if field not in _BESIDE_DATA]
    if unknown:
        raise DialectError(f"'{part.place(unknown[0])}' is not supported: this model takes text only.")
    return kind


def _text(part: Fields) -> str:
    kind = _kind(part)
    if kind != "text":
        raise DialectError(f"'{part.place(kind)}' is not allowed in the content of this role.")
    return part.optional("text", Fields.text) or ""


def _response_text(response: Fields) -> str:
    """A function's response as the model sees it: a lone text as it is, else JSON with sorted keys.

    The API gives `output` its meaning, Google's SDKs write `result`; an `error` stays an object, to be seen as one.
    A protobuf struct has no order, and clients that hold it in a hash map write it in a new one each time.
    """
    fields = response.optional("response", Fields.object) or {}
    match fields:
        case {"output": str(text)} | {"result": str(text)} if len(fields) == 1:
            return text
    return json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
