import json
from dataclasses import replace

import pytest
from hypothesis import given

from rolltap.addons.dialects import anthropic
from rolltap.addons.dialects.model_call import DialectError, ModelCall, Reply, parse_arguments
from tests.addons.dialects.anthropic.test_reply import HEAD, USAGE, replies
from tests.addons.dialects.anthropic.test_request import decode_assistant
from tests.deep import examples


def streamed(reply, *, keep_alive=False, piece=3):
    """Return the events of a reply whose text is sent in pieces."""
    encoder = anthropic.stream_encoder(HEAD)
    events = encoder.start()
    for text, name in ((reply.reasoning, "reasoning"), (reply.content, "content")):
        for start in range(0, len(text), piece):
            events += encoder.delta(**{"reasoning": "", "content": "", name: text[start : start + piece]})
            events += encoder.keep_alive() if keep_alive else b""
    return events + encoder.finish(reply, USAGE)


def events_of(stream):
    *events, rest = stream.decode().split("\n\n")
    assert rest == ""
    for event in events:
        kind, data = event.split("\n", 1)
        value = json.loads(data.removeprefix("data: "), parse_constant=pytest.fail)
        assert kind == f"event: {value['type']}"
        yield value


def assembled(stream):
    """Return the message that a client accumulates from the events of a stream."""
    message = None
    for event in events_of(stream):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(block := event["content_block"])
                written = ""
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    written += delta["partial_json"]
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
                if block["type"] == "tool_use":
                    block["input"] = json.loads(written)
            case "message_delta":
                message.update(event["delta"], usage=event["usage"])
    assert event["type"] == "message_stop"
    return message


@given(replies)
@examples(1000)
def test_an_echoed_reply_is_the_reply(reply):
    body = anthropic.encode_reply(HEAD, reply, USAGE)
    message = json.loads(body, parse_constant=pytest.fail)
    assert repr(assembled(streamed(reply))) == repr(message)

    echoed = decode_assistant(*message["content"])
    assert echoed.pop("call_id", None) == ("c9" if reply.reasoning else None)
    issued = reply.to_message()
    for call in issued.get("tool_calls", []):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    assert repr(echoed) == repr(issued)  # NaN equals itself only as text


class TestStreamEncoder:
    def test_the_first_event_names_the_message(self):
        (event,) = events_of(anthropic.stream_encoder(HEAD).start())
        assert (event["type"], event["message"]["id"]) == ("message_start", "msg_c9")

    def test_a_keep_alive_is_a_ping(self):
        assert anthropic.stream_encoder(HEAD).keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'

    def test_an_error_is_an_event(self):
        error = DialectError("Down.", status=503)
        stream = anthropic.stream_encoder(HEAD).error(error)
        assert stream == b"event: error\ndata: " + anthropic.encode_error(error) + b"\n\n"

    def test_reasoning_that_is_not_sent_keeps_the_connection_open(self):
        context = replace(HEAD, model_call=ModelCall("claude-x", [], [], reasoning="hidden"))
        encoder = anthropic.stream_encoder(context)
        assert encoder.delta("Hm.", "") == encoder.keep_alive()

    def test_thinking_is_signed_before_its_block_ends(self):
        events = list(events_of(streamed(Reply("Hi", "Hm."))))
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
