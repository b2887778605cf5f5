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
GIVEN = "given by the test"


def filled(fields, value):
    """Return fields with a value in the place of `GIVEN`."""
    return json.loads(json.dumps(fields).replace(f'"{GIVEN}"', json.dumps(value)))


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
    choosing: list[dict[str, Any]]
    """The fields that force the tool of the name `GIVEN`, or allow it alone, in every form."""
    stop: dict[str, Any]
    """The fields that ask to stop at the texts `GIVEN`."""
    schema: dict[str, Any]
    """The fields that ask for a reply of the JSON schema `GIVEN`."""
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
        talk = self.talk[key]
        whole = [*self.request[key], *talk]
        elements = st.sampled_from([talk[0], *self.elements])
        places = st.integers(0, len(whole))

        def mixed(length, inserted):
            mixture = whole[:length]
            for place, element in inserted:
                mixture.insert(place, element)
            return [*mixture, talk[0]]

        return st.builds(mixed, places, st.lists(st.tuples(places, elements), max_size=4))

    def decode(self, body, target=""):
        return self.decode_bytes(json.dumps(body).encode(), target)

    def decode_bytes(self, body, target=""):
        return self.dialect.decode(parse_object(body), target or self.target)

    def context(self, **changes):
        """Return the context of a reply to `request`, which asks for all that a reply may have."""
        call = self.decode({**self.request, **changes})
        call.include_usage = True
        call.reasoning = "shown"
        target = self.stream_target or self.target
        return ReplyContext("c9", 5, target, call, prompt_tokens=USAGE.prompt)

    def echo(self, whole):
        """Return the message that a reply decodes to when a program sends it back."""
        return self.decode(self.echoing(whole)).messages[1]

    def issues(self, reply):
        """Return True when a reply has an opaque field that names its call."""
        return self.dialect is routes.GEMINI or (
            self.dialect is not routes.CHAT and bool(reply.reasoning)
        )


def elements_of(table):
    """Return the elements of a conversation: each is JSON, whose further lines are indented."""
    text = table.replace("SIGNATURE", sign("c7")).replace("SUMMARY", of_responses.SUMMARY)
    lines = text.replace("\n    ", " ").strip().splitlines()
    return tuple(json.loads(line) for line in lines)


def streamed(api, context, reply, piece=3, keep_alive=False):
    """Return the bytes of a reply whose text is sent in pieces."""
    encoder = api.dialect.stream_encoder(context)
    sent = encoder.start()
    for name in ("reasoning", "content"):
        text = getattr(reply, name)
        for begin in range(0, len(text), piece):
            delta = {"reasoning": "", "content": "", name: text[begin : begin + piece]}
            sent += encoder.delta(**delta)
            if keep_alive:
                sent += encoder.keep_alive()
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
    ended = {"logprobs": None, "finish_reason": choice["finish_reason"]}
    choice = {"index": 0, "message": message, **ended}
    return {**last, "object": "chat.completion", "choices": [choice]}


def _chat_echo(whole):
    return {"messages": [USER, whole["choices"][0]["message"]]}


def _responses(stream):
    events = events_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    whole = events[-1]["response"]
    done = []
    sent = {item["id"]: "" for item in whole["output"]}
    for event in events:
        if event["type"] == "response.output_item.done":
            done.append(event["item"])
        if event["type"].endswith(".delta"):
            sent[event["item_id"]] += event["delta"]
    assert done == whole["output"]
    for item in whole["output"]:
        (part,) = item.get("summary") or item.get("content") or [{}]
        assert sent[item["id"]] == part.get("text", item.get("arguments", item.get("input", "")))
    return whole


def _responses_echo(whole):
    return {"input": [USER, *whole["output"]], "tools": of_responses.REQUEST["tools"]}


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
                block = event["content_block"]
                message["content"].append(block)
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
    last = {}
    for chunk in chunks:
        for part in chunk["candidates"][0]["content"]["parts"]:
            if "text" in part and "text" in last and part.get("thought") == last.get("thought"):
                last.update({**part, "text": last["text"] + part["text"]})
            else:
                last = part
                parts.append(last)
    candidate = {**chunks[-1]["candidates"][0], "content": {"role": "model", "parts": parts}}
    return {**chunks[-1], "candidates": [candidate]}


def _gemini_echo(whole):
    return {"contents": [{"parts": [{"text": "Hi"}]}, whole["candidates"][0]["content"]]}


_TOOL = {"name": LONG, "parameters": {}}
_ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": GIVEN}}]}
_FUNCTION = {"type": "function", "name": LONG}
CHAT_ELEMENTS = """
{"role": "user", "content": [{"type": "image_url",
    "image_url": {"url": "https://x.example/a.png"}}]}
{"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "patch"}}]}
{"role": "tool", "tool_call_id": "", "name": "wire", "content": "x"}
"""
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
    choosing=[
        {"tool_choice": {"type": "function", "function": {"name": GIVEN}}},
        {"tool_choice": {"type": "custom", "custom": {"name": GIVEN}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": _ALLOWED}},
    ],
    tools=[[{"type": "function", "function": _TOOL}], [{"type": "custom", "custom": _TOOL}]],
    stop={"stop": GIVEN},
    schema={"response_format": {"type": "json_schema", "json_schema": {"schema": GIVEN}}},
    echoing=_chat_echo,
    assembled=_chat,
    elements=elements_of(CHAT_ELEMENTS),
)
RESPONSES_ELEMENTS = """
{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}],
    "encrypted_content": "SIGNATURE"}
{"role": "assistant", "content": "One more."}
{"role": "user", "content": [{"type": "input_image", "image_url": "https://x.example/a.png"}]}
{"type": "additional_tools", "tools": [{"type": "custom", "name": "more"}]}
{"type": "additional_tools", "tools": [{"type": "function", "name": "agents__spawn"}]}
{"type": "compaction", "encrypted_content": "SUMMARY"}
{"type": "compaction_trigger"}
"""
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
    choosing=[
        {"tool_choice": {"type": "function", "name": GIVEN}},
        {"tool_choice": {"type": "custom", "name": GIVEN}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": GIVEN}],
            }
        },
    ],
    tools=[[_FUNCTION], [{**_FUNCTION, "type": "namespace"}]],
    stop={},
    schema={"text": {"format": {"type": "json_schema", "schema": GIVEN}}},
    echoing=_responses_echo,
    assembled=_responses,
    elements=elements_of(RESPONSES_ELEMENTS),
    count_target="/v1/responses/input_tokens",
)


def _turn(content, answer):
    return {"max_tokens": 1, "messages": [USER, {"role": "assistant", "content": content}, answer]}


def _messages_echo(whole):
    return _turn(whole["content"], USER)


_USES = [{"type": "tool_use", "id": i, "name": name, "input": {}} for i, name in CALLS]
_RESULTS = [{"type": "tool_result", "tool_use_id": i, "content": "x"} for i in ANSWERED]
MESSAGES_ELEMENTS = """
{"role": "assistant", "content": "One more."}
{"role": "user", "content": [{"type": "image", "source": {"type": "url",
    "url": "https://x.example/a.png"}}]}
{"role": "assistant", "content": [{"type": "tool_reference", "tool_name": "later"}]}
{"role": "user", "content": [{"type": "tool_reference", "tool_name": "later"}]}
{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "",
    "content": [{"type": "tool_reference", "tool_name": "later"}]}]}
"""
MESSAGES = Api(
    routes.MESSAGES,
    "/v1/messages",
    of_messages.REQUEST,
    of_messages.bodies,
    talk=_turn(_USES, {"role": "user", "content": _RESULTS}),
    forbidding={"tool_choice": {"type": "none"}},
    choosing=[{"tool_choice": {"type": "tool", "name": GIVEN}}],
    tools=[[_TOOL]],
    stop={"stop_sequences": GIVEN},
    schema={"output_config": {"format": {"type": "json_schema", "schema": GIVEN}}},
    echoing=_messages_echo,
    assembled=_messages,
    elements=elements_of(MESSAGES_ELEMENTS),
    count_target="/v1/messages/count_tokens",
)
_ANY = {"mode": "ANY"}
_ANSWERS = [{"id": i, "name": dict(CALLS)[i], "response": {"output": "x"}} for i in ANSWERED]
GEMINI_ELEMENTS = """
{"role": "model", "parts": [{"functionCall": {"name": "look"}}, {"text": "Hm.", "thought": true}]}
{"role": "model", "parts": [{"text": "a"}, {"functionCall": {"name": "look"},
    "thoughtSignature": "SIGNATURE"}]}
{"role": "function", "parts": {"function_response": {"name": "look", "response": {}}}}
{"role": "user", "parts": [{"functionResponse": {"id": "c1", "name": "go", "response": {}}}]}
{"parts": [{"inline_data": {"mime_type": "image/png"}}]}
"""
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
    choosing=[
        {"toolConfig": {"functionCallingConfig": {**_ANY, "allowedFunctionNames": [GIVEN]}}},
        {"tool_config": {"functionCallingConfig": {**_ANY, "allowed_function_names": [GIVEN]}}},
    ],
    tools=[[{"functionDeclarations": [_TOOL]}]],
    stop={"generationConfig": {"stopSequences": GIVEN}},
    schema={
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": GIVEN}
    },
    echoing=_gemini_echo,
    assembled=_gemini,
    elements=elements_of(GEMINI_ELEMENTS),
    count_target="/v1beta/models/gemini-x:countTokens",
    stream_target="/v1beta/models/gemini-x:streamGenerateContent?alt=sse",
)
ARRAY = replace(GEMINI, stream_target="/v1beta/models/gemini-x:streamGenerateContent")
"""Gemini's other form of a stream."""
APIS = [CHAT, RESPONSES, MESSAGES, GEMINI]
REFUSED = []
"""Decoders of changes of a request; changes; the place or the words of the refusal."""
MEANS = []
"""Decoders; changes; a field of the decoded call; its value."""
for module in (of_chat, of_responses, of_messages, of_gemini):
    REFUSED += [(module.decode, *row) for row in module.REFUSED]
    MEANS += [(module.decode, *row) for row in module.MEANS]


def name_of(api):
    return api.dialect.NAME


every_api = pytest.mark.parametrize("api", APIS, ids=name_of)
