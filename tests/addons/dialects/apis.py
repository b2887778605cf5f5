"""The four APIs as the contract of the dialects sees them: how each writes requests, and what its
replies add up to."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import ReplyContext, Usage, message_tool_call, sign
from rolltap.addons.dialects.fields import parse_object
from tests.addons.dialects import test_anthropic as of_messages
from tests.addons.dialects import test_google as of_gemini
from tests.addons.dialects import test_openai_chat as of_chat
from tests.addons.dialects.openai_responses import test_request as of_responses

USAGE = Usage(prompt=7, completion=3, cached=4)
CALLS = [("c1", "look"), ("c2", "go"), ("c3", "look")]
ANSWERED = ["c3", "c1", "c2"]
"""The ids of the results, in another order than the calls."""
USER = {"role": "user", "content": "Hi"}
LONG = "x" * 2000


@dataclass(frozen=True)
class Api:
    """One API: its dialect, and the bodies and fields of its requests that the contract needs."""

    dialect: Any
    target: str
    request: dict[str, Any]
    """A request with everything in it: a text with é, tools, tool calls, results."""
    bodies: Any
    """A strategy for hostile bodies."""
    talk: dict[str, Any]
    """A conversation in which `CALLS` are answered as `ANSWERED`."""
    forbidding: dict[str, Any]
    """The fields that forbid tool calls."""
    tools: list[list[dict[str, Any]]]
    """Lists of one tool whose name is `LONG`."""
    choosing: Any
    """A function of a tool's name. It returns the fields that force it, or allow it alone, in every
    form of the API."""
    stop: Any
    """A function of texts. It returns the fields that ask to stop at them."""
    schema: Any
    """A function of a JSON schema. It returns the fields that ask for a reply of it."""
    echoing: Any
    """A function of a reply. It returns the fields of a request in which a program sends it back.
    """
    assembled: Any
    """A function of a stream. It returns the whole reply to which its events add up."""
    elements: tuple[dict[str, Any], ...] = ()
    """Further elements of a conversation: media, and whatever depends on other elements and fields
    of a request."""
    count_target: str = ""
    stream_target: str = ""

    @property
    def conversations(self):
        """A strategy for conversations, which are lists of elements."""
        key = self.dialect.CONVERSATION
        whole, (user, *_) = [*self.request[key], *self.talk[key]], self.talk[key]
        begun = st.integers(0, len(whole)).map(lambda length: whole[:length])
        others = st.lists(st.sampled_from([user, *self.elements]), max_size=4)
        places = st.lists(st.integers(0, len(whole)), min_size=4, max_size=4)

        def mixed(elements, inserted, places):
            mixture = list(elements)
            for place, element in zip(places, inserted, strict=False):
                mixture.insert(place, element)
            return [*mixture, user]

        return st.builds(mixed, begun, others, places)

    def decode(self, body, target=""):
        return self.decode_bytes(json.dumps(body).encode(), target)

    def decode_bytes(self, body, target=""):
        return self.dialect.decode(parse_object(body), target or self.target)

    def context(self, **changes):
        """Return the context of a reply to `request`, which asks for all that a reply may have."""
        call = self.decode({**self.request, **changes})
        call.include_usage, call.reasoning = True, "shown"
        return ReplyContext(
            "c9", 5, self.stream_target or self.target, call, prompt_tokens=USAGE.prompt
        )

    def echo(self, whole):
        """Return the message that a reply decodes to when a program sends it back."""
        return self.decode(self.echoing(whole)).messages[1]

    def issues(self, reply):
        """Return True when a reply has an opaque field that names its call."""
        return self.dialect is routes.GEMINI or (
            self.dialect is not routes.CHAT and bool(reply.reasoning)
        )


def streamed(api, context, reply, piece=3, keep_alive=False):
    """Return the bytes of a reply whose text is sent in pieces."""
    encoder = api.dialect.stream_encoder(context)
    sent = encoder.start()
    for name in ("reasoning", "content"):
        text = getattr(reply, name)
        for begin in range(0, len(text), piece):
            sent += encoder.delta(
                **{"reasoning": "", "content": "", name: text[begin : begin + piece]}
            )
            sent += encoder.keep_alive() if keep_alive else b""
    return sent + encoder.finish(reply, USAGE)


def parse(text):
    """Return the value of JSON, in which NaN and Infinity are errors."""
    return json.loads(text, parse_constant=pytest.fail)


def events_of(stream):
    """Return the data of server-sent events. An event's type is that of its data."""
    *events, rest = stream.decode().split("\n\n")
    assert rest == ""
    values = []
    for event in events:
        kind, _, data = event.rpartition("\n")
        values.append(data if data == "data: [DONE]" else parse(data.removeprefix("data: ")))
        assert kind in ("", f"event: {kind and values[-1]['type']}")
    return values


def _chat(stream):
    *chunks, last, done = events_of(stream)
    assert (done, last["choices"]) == ("data: [DONE]", [])
    message = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        for key, new in choice["delta"].items():
            message[key] = message[key] + new if key in message else new
    for index, call in enumerate(message.get("tool_calls", ())):
        assert call.pop("index") == index
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": choice["finish_reason"],
    }
    return {**last, "object": "chat.completion", "choices": [choice]}


def _responses(stream):
    events = events_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    whole = events[-1]["response"]
    assert [
        event["item"] for event in events if event["type"] == "response.output_item.done"
    ] == whole["output"]
    sent = {item["id"]: "" for item in whole["output"]}
    for event in events:
        if event["type"].endswith(".delta"):
            sent[event["item_id"]] += event["delta"]
    for item in whole["output"]:
        (part,) = item.get("summary") or item.get("content") or [{}]
        assert sent[item["id"]] == part.get("text", item.get("arguments", item.get("input", "")))
    return whole


def _messages(stream):
    events = events_of(stream)
    assert events[-1]["type"] == "message_stop"
    message = None
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(block := event["content_block"])
                written = ""
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                written += event["delta"]["partial_json"]
            case "content_block_delta":
                key = event["delta"]["type"].removesuffix("_delta")
                block[key] += event["delta"][key]
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
                if block["type"] == "tool_use":
                    block["input"] = json.loads(written)
            case "message_delta":
                message.update(event["delta"], usage=event["usage"])
    return message


def chunks_of(stream):
    """Return the chunks of Gemini's server-sent events, or of its JSON array."""
    if stream.startswith(b"["):
        return parse(stream)
    lines = [line for line in stream.decode("ascii").splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [parse(line.removeprefix("data: ")) for line in lines]


def _gemini(stream):
    chunks = chunks_of(stream)
    parts = []
    for part in (part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]):
        last = parts[-1] if parts else {}
        if "text" in part and "text" in last and part.get("thought") == last.get("thought"):
            last.update({**part, "text": last["text"] + part["text"]})
        else:
            parts.append(part)
    candidate = {**chunks[-1]["candidates"][0], "content": {"role": "model", "parts": parts}}
    return {**chunks[-1], "candidates": [candidate]}


_TOOL = {"name": LONG, "parameters": {}}
_FUNCTION = {"type": "function", "name": LONG}
CHAT = Api(
    routes.CHAT,
    "/v1/chat/completions",
    of_chat.REQUEST,
    of_chat.bodies,
    talk={
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [message_tool_call(i, name, "{}") for i, name in CALLS],
            },
            *({"role": "tool", "tool_call_id": i, "content": "x"} for i in ANSWERED),
        ]
    },
    forbidding={"tool_choice": "none"},
    choosing=lambda name: [
        {"tool_choice": {"type": kind, kind: fields}}
        for kind, fields in [
            ("function", {"name": name}),
            ("custom", {"name": name}),
            (
                "allowed_tools",
                {"mode": "auto", "tools": [{"type": "function", "function": {"name": name}}]},
            ),
        ]
    ],
    tools=[[{"type": "function", "function": _TOOL}], [{"type": "custom", "custom": _TOOL}]],
    stop=lambda texts: {"stop": texts},
    schema=lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}
    },
    echoing=lambda whole: {"messages": [USER, whole["choices"][0]["message"]]},
    assembled=_chat,
    elements=(
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "patch"}}],
        },
        {"role": "tool", "tool_call_id": "", "name": "wire", "content": "x"},
    ),
)
RESPONSES = Api(
    routes.RESPONSES,
    "/v1/responses",
    of_responses.REQUEST,
    of_responses.bodies,
    talk={
        "input": [
            USER,
            *(
                {"type": "function_call", "call_id": i, "name": name, "arguments": "{}"}
                for i, name in CALLS
            ),
            *({"type": "function_call_output", "call_id": i, "output": "x"} for i in ANSWERED),
        ]
    },
    forbidding={"tool_choice": "none"},
    choosing=lambda name: [
        {"tool_choice": choice}
        for choice in [
            {"type": "function", "name": name},
            {"type": "custom", "name": name},
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": name}],
            },
        ]
    ],
    tools=[[_FUNCTION], [{**_FUNCTION, "type": "namespace"}]],
    stop=None,
    schema=lambda schema: {"text": {"format": {"type": "json_schema", "schema": schema}}},
    echoing=lambda whole: {
        "input": [USER, *whole["output"]],
        "tools": of_responses.REQUEST["tools"],
    },
    assembled=_responses,
    elements=(
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "encrypted_content": sign("c7"),
        },
        {"role": "assistant", "content": "One more."},
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "https://x.example/a.png"}],
        },
        {"type": "additional_tools", "tools": [{"type": "custom", "name": "more"}]},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "agents__spawn"}]},
        {"type": "compaction", "encrypted_content": of_responses.SUMMARY},
        {"type": "compaction_trigger"},
    ),
    count_target="/v1/responses/input_tokens",
)


def _turn(content, answer):
    return {"max_tokens": 1, "messages": [USER, {"role": "assistant", "content": content}, answer]}


_USES = [{"type": "tool_use", "id": i, "name": name, "input": {}} for i, name in CALLS]
_RESULTS = [{"type": "tool_result", "tool_use_id": i, "content": "x"} for i in ANSWERED]
MESSAGES = Api(
    routes.MESSAGES,
    "/v1/messages",
    of_messages.REQUEST,
    of_messages.bodies,
    talk=_turn(_USES, {"role": "user", "content": _RESULTS}),
    forbidding={"tool_choice": {"type": "none"}},
    choosing=lambda name: [{"tool_choice": {"type": "tool", "name": name}}],
    tools=[[_TOOL]],
    stop=lambda texts: {"stop_sequences": texts},
    schema=lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    echoing=lambda whole: _turn(whole["content"], USER),
    assembled=_messages,
    elements=(
        {"role": "assistant", "content": "One more."},
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}
            ],
        },
        *(
            {"role": role, "content": [of_messages.reference("later")]}
            for role in ("assistant", "user")
        ),
        {
            "role": "user",
            "content": [
                {**_RESULTS[0], "tool_use_id": "", "content": [of_messages.reference("later")]}
            ],
        },
    ),
    count_target="/v1/messages/count_tokens",
)
_ANSWERS = [{"id": i, "name": dict(CALLS)[i], "response": {"output": "x"}} for i in ANSWERED]
GEMINI = Api(
    routes.GEMINI,
    "/v1beta/models/gemini-x:generateContent",
    of_gemini.REQUEST,
    of_gemini.bodies,
    talk={
        "contents": [
            {"role": "user", "parts": [{"text": "Hi"}]},
            {
                "role": "model",
                "parts": [{"functionCall": {"id": i, "name": name}} for i, name in CALLS],
            },
            {"role": "user", "parts": [{"functionResponse": answer} for answer in _ANSWERS]},
        ]
    },
    forbidding={"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
    choosing=lambda name: [
        {config: {"functionCallingConfig": {"mode": "ANY", names: [name]}}}
        for config, names in (
            ("toolConfig", "allowedFunctionNames"),
            ("tool_config", "allowed_function_names"),
        )
    ],
    tools=[[{"functionDeclarations": [_TOOL]}]],
    stop=lambda texts: {"generationConfig": {"stopSequences": texts}},
    schema=lambda schema: {
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": schema}
    },
    echoing=lambda whole: {
        "contents": [{"parts": [{"text": "Hi"}]}, whole["candidates"][0]["content"]]
    },
    assembled=_gemini,
    elements=(
        {
            "role": "model",
            "parts": [{"functionCall": {"name": "look"}}, {"text": "Hm.", "thought": True}],
        },
        {
            "role": "model",
            "parts": [
                {"text": "a"},
                {"functionCall": {"name": "look"}, "thoughtSignature": sign("c7")},
            ],
        },
        {"role": "function", "parts": {"function_response": {"name": "look", "response": {}}}},
        {
            "role": "user",
            "parts": [{"functionResponse": {"id": "c1", "name": "go", "response": {}}}],
        },
        {"parts": [{"inline_data": {"mime_type": "image/png"}}]},
    ),
    count_target="/v1beta/models/gemini-x:countTokens",
    stream_target="/v1beta/models/gemini-x:streamGenerateContent?alt=sse",
)
ARRAY = replace(GEMINI, stream_target="/v1beta/models/gemini-x:streamGenerateContent")
"""Gemini's other form of a stream."""
APIS = [CHAT, RESPONSES, MESSAGES, GEMINI]
REFUSED = [
    (m.decode, *row) for m in (of_chat, of_responses, of_messages, of_gemini) for row in m.REFUSED
]
"""Decoders of changes of a request; changes; the place or the words of the refusal."""
MEANS = [
    (m.decode, *row) for m in (of_chat, of_responses, of_messages, of_gemini) for row in m.MEANS
]
"""Decoders; changes; a field of the decoded call; its value."""
every_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.dialect.NAME)
