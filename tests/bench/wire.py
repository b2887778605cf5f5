"""The model APIs as the clients of the soak speak them: a growing conversation, its requests and its replies.

A conversation is a list of the API's own items. Replies are sent back as they were received.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SYSTEM = "You repair programs. Look before you write, and run the tests."
MAX_TOKENS = 100_000
_PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


class Failure(Exception):
    """A reply that a client cannot use. `kind` groups equal failures. An SDK repeats the request if `retryable`."""

    def __init__(self, kind: str, *, retryable: bool = True, after: float = 0.0) -> None:
        super().__init__(kind)
        self.kind, self.retryable, self.after = kind, retryable, after


@dataclass(frozen=True)
class Answer:
    """A whole reply as a client reads it: `items` continue the conversation, `calls` are (id, name, arguments)."""

    items: list[dict[str, Any]]
    text: str
    calls: list[tuple[str, str, Any]]


class Api:
    """A model API. Its methods are pure."""

    name: str
    headers: dict[str, str] = {}  # noqa: RUF012 - constants

    def url(self, streamed: bool) -> str:
        """Return the URL of a request."""
        raise NotImplementedError

    def body(self, items: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        """Return the body of a request."""
        raise NotImplementedError

    def said(self, text: str) -> list[dict[str, Any]]:
        """Return the items of a user's message."""
        return [{"role": "user", "content": text}]

    def results(self, answer: Answer, text: str) -> list[dict[str, Any]]:
        """Return the items of the results of an answer's tool calls."""
        raise NotImplementedError

    def whole(self, value: dict[str, Any]) -> Answer:
        """Return the answer in a body."""
        raise NotImplementedError

    def joined(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body that a stream's events are the pieces of. Raises `Failure` when the end is missing."""
        raise NotImplementedError

    def read(self, data: bytes, streamed: bool) -> Answer:
        """Return the answer in a body or a stream. Raises `Failure`."""
        events = list(_events(data)) if streamed else [json.loads(data)]
        for event in events:
            if error := event.get("error") or (event.get("response") or {}).get("error"):
                raise Failure(f"error inside a 200: {error.get('code') or error.get('type')}")
        return self.whole(self.joined(events) if streamed else events[0])


class Chat(Api):
    """Chat Completions."""

    name = "openai-chat"

    def url(self, streamed):
        return "https://api.openai.com/v1/chat/completions"

    def body(self, items, streamed):
        function = {"name": "bash", "description": "Run a command.", "parameters": _PARAMETERS}
        messages = [{"role": "system", "content": SYSTEM}, *items]
        return {
            "model": "bench",
            "messages": messages,
            "tools": [{"type": "function", "function": function}],
            "stream": streamed,
        }

    def results(self, answer, text):
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, _, _ in answer.calls]

    def whole(self, value):
        message = value["choices"][0]["message"]
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
        ]
        return Answer([message], message.get("content") or "", calls)

    def joined(self, events):
        choices = [event["choices"][0] for event in events if event["choices"]]
        if not choices or choices[-1]["finish_reason"] is None:
            raise Failure("a stream without an end")
        deltas = [choice["delta"] for choice in choices]
        message = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
        if calls := [call for delta in deltas for call in delta.get("tool_calls") or []]:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {"choices": [{"message": message}]}


class Messages(Api):
    """Anthropic's Messages API."""

    name = "anthropic"
    headers = {"anthropic-version": "2023-06-01"}  # noqa: RUF012

    def url(self, streamed):
        return "https://api.anthropic.com/v1/messages"

    def body(self, items, streamed):
        tools = [{"name": "bash", "description": "Run a command.", "input_schema": _PARAMETERS}]
        fields = {"model": "bench", "max_tokens": MAX_TOKENS, "system": SYSTEM}
        return {**fields, "messages": items, "tools": tools, "stream": streamed}

    def results(self, answer, text):
        results = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, _, _ in answer.calls]
        return [{"role": "user", "content": results}]

    def whole(self, value):
        blocks = value["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        return Answer([{"role": "assistant", "content": blocks}], text, calls)

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
        if not events or events[-1]["type"] != "message_stop":
            raise Failure("a stream without an end")
        for index, text in inputs.items():
            blocks[index]["input"] = json.loads(text)
        return {"content": [blocks[index] for index in sorted(blocks)]}


class Responses(Api):
    """OpenAI's Responses API."""

    name = "openai-responses"

    def url(self, streamed):
        return "https://api.openai.com/v1/responses"

    def body(self, items, streamed):
        tools = [{"type": "function", "name": "bash", "description": "Run a command.", "parameters": _PARAMETERS}]
        fields = {"model": "bench", "instructions": SYSTEM, "store": False, "stream": streamed}
        return {**fields, "input": items, "tools": tools}

    def results(self, answer, text):
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, _, _ in answer.calls]

    def whole(self, value):
        output = value["output"]
        texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        calls = [
            (item["call_id"], item["name"], json.loads(item["arguments"]))
            for item in output
            if item["type"] == "function_call"
        ]
        return Answer(output, "".join(texts), calls)

    def joined(self, events):
        if not events or events[-1]["type"] != "response.completed":
            raise Failure("a stream without an end")
        return events[-1]["response"]


class Gemini(Api):
    """Google's Gemini API."""

    name = "google"

    def url(self, streamed):
        operation = "streamGenerateContent?alt=sse" if streamed else "generateContent"
        return f"https://generativelanguage.googleapis.com/v1beta/models/bench:{operation}"

    def body(self, items, streamed):
        function = {"name": "bash", "description": "Run a command.", "parameters": _PARAMETERS}
        system = {"parts": [{"text": SYSTEM}]}
        return {"contents": items, "systemInstruction": system, "tools": [{"functionDeclarations": [function]}]}

    def said(self, text):
        return [{"role": "user", "parts": [{"text": text}]}]

    def results(self, answer, text):
        responses = [
            {"id": call_id, "name": name, "response": {"output": text}}
            if call_id
            else {"name": name, "response": {"output": text}}
            for call_id, name, _ in answer.calls
        ]
        return [{"role": "user", "parts": [{"functionResponse": response} for response in responses]}]

    def whole(self, value):
        parts = value["candidates"][0]["content"]["parts"]
        text = "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        return Answer(
            [{"role": "model", "parts": parts}],
            text,
            [(call.get("id", ""), call["name"], call.get("args", {})) for call in calls],
        )

    def joined(self, events):
        candidates = [event["candidates"][0] for event in events]
        if not candidates or "finishReason" not in candidates[-1]:
            raise Failure("a stream without an end")
        parts = [part for candidate in candidates for part in candidate["content"].get("parts", [])]
        return {"candidates": [{"content": {"role": "model", "parts": parts}}]}


APIS: list[Api] = [Chat(), Messages(), Responses(), Gemini()]


def _events(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n"):
        if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
            yield json.loads(text)
