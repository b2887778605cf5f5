"""Continues a conversation whose chat template no renderer knows.

The tokens of new messages are what the template writes after an assistant's turn. They are taken from a placeholder
conversation of one user and one assistant message, cut at the token that ends the assistant's turn, so that nothing of
the real conversation is rendered again. That is right for templates which write each message by itself, and whether
this one does is tried with a few conversations before anything is recorded.
"""

from typing import Any

from rolltap.addons.dialects.types import Message, Tool

_MARK = "a8c1f0e7"
_USER: Message = {"role": "user", "content": "Hello"}
PROBE_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"where": "é"}}}
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}
_MESSAGES: list[Message] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "I do.", "tool_calls": [PROBE_CALL]},
    {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"},
    {"role": "assistant", "content": "There is nothing."},
    {"role": "user", "content": "Look again."},
]


class TemplateBridge:
    """Tokens of new messages by a tokenizer's own chat template.

    `refusal` says why this template cannot be used so, or is None.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = {tokenizer.convert_ids_to_tokens(stop): stop for stop in stop_token_ids}
        self.refusal = self._try_out()

    def extension(self, completion_ids: list[int], messages: list[Message]) -> list[int] | None:
        """The tokens after a completion: the end of its turn if not sampled, the new messages, the generation prompt.

        None when the template cannot write these messages after an assistant's.
        """
        tail = self._tail(messages)
        if tail is None:
            return None
        ids: list[int] = self._tokenizer.encode(tail, add_special_tokens=False)
        ended = bool(completion_ids) and completion_ids[-1] in self._stops.values()
        return ids[1:] if ended else ids

    def _tail(self, messages: list[Message]) -> str | None:
        """The text from the end of the assistant's turn on."""
        results = [message for message in messages if message["role"] == "tool"]
        assistant: Message = {"role": "assistant", "content": _MARK}
        if results:
            assistant["tool_calls"] = [_answered(result) for result in results]
        try:
            text = self._text([_USER, assistant, *messages], [], generation=True)
        except Exception:
            return None  # templates raise for what they do not take
        marked = text.find(_MARK)
        ends = [text.find(stop, marked) for stop in self._stops]
        return text[min(end for end in ends if end >= 0) :] if marked >= 0 and max(ends) >= 0 else None

    def _try_out(self) -> str | None:
        for tools in ([], [PROBE_TOOL]):
            for turn_ends in (2, 4):
                before, new = _MESSAGES[:turn_ends], _MESSAGES[turn_ends : turn_ends + 1]
                try:
                    whole = self._text([*before, *new], tools, generation=True)
                    prefix = self._text(before, tools, generation=False)
                except Exception as error:
                    return f"the chat template refuses a conversation with tools: {error}"
                tail = self._tail(new)
                if tail is None:
                    return "the chat template does not end an assistant's turn with a stop token"
                if self._tokenizer.encode(tail, add_special_tokens=False)[0] not in self._stops.values():
                    return "the stop token that ends an assistant's turn is no token of its own"
                if not whole.endswith(tail) or not prefix.startswith(whole.removesuffix(tail)):
                    return "the chat template writes earlier messages differently when later ones follow"
        return None

    def _text(self, messages: list[Message], tools: list[Tool], *, generation: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generation, tokenize=False
        )
        return text


def _answered(result: Message) -> dict[str, Any]:
    """A call that a tool's result answers."""
    function: dict[str, Any] = {"name": result.get("name") or "look", "arguments": {}}
    return {"id": result["tool_call_id"], "type": "function", "function": function}
