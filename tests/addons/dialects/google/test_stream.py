import pytest

from rolltap.addons.dialects import google
from rolltap.addons.dialects.model_call import DialectError, Reply, ReplyContext, ToolCall
from tests.addons.dialects.apis import ARRAY, GEMINI, chunks_of, streamed
from tests.addons.dialects.google.test_request import CALL, STREAM

either = pytest.mark.parametrize("api", [GEMINI, ARRAY], ids=["events", "array"])


@either
def test_the_last_chunk_has_calls_finish_reason_and_usage(api):
    reply = Reply("Wait.", tool_calls=[ToolCall("c1", "look", "{}")], finish_reason="tool_calls")
    text, last = chunks_of(streamed(api, api.context(), reply, piece=9))
    assert text["candidates"] == [{"content": {"role": "model", "parts": [{"text": "Wait."}]}, "index": 0}]
    assert "usageMetadata" not in text
    (candidate,) = last["candidates"]
    assert [part["functionCall"]["id"] for part in candidate["content"]["parts"]] == ["c1"]
    assert candidate["finishReason"] == "STOP"
    assert last["usageMetadata"]["totalTokenCount"] == 10


def test_a_delta_has_reasoning_before_content():
    (chunk,) = chunks_of(google.stream_encoder(GEMINI.context()).delta("Hm.", "Hi."))
    parts = chunk["candidates"][0]["content"]["parts"]
    assert parts == [{"text": "Hm.", "thought": True}, {"text": "Hi."}]


def test_reasoning_that_is_not_sent_keeps_the_connection_open():
    encoder = google.stream_encoder(ReplyContext("call-9", 0, STREAM + "?alt=sse", CALL))
    assert encoder.delta("Hm.", "") == encoder.keep_alive()


@either
def test_a_failed_stream_ends_with_the_error(api):
    encoder = google.stream_encoder(api.context())
    begun = encoder.start() + encoder.delta("", "Hi.")
    *_, last = chunks_of(begun + encoder.error(DialectError("The engine is gone.", status=503)))
    assert last == {"error": {"code": 503, "message": "The engine is gone.", "status": "UNAVAILABLE"}}


@pytest.mark.parametrize(
    ("query", "content_type"),
    [(query, "text/event-stream") for query in ("alt=sse", "key=x&alt=sse", "%24alt=sse")] + [("", "application/json")],
)
def test_the_query_asks_for_events(query, content_type):
    context = ReplyContext("call-9", 0, f"{STREAM}?{query}", CALL)
    assert google.stream_encoder(context).content_type == content_type
