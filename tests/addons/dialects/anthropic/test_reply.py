import json
from dataclasses import replace

import pytest

from rolltap.addons.dialects import anthropic
from rolltap.addons.dialects.model_call import (
    ContextOverflow,
    DialectError,
    ModelCall,
    Reply,
    ReplyContext,
    ServedModel,
    ToolCall,
    Usage,
)
from tests.addons.dialects.apis import MESSAGES, events_of, streamed

HEAD = ReplyContext("c9", 5, "/v1/messages", ModelCall("claude-x", [], []))
USAGE = Usage(prompt=7, completion=3, cached=4)


class TestEncodeReply:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('{"at": "é"}', {"at": "é"}),
            ("not JSON", {"INVALID_JSON": "not JSON"}),
            ("[1]", {"INVALID_JSON": "[1]"}),
            ('{"INVALID_JSON": "x"}', {"INVALID_JSON": '{"INVALID_JSON": "x"}'}),
            ('{"n": 1e400}', {"INVALID_JSON": '{"n": 1e400}'}),
        ],
        ids=["an object", "not JSON", "a list", "like wrapped text", "infinite"],
    )
    def test_arguments_are_an_object_whatever_was_sampled(self, text, expected):
        reply = Reply(tool_calls=[ToolCall("call_1", "look", text)], finish_reason="tool_calls")
        (block,) = json.loads(anthropic.encode_reply(HEAD, reply, USAGE))["content"]
        assert block == {"type": "tool_use", "id": "call_1", "name": "look", "input": expected}

    def test_tool_calls_are_the_reason_even_when_a_stop_text_ended_them(self):
        reply = Reply("", "", [ToolCall("call_1", "look", "{}")], "tool_calls", stop="END")
        message = json.loads(anthropic.encode_reply(HEAD, reply, USAGE))
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)

    def test_no_content_is_an_empty_list(self):
        assert json.loads(anthropic.encode_reply(HEAD, Reply(), USAGE))["content"] == []


def test_an_overflow_has_the_wording_of_the_api():
    error = json.loads(anthropic.encode_error(ContextOverflow(5000, 4096)))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 5000 tokens > 4096 maximum"}


def test_a_model_has_its_window():
    (model,) = json.loads(anthropic.encode_models("/v1/models", [ServedModel("tiny", 4096)], 0))["data"]
    assert model["max_input_tokens"] == model["max_tokens"] == 4096


def test_a_keep_alive_is_a_ping():
    assert anthropic.stream_encoder(HEAD).keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_an_error_is_an_event():
    error = DialectError("Down.", status=503)
    stream = anthropic.stream_encoder(HEAD).error(error)
    assert stream == b"event: error\ndata: " + anthropic.encode_error(error) + b"\n\n"


def test_reasoning_that_is_not_sent_keeps_the_connection_open():
    context = replace(HEAD, model_call=ModelCall("claude-x", [], [], reasoning="hidden"))
    encoder = anthropic.stream_encoder(context)
    assert encoder.delta("Hm.", "") == encoder.keep_alive()


def test_thinking_is_signed_before_its_block_ends():
    events = events_of(streamed(MESSAGES, HEAD, Reply("Hi", "Hm.")))
    assert [e["delta"]["type"] if e["type"] == "content_block_delta" else e["type"] for e in events] == [
        "message_start",
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
