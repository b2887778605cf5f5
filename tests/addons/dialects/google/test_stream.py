import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import google
from rolltap.addons.dialects.model_call import DialectError, Reply, ReplyContext, ToolCall
from tests.addons.dialects.google.test_reply import ASKED, REPLIES, USAGE, echo, issued, same
from tests.addons.dialects.google.test_request import CALL, STREAM
from tests.deep import examples

SSE_HEAD = ReplyContext("call-9", 1_700_000_000, STREAM + "?alt=sse", ASKED)
ARRAY_HEAD = ReplyContext("call-9", 1_700_000_000, STREAM, ASKED)


def in_pieces(text, cuts):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [piece for piece in pieces if piece]


def stream(context, reply, cuts=(), error=None):
    """Return the bytes of a streamed reply, cut into deltas, with a keep-alive before each piece."""
    encoder = google.stream_encoder(context)
    pieces = [encoder.delta(piece, "") for piece in in_pieces(reply.reasoning, cuts)]
    pieces += [encoder.delta("", piece) for piece in in_pieces(reply.content, cuts)]
    pieces.append(encoder.error(error) if error else encoder.finish(reply, USAGE))
    return encoder.start() + b"".join(encoder.keep_alive() + piece for piece in pieces)


def chunks_of(body):
    """Return the chunks of a stream of server-sent events or of a JSON array."""
    if body.startswith(b"["):
        return json.loads(body)
    lines = [line for line in body.decode("ascii").splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@examples(300)
@given(REPLIES, st.lists(st.integers(0, 20)), st.sampled_from([SSE_HEAD, ARRAY_HEAD]))
def test_an_echoed_stream_is_the_message_that_was_issued_however_it_was_cut(reply, cuts, context):
    assert same(echo(*chunks_of(stream(context, reply, cuts))), issued(reply))


@pytest.mark.parametrize(
    ("context", "content_type"), [(SSE_HEAD, "text/event-stream"), (ARRAY_HEAD, "application/json")]
)
def test_the_last_chunk_has_calls_finish_reason_and_usage(context, content_type):
    reply = Reply("Wait.", tool_calls=[ToolCall("c1", "look", "{}")], finish_reason="tool_calls")
    text, last = chunks_of(stream(context, reply))
    assert google.stream_encoder(context).content_type == content_type
    assert text["candidates"] == [{"content": {"role": "model", "parts": [{"text": "Wait."}]}, "index": 0}]
    assert "usageMetadata" not in text
    (candidate,) = last["candidates"]
    assert [part["functionCall"]["id"] for part in candidate["content"]["parts"]] == ["c1"]
    assert candidate["finishReason"] == "STOP"
    assert last["usageMetadata"]["totalTokenCount"] == 10


def test_a_delta_has_reasoning_before_content():
    (chunk,) = chunks_of(google.stream_encoder(SSE_HEAD).delta("Hm.", "Hi."))
    parts = chunk["candidates"][0]["content"]["parts"]
    assert parts == [{"text": "Hm.", "thought": True}, {"text": "Hi."}]


def test_reasoning_that_is_not_sent_keeps_the_connection_open():
    encoder = google.stream_encoder(ReplyContext("call-9", 0, STREAM + "?alt=sse", CALL))
    assert encoder.delta("Hm.", "") == encoder.keep_alive()


@pytest.mark.parametrize("context", [SSE_HEAD, ARRAY_HEAD], ids=["events", "array"])
def test_a_failed_stream_ends_with_the_error(context):
    error = DialectError("The engine is gone.", status=503)
    *_, last = chunks_of(stream(context, Reply("Hi."), error=error))
    assert last == {"error": {"code": 503, "message": "The engine is gone.", "status": "UNAVAILABLE"}}


@pytest.mark.parametrize("query", ["alt=sse", "key=x&alt=sse", "%24alt=sse"])
def test_the_query_asks_for_events(query):
    context = ReplyContext("call-9", 0, f"{STREAM}?{query}", CALL)
    assert google.stream_encoder(context).content_type == "text/event-stream"
