"""`contents` of the Gemini API as messages."""

import json
from typing import Any, NamedTuple

from rolltap.addons.dialects.google.protobuf import message, repeated
from rolltap.addons.dialects.tools import echoed_call, from_object
from rolltap.addons.dialects.types import DialectError, Message, signed_call

_DATA = ("functionCall", "functionResponse", "text")
_BESIDE_DATA = frozenset({"thought", "thoughtSignature", "partMetadata", "mediaResolution", "videoMetadata"})


def system_message(instruction: Any) -> list[Message]:
    """The system message of `systemInstruction`; none when it holds no text. Raises `DialectError`."""
    if instruction is None:
        return []
    if isinstance(instruction, str):
        instruction = {"parts": [{"text": instruction}]}
    where = "system_instruction"
    texts = [_text(part) for part in _parts(message(instruction, where), where)]
    # each part is a text of its own ("You are a cat.", "Your name is Neko."), no piece of a streamed one
    text = "\n\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def messages(contents: Any) -> list[Message]:
    """The conversation in `contents`. Raises `DialectError`.

    Calls without an id are numbered, and responses without one answer the calls of the last model turn by name, in
    order.
    """
    conversation = _Conversation()
    for i, value in enumerate(repeated(contents, "contents")):
        where = f"contents[{i}]"
        content = message(value, where)
        role = content.get("role", "")
        if role == "model":
            conversation.add_model(content, where)
        elif role in ("", "user", "function"):
            conversation.add_user(content, where)
        else:
            raise DialectError(f"Invalid value at '{where}.role': use a valid role: user, model. Not {role!r}.")
    if not conversation.messages:
        raise DialectError("* GenerateContentRequest.contents: contents is not specified")
    return conversation.messages


class _Part(NamedTuple):
    """A part: which data it holds (one of `_DATA`), the data, what else it says, and where the data stands."""

    kind: str
    data: Any
    thought: bool
    signature: Any
    where: str


class _Conversation:
    """The messages so far and the calls that nothing has answered."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._calls = 0
        self._open: list[tuple[str, str]] = []  # id and name of each unanswered call of the last model turn

    def add_model(self, content: dict[str, Any], where: str) -> None:
        """Consecutive contents of the model are one turn."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open = []
        turn = self.messages[-1]
        for part in _parts(content, where):
            if part.kind == "functionCall":
                turn.setdefault("tool_calls", []).append(self._call(part))
            elif not part.thought:
                turn["content"] += _text(part)
            elif _text(part):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(part)
            call_id = signed_call(part.signature)
            if call_id is not None:
                turn.setdefault("call_id", call_id)

    def add_user(self, content: dict[str, Any], where: str) -> None:
        """Function responses become tool messages, before the user's text."""
        parts = _parts(content, where)
        responses = [part for part in parts if part.kind == "functionResponse"]
        self.messages += [self._response(part) for part in responses]
        text = "".join(_text(part) for part in parts if part.kind != "functionResponse")
        if text or not responses:
            self.messages.append({"role": "user", "content": text})

    def _call(self, part: _Part) -> dict[str, Any]:
        call = message(part.data, part.where)
        name = _name(call, part.where)
        args = call.get("args", {})
        if not isinstance(args, dict):
            raise DialectError(f"Invalid value at '{part.where}.args': it must be an object.")
        self._calls += 1
        call_id = _id(call) or f"call_{self._calls}"
        self._open.append((call_id, name))
        return echoed_call(call_id, name, from_object(args))

    def _response(self, part: _Part) -> Message:
        response = message(part.data, part.where)
        name = _name(response, part.where)
        if response.get("parts"):
            raise DialectError(f"'{part.where}.parts' is not supported: this model takes text only.")
        call_id = _id(response)
        answered = [call for call in self._open if call[0] == call_id]
        answered = answered or [call for call in self._open if call[1] == name]
        if answered:
            self._open.remove(answered[0])
            call_id = answered[0][0]
        text = _response_text(response.get("response", {}), f"{part.where}.response")
        return {"role": "tool", "content": text, "tool_call_id": call_id}


def _parts(content: dict[str, Any], where: str) -> list[_Part]:
    parts = []
    for i, value in enumerate(repeated(content.get("parts"), f"{where}.parts")):
        at = f"{where}.parts[{i}]"
        part = message(value, at)
        kind = next((kind for kind in _DATA if kind in part), None)
        if kind is None:
            unknown = [field for field in part if field not in _BESIDE_DATA]
            if unknown:
                raise DialectError(f"'{at}.{unknown[0]}' is not supported: this model takes text only.")
            kind = "text"  # a signature alone, or nothing
        thought = part.get("thought") is True
        parts.append(_Part(kind, part.get(kind, ""), thought, part.get("thoughtSignature"), f"{at}.{kind}"))
    return parts


def _text(part: _Part) -> str:
    if part.kind != "text":
        raise DialectError(f"'{part.where}' is not allowed in the content of this role.")
    if not isinstance(part.data, str):
        raise DialectError(f"Invalid value at '{part.where}': it must be a string.")
    return part.data


def _name(value: dict[str, Any], where: str) -> str:
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise DialectError(f"* '{where}.name': Name cannot be empty.")
    return name


def _id(value: dict[str, Any]) -> str:
    return str(value.get("id", ""))


def _response_text(response: Any, where: str) -> str:
    """What the model sees of a function's response: a lone text as it is, else JSON with sorted keys.

    The API gives `output` its meaning, Google's SDKs write `result`; an `error` stays an object, to be seen as one.
    A protobuf struct has no order, and clients that hold it in a hash map write it in a new one each time.
    """
    if not isinstance(response, dict):
        raise DialectError(f"Invalid value at '{where}': it must be an object.")
    (field, value), *others = response.items() or [("", None)]
    if not others and field in ("output", "result") and isinstance(value, str):
        return value
    return json.dumps(response, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
