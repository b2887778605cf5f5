import json
from dataclasses import replace

import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError, Reply, ReplyContext, ToolCall, Usage, sign
from tests.addons.dialects.apis import ARRAY, GEMINI, chunks_of
from tests.addons.dialects.test_google import CALL, GENERATE, STREAM
from tests.addons.harness import rows

SIGNED = {"thoughtSignature": sign("call-9")}


def encoded(reply):
    context = ReplyContext("call-9", 1_700_000_000, GENERATE, replace(CALL, reasoning="shown"))
    usage = Usage(prompt=7, completion=3, cached=2, reasoning=2)
    return json.loads(routes.GEMINI.encode_reply(context, reply, usage))


def test_a_reply_is_one_candidate():
    calls = [ToolCall("c1", "look", '{"at": "é"}'), ToolCall("c2", "look", "")]
    reply = Reply("Wait.", "Hm.", calls, "tool_calls")
    parts = [
        {"text": "Hm.", "thought": True},
        {"text": "Wait."},
        {"functionCall": {"id": "c1", "name": "look", "args": {"at": "é"}}, **SIGNED},
        {"functionCall": {"id": "c2", "name": "look", "args": {"INVALID_JSON": ""}}},
    ]
    assert encoded(reply) == {
        "candidates": [
            {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
        ],
        "usageMetadata": {
            "promptTokenCount": 7,
            "candidatesTokenCount": 1,
            "thoughtsTokenCount": 2,
            "totalTokenCount": 10,
            "cachedContentTokenCount": 2,
        },
        "modelVersion": "gemini-x",
        "responseId": "call-9",
    }


STATUSES = """
400 INVALID_ARGUMENT
401 UNAUTHENTICATED
403 PERMISSION_DENIED
404 NOT_FOUND
413 INVALID_ARGUMENT
429 RESOURCE_EXHAUSTED
500 INTERNAL
502 INTERNAL
503 UNAVAILABLE
504 DEADLINE_EXCEEDED
"""


@pytest.mark.parametrize(("status", "name"), rows(STATUSES))
def test_an_error_has_the_name_of_its_status(status, name):
    error = json.loads(routes.GEMINI.encode_error(DialectError("No.", status=int(status))))
    assert error == {"error": {"code": int(status), "message": "No.", "status": name}}


either = pytest.mark.parametrize("api", [GEMINI, ARRAY], ids=["events", "array"])


def test_a_delta_has_reasoning_before_content():
    (chunk,) = chunks_of(routes.GEMINI.stream_encoder(GEMINI.context()).delta("Hm.", "Hi."))
    parts = chunk["candidates"][0]["content"]["parts"]
    assert parts == [{"text": "Hm.", "thought": True}, {"text": "Hi."}]


def test_reasoning_that_is_not_sent_keeps_the_connection_open():
    encoder = routes.GEMINI.stream_encoder(ReplyContext("call-9", 0, STREAM + "?alt=sse", CALL))
    assert encoder.delta("Hm.", "") == encoder.keep_alive()


@either
def test_a_failed_stream_ends_with_the_error(api):
    encoder = routes.GEMINI.stream_encoder(api.context())
    begun = encoder.start() + encoder.delta("", "Hi.")
    *_, last = chunks_of(begun + encoder.error(DialectError("The engine is gone.", status=503)))
    assert last == {
        "error": {"code": 503, "message": "The engine is gone.", "status": "UNAVAILABLE"}
    }


@pytest.mark.parametrize("query", ["alt=sse", "key=x&alt=sse", "%24alt=sse", ""])
def test_the_query_asks_for_events(query):
    context = ReplyContext("call-9", 0, f"{STREAM}?{query}", CALL)
    expected = "text/event-stream" if query else "application/json"
    assert routes.GEMINI.stream_encoder(context).content_type == expected
