"""The model APIs as the clients of the soak speak them: a growing conversation, its requests and
its replies.

A conversation is a list of the API's own items. Replies are sent back as they were received.
"""

import json
from dataclasses import dataclass
from typing import Any

SYSTEM = "You repair programs. Look before you write, and run the tests."
MAX_TOKENS = 100_000
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
_BASH = {"name": "bash", "description": "Run a command."}


class Failure(Exception):
    """A reply that a client cannot use. `kind` groups equal failures. An SDK repeats the request if
    `retryable`."""

    def __init__(self, kind: str, *, retryable: bool = True, after: float = 0.0) -> None:
        super().__init__(kind)
        self.kind = kind
        self.retryable = retryable
        self.after = after


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

    def next(self, answer, text):
        """Return the items after an answer: a text as the results of its calls, or as the
        user's."""
        return self.results(answer, text) if answer.calls else self.said(text)

    def read(self, data: bytes, streamed: bool) -> Answer:
        """Return the answer in a body or a stream. Raises `Failure`, for instance when a stream's
        end is missing."""
        texts = [data]
        if streamed:
            texts = [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]
        events = [json.loads(text) for text in texts if text != b"[DONE]"]
        for event in events:
            error = event.get("error") or (event.get("response") or {}).get("error")
            if error:
                raise Failure(f"error inside a 200: {error.get('code') or error.get('type')}")
        if not streamed:
            return self.whole(events[0])
        if not events or not self.is_end(events[-1]):
            raise Failure("a stream without an end")
        return self.whole(self.joined(events))


def joined_text(parts: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))


class Chat(Api):
    name = "openai-chat"

    def url(self, streamed):
        return "https://api.openai.com/v1/chat/completions"

    def body(self, items, streamed):
        messages = [{"role": "system", "content": SYSTEM}, *items]
        tools = [{"type": "function", "function": {**_BASH, "parameters": PARAMETERS}}]
        return {"model": "bench", "messages": messages, "tools": tools, "stream": streamed}

    def results(self, answer, text):
        tool = {"role": "tool", "content": text}
        return [{**tool, "tool_call_id": call_id} for call_id, _, _ in answer.calls]

    def whole(self, value):
        message = value["choices"][0]["message"]
        calls = []
        for call in message.get("tool_calls") or []:
            called = call["function"]
            calls.append((call["id"], called["name"], json.loads(called["arguments"])))
        return Answer([message], message.get("content") or "", calls)

    def is_end(self, event):
        return not event["choices"] or event["choices"][0]["finish_reason"] is not None

    def joined(self, events):
        text = ""
        calls = []
        for event in events:
            if event["choices"]:
                delta = event["choices"][0]["delta"]
                text += delta.get("content") or ""
                calls += delta.get("tool_calls") or []
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            keys = ("id", "type", "function")
            message["tool_calls"] = [{key: call[key] for key in keys} for call in calls]
        return {"choices": [{"message": message}]}


class Messages(Api):
    name = "anthropic"
    headers = {"anthropic-version": "2023-06-01"}  # noqa: RUF012

    def url(self, streamed):
        return "https://api.anthropic.com/v1/messages"

    def body(self, items, streamed):
        tools = [{**_BASH, "input_schema": PARAMETERS}]
        fields = {"model": "bench", "max_tokens": MAX_TOKENS, "system": SYSTEM}
        return {**fields, "messages": items, "tools": tools, "stream": streamed}

    def results(self, answer, text):
        result = {"type": "tool_result", "content": text}
        results = [{**result, "tool_use_id": call_id} for call_id, _, _ in answer.calls]
        return [{"role": "user", "content": results}]

    def whole(self, value):
        blocks = value["content"]
        calls = []
        for block in blocks:
            if block["type"] == "tool_use":
                calls.append((block["id"], block["name"], block["input"]))
        return Answer([{"role": "assistant", "content": blocks}], joined_text(blocks), calls)

    def is_end(self, event):
        return event["type"] == "message_stop"

    def joined(self, events):
        blocks: dict[int, dict[str, Any]] = {}
        inputs: dict[int, str] = {}
        for event in events:
            index = event.get("index")
            delta = event.get("delta")
            match event["type"]:
                case "content_block_start":
                    blocks[index] = dict(event["content_block"])
                case "content_block_delta" if delta["type"] == "input_json_delta":
                    inputs[index] = inputs.get(index, "") + delta["partial_json"]
                case "content_block_delta":
                    key = delta["type"].removesuffix("_delta")
                    blocks[index][key] = blocks[index].get(key, "") + delta[key]
        for index, text in inputs.items():
            blocks[index]["input"] = json.loads(text)
        return {"content": [blocks[index] for index in sorted(blocks)]}


class Responses(Api):
    name = "openai-responses"

    def url(self, streamed):
        return "https://api.openai.com/v1/responses"

    def body(self, items, streamed):
        tools = [{"type": "function", **_BASH, "parameters": PARAMETERS}]
        fields = {"model": "bench", "instructions": SYSTEM, "store": False, "stream": streamed}
        return {**fields, "input": items, "tools": tools}

    def results(self, answer, text):
        result = {"type": "function_call_output", "output": text}
        return [{**result, "call_id": call_id} for call_id, _, _ in answer.calls]

    def whole(self, value):
        text = ""
        calls = []
        for item in value["output"]:
            if item["type"] == "message":
                text += joined_text(item["content"])
            elif item["type"] == "function_call":
                calls.append((item["call_id"], item["name"], json.loads(item["arguments"])))
        return Answer(value["output"], text, calls)

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
        system = {"parts": [{"text": SYSTEM}]}
        tools = [{"functionDeclarations": [{**_BASH, "parameters": PARAMETERS}]}]
        return {"contents": items, "systemInstruction": system, "tools": tools}

    def said(self, text):
        return [{"role": "user", "parts": [{"text": text}]}]

    def results(self, answer, text):
        parts = []
        for call_id, name, _ in answer.calls:
            response = {"name": name, "response": {"output": text}}
            if call_id:
                response["id"] = call_id
            parts.append({"functionResponse": response})
        return [{"role": "user", "parts": parts}]

    def whole(self, value):
        parts = value["candidates"][0]["content"]["parts"]
        calls = []
        for part in parts:
            if call := part.get("functionCall"):
                calls.append((call.get("id", ""), call["name"], call.get("args", {})))
        return Answer([{"role": "model", "parts": parts}], joined_text(parts), calls)

    def is_end(self, event):
        return "finishReason" in event["candidates"][0]

    def joined(self, events):
        parts = []
        for event in events:
            parts += event["candidates"][0]["content"].get("parts", [])
        return {"candidates": [{"content": {"role": "model", "parts": parts}}]}


APIS: list[Api] = [Chat(), Messages(), Responses(), Gemini()]
