import json

import pytest
from hypothesis import strategies as st

from rolltap.addons.dialects import anthropic
from rolltap.addons.dialects.model_call import (
    ContextOverflow,
    ModelCall,
    Reply,
    ReplyContext,
    ServedModel,
    ToolCall,
    Usage,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
arguments = (
    st.dictionaries(st.text(max_size=5) | st.just("INVALID_JSON"), json_values, max_size=3).map(json.dumps)
    | json_values.map(lambda value: json.dumps(value, ensure_ascii=False))
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "{",
            '{"INVALID_JSON": "x"}',
            '{"n": 1e400}',
            '{"n": NaN}',
            '{"n": 1e22}',
            '{"a": "\\ud83d"}',
            "9" * 5000,
            "[" * 2000,
        ]
    )
)
calls = st.builds(ToolCall, st.from_regex(r"call_[0-9a-f]{4}", fullmatch=True), st.text(min_size=1), arguments)
replies = st.builds(
    Reply,
    content=st.text(max_size=12),
    reasoning=st.text(max_size=12),
    tool_calls=st.lists(calls, max_size=3),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
    stop=st.none() | st.just("END"),
)
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

    def test_a_lone_surrogate_does_not_break_the_body(self):
        body = anthropic.encode_reply(HEAD, Reply("half \ud83d"), USAGE)
        assert json.loads(body)["content"][0]["text"] == "half ?"


def test_an_overflow_has_the_wording_of_the_api():
    error = json.loads(anthropic.encode_error(ContextOverflow(5000, 4096)))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 5000 tokens > 4096 maximum"}


def test_a_model_has_its_window():
    (model,) = json.loads(anthropic.encode_models("/v1/models", [ServedModel("tiny", 4096)], 0))["data"]
    assert model["max_input_tokens"] == model["max_tokens"] == 4096
