from dataclasses import replace

from rolltap.addons.dialects import anthropic
from rolltap.addons.dialects.model_call import DialectError, ModelCall, Reply
from tests.addons.dialects.anthropic.test_reply import HEAD
from tests.addons.dialects.apis import MESSAGES, events_of, streamed


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
