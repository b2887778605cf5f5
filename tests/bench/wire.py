"""The model APIs as the clients of the soak speak them: a growing conversation, its requests and
its replies.

A conversation is a list of the API's own items. Replies are sent back as they were received.
"""

import json
from dataclasses import dataclass
from typing import Any

SYSTEM = "You repair programs. Look before you write, and run the tests."
MAX_TOKENS = 100_000
_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}


class Failure(Exception):
    """A reply that a client cannot use. `kind` groups equal failures. An SDK repeats the request if
    `retryable`."""

    def __init__(self, kind: str, *, retryable: bool = True, after: float = 0.0) -> None:
        super().__init__(kind)
        self.kind, self.retryable, self.after = kind, retryable, after


@dataclass(frozen=True)
class Answer:
    """A whole reply as a client reads it: `items` continue the conversation, `calls` are (id, name,
    arguments)."""

    items: list[dict[str, Any]]
    text: str
    calls: list[tuple[str, str, Any]]


class Api:
    """A model API, by pure methods.

    A subclass has the `url` and `body` of a request, the items of tool `results`, the answer in a
    `whole` body, the body that the events of a stream are `joined` to, and `is_end` of a stream's
    last event.
    """

    name: str
    headers: dict[str, str] = {}  # noqa: RUF012 - constants

    def said(self, text):
        """Return the items of a user's message."""
        return [{"role": "user", "content": text}]

    def read(self, data: bytes, streamed: bool) -> Answer:
        """Return the answer in a body or a stream. Raises `Failure`, for instance when a stream's
        end is missing."""
        lines = (
            [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]
            if streamed
            else [data]
        )
        events = [json.loads(line) for line in lines if line != b"[DONE]"]
        for event in events:
            if error := event.get("error") or (event.get("response") or {}).get("error"):
                raise Failure(f"error inside a 200: {error.get('code') or error.get('type')}")
        if not streamed:
            return self.whole(events[0])
        if not events or not self.is_end(events[-1]):
            raise Failure("a stream without an end")
        return self.whole(self.joined(events))


class Chat(Api):
    name = "openai-chat"

    def url(self, streamed):
        return "https://api.openai.com/v1/chat/completions"

    def body(self, items, streamed):
        function = {"name": "bash", "description": "Run a command.", "parameters": _PARAMETERS}
        messages = [{"role": "system", "content": SYSTEM}, *items]
        tools = [{"type": "function", "function": function}]
        return {"model": "bench", "messages": messages, "tools": tools, "stream": streamed}

    def results(self, answer, text):
        return [
            {"role": "tool", "tool_call_id": call_id, "content": text}
            for call_id, _, _ in answer.calls
        ]

    def whole(self, value):
        message = value["choices"][0]["message"]
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or []]
        calls = [
            (call_id, called["name"], json.loads(called["arguments"]))
            for call_id, called in functions
        ]
        return Answer([message], message.get("content") or "", calls)

    def is_end(self, event):
        return not event["choices"] or event["choices"][0]["finish_reason"] is not None

    def joined(self, events):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        message = {
            "role": "assistant",
            "content": "".join(delta.get("content") or "" for delta in deltas),
        }
        if calls := [call for delta in deltas for call in delta.get("tool_calls") or []]:
            message["tool_calls"] = [
                {key: call[key] for key in ("id", "type", "function")} for call in calls
            ]
        return {"choices": [{"message": message}]}


class Messages(Api):
    name = "anthropic"
    headers = {"anthropic-version": "2023-06-01"}  # noqa: RUF012

    def url(self, streamed):
        return "https://api.anthropic.com/v1/messages"

    def body(self, items, streamed):
        tools = [{"name": "bash", "description": "Run a command.", "input_schema": _PARAMETERS}]
        fields = {"model": "bench", "max_tokens": MAX_TOKENS, "system": SYSTEM}
        return {**fields, "messages": items, "tools": tools, "stream": streamed}

    def results(self, answer, text):
        results = [
            {"type": "tool_result", "tool_use_id": call_id, "content": text}
            for call_id, _, _ in answer.calls
        ]
        return [{"role": "user", "content": results}]

    def whole(self, value):
        blocks = value["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [
            (block["id"], block["name"], block["input"])
            for block in blocks
            if block["type"] == "tool_use"
        ]
        return Answer([{"role": "assistant", "content": blocks}], text, calls)

    def is_end(self, event):
        return event["type"] == "message_stop"

    def joined(self, events):
        blocks: dict[int, dict[str, Any]] = {}
        inputs: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] = block.get(key, "") + delta[key]
        for index, text in inputs.items():
            blocks[index]["input"] = json.loads(text)
        return {"content": [blocks[index] for index in sorted(blocks)]}


class Responses(Api):
    name = "openai-responses"

    def url(self, streamed):
        return "https://api.openai.com/v1/responses"

    def body(self, items, streamed):
        tools = [
            {
                "type": "function",
                "name": "bash",
                "description": "Run a command.",
                "parameters": _PARAMETERS,
            }
        ]
        fields = {"model": "bench", "instructions": SYSTEM, "store": False, "stream": streamed}
        return {**fields, "input": items, "tools": tools}

    def results(self, answer, text):
        return [
            {"type": "function_call_output", "call_id": call_id, "output": text}
            for call_id, _, _ in answer.calls
        ]

    def whole(self, value):
        output = value["output"]
        texts = [
            part["text"] for item in output if item["type"] == "message" for part in item["content"]
        ]
        called = [item for item in output if item["type"] == "function_call"]
        calls = [(item["call_id"], item["name"], json.loads(item["arguments"])) for item in called]
        return Answer(output, "".join(texts), calls)

    def is_end(self, event):
        return event["type"] == "response.completed"

    def joined(self, events):
        return events[-1]["response"]


class Gemini(Api):
    name = "google"

    def url(self, streamed):
        operation = "streamGenerateContent?alt=sse" if streamed else "generateContent"
        return f"https://generativelanguage.googleapis.com/v1beta/models/bench:{operation}"

    def body(self, items, streamed):
        function = {"name": "bash", "description": "Run a command.", "parameters": _PARAMETERS}
        system = {"parts": [{"text": SYSTEM}]}
        return {
            "contents": items,
            "systemInstruction": system,
            "tools": [{"functionDeclarations": [function]}],
        }

    def said(self, text):
        return [{"role": "user", "parts": [{"text": text}]}]

    def results(self, answer, text):
        responses = [
            {"name": name, "response": {"output": text}, **({"id": call_id} if call_id else {})}
            for call_id, name, _ in answer.calls
        ]
        return [
            {"role": "user", "parts": [{"functionResponse": response} for response in responses]}
        ]

    def whole(self, value):
        parts = value["candidates"][0]["content"]["parts"]
        text = "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))
        called = [part["functionCall"] for part in parts if "functionCall" in part]
        calls = [(call.get("id", ""), call["name"], call.get("args", {})) for call in called]
        return Answer([{"role": "model", "parts": parts}], text, calls)

    def is_end(self, event):
        return "finishReason" in event["candidates"][0]

    def joined(self, events):
        parts = [
            part for event in events for part in event["candidates"][0]["content"].get("parts", [])
        ]
        return {"candidates": [{"content": {"role": "model", "parts": parts}}]}


APIS: list[Api] = [Chat(), Messages(), Responses(), Gemini()]
