import json
from dataclasses import replace

import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError, ModelCall, Reply, ReplyContext, ToolCall, Usage
from tests.addons.dialects.apis import MESSAGES, events_of, streamed

HEAD = ReplyContext("c9", 5, "/v1/messages", ModelCall("claude-x", [], []))


def encoded(reply):
    return json.loads(routes.MESSAGES.encode_reply(HEAD, reply, Usage(prompt=7, completion=3, cached=4)))


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
def test_arguments_are_an_object_whatever_was_sampled(text, expected):
    (block,) = encoded(Reply(tool_calls=[ToolCall("call_1", "look", text)], finish_reason="tool_calls"))["content"]
    assert block == {"type": "tool_use", "id": "call_1", "name": "look", "input": expected}


def test_tool_calls_are_the_reason_even_when_a_stop_text_ended_them_and_no_content_is_an_empty_list():
    message = encoded(Reply("", "", [ToolCall("call_1", "look", "{}")], "tool_calls", stop="END"))
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    empty = encoded(Reply())
    assert (empty["content"], empty["usage"]["cache_creation_input_tokens"]) == ([], 0)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(status, kind):
    error = DialectError("No.", status=status)
    body = routes.MESSAGES.encode_error(error)
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "No."}}
    assert routes.MESSAGES.stream_encoder(HEAD).error(error) == b"event: error\ndata: " + body + b"\n\n"


def test_reasoning_that_is_not_sent_keeps_the_connection_open():
    encoder = routes.MESSAGES.stream_encoder(
        replace(HEAD, model_call=ModelCall("claude-x", [], [], reasoning="hidden"))
    )
    assert encoder.delta("Hm.", "") == encoder.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


SIGNED = """
message_start content_block_start thinking_delta signature_delta content_block_stop
content_block_start text_delta content_block_stop message_delta message_stop
"""


def test_thinking_is_signed_before_its_block_ends():
    events = events_of(streamed(MESSAGES, HEAD, Reply("Hi", "Hm.")))
    kinds = [e["delta"]["type"] if e["type"] == "content_block_delta" else e["type"] for e in events]
    assert kinds == SIGNED.split()
