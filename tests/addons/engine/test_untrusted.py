"""An engine that sends too much, another model's tokens, or secrets: all of it is an error or a
violation."""

import asyncio
import gzip
import json
from contextlib import asynccontextmanager

import pytest

from rolltap.addons.engine.own_model import OwnModel
from rolltap.addons.errors import EngineError
from tests.addons.endpoint.asking import told
from tests.addons.engine.test_client import generate
from tests.addons.harness import user
from tests.deep import cases
from tests.scripted_engine import Answer

SECRET = "Bearer 0123456789abcdef"
BOUND = r"sent more than 1,\d{3},\d{3} bytes at once"
LONG = "x" * ((1 << 20) + 1)
ZEROS = gzip.compress(bytes(64 << 20))
ZIPPED = {"content-encoding": "gzip"}


@pytest.fixture
async def client(connect, scripted_engine):
    return connect(scripted_engine.url)


def chunk(*token_ids, **fields):
    """Return the event of these tokens."""
    content = [{"token_id": i, "logprob": -1.0} for i in token_ids]
    choice = {
        "token_ids": token_ids,
        "logprobs": {"content": content},
        "finish_reason": None,
        **fields,
    }
    return json.dumps({"choices": [choice]})


TOO_MUCH = {
    "an event": Answer(200, json.dumps({"error": {"message": LONG, "code": 400}})),
    "an event without an end": Answer(200, LONG.encode()),
    "lines without an end": Answer(200, b":\n" * (1 << 20)),
    "a comment": Answer(200, f":{LONG}\n\n".encode()),
    "a refusal": Answer(400, LONG),
}


@pytest.mark.parametrize("reply", TOO_MUCH.values(), ids=TOO_MUCH)
async def test_more_bytes_than_an_event_has_are_an_error_that_names_the_engine_and_the_bound(
    scripted_engine, client, reply
):
    scripted_engine.replies.append(reply)
    with pytest.raises(EngineError, match=f"the engine at {scripted_engine.url} {BOUND}") as error:
        await generate(client)
    assert (error.value.status, error.value.retryable) == (502, False)


@pytest.mark.parametrize("path", cases(["/v1/models", "/version", "/server_info", "/tokenize"]))
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(200, json.dumps([LONG])), BOUND),
        (Answer(200, ZEROS, ZIPPED), "sent a compressed reply"),
    ],
)
async def test_so_are_the_answers_to_all_that_is_asked(
    scripted_engine, connect, rendering, path, answer, words
):
    scripted_engine.answers[path] = answer
    own = OwnModel.of(rendering.model, rendering.tokenizer)
    with pytest.raises(EngineError, match=f"the engine at {scripted_engine.url} {words}"):
        await connect(scripted_engine.url, own=own).describe()


async def test_an_engine_whose_health_is_compressed_is_not_healthy(scripted_engine, client):
    assert await client.healthy()
    scripted_engine.answers["/health"] = Answer(200, ZEROS, ZIPPED)
    assert not await client.healthy()


@pytest.mark.parametrize("coding", cases(["gzip", "deflate", "br", "zstd", "gzip, identity"]))
@pytest.mark.parametrize("status", [200, 400])
async def test_a_compressed_reply_was_not_asked_for_and_is_an_error(
    scripted_engine, client, coding, status
):
    scripted_engine.replies.append(Answer(status, ZEROS, {"content-encoding": coding}))
    with pytest.raises(
        EngineError, match=f"the engine at {scripted_engine.url} sent a compressed reply"
    ) as error:
        await generate(client)
    assert error.value.status == 502


@asynccontextmanager
async def raw(*parts):
    """Yield the URL of a server that answers every connection with these bytes, and the requests
    that it got."""
    requests = []

    async def answer(reader, writer):
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        for part in parts:
            writer.write(part)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()), requests


async def test_no_compression_is_asked_for(connect):
    async with raw(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as (url, requests):
        with pytest.raises(EngineError):
            await generate(connect(url))
    assert b"\r\naccept-encoding: identity\r\n" in requests[0].lower()


async def test_what_comes_after_the_end_is_bounded_too(scripted_engine, client):
    end = chunk(5, finish_reason="stop").encode()
    scripted_engine.replies.append(
        Answer(200, b"data: " + end + b"\n\ndata: [DONE]\n\n" + bytes(8 << 20))
    )
    assert [event.token_ids for event in await generate(client)] == [[5]]


SAID = {
    "a refusal": Answer(400, json.dumps({"error": {"message": f"temperature and {SECRET}"}})),
    "a failure": Answer(500, SECRET),
    "no such route": Answer(404, SECRET),
    "no access": Answer(403, SECRET),
    "an error event": Answer(
        200, json.dumps({"error": {"message": f"temperature and {SECRET}", "code": 400}})
    ),
    "an error with another code": Answer(
        200, json.dumps({"error": {"message": "", "code": SECRET}})
    ),
    "an invalid event": Answer(200, SECRET),
    "a wrong number": Answer(200, chunk(SECRET)),
    "a finish reason": Answer(200, chunk(5, finish_reason=SECRET)),
}
HEAD = b"HTTP/1.1 200 OK\r\n"
MALFORMED = {
    "a status line": [b"HTTP/1.1 Bearer 0123456789abcdef\r\n\r\n"],
    "a header": [HEAD, b"Bearer\x00 0123456789abcdef: x\r\n\r\n"],
    "a chunk": [HEAD, b"transfer-encoding: chunked\r\n\r\nBearer 0123456789abcdef\r\n"],
}


@pytest.mark.parametrize("reply", SAID.values(), ids=SAID)
async def test_the_words_of_an_engine_reach_neither_the_harness_nor_the_run(
    harness, scripted_engine, reply
):
    scripted_engine.replies += [reply, reply]  # a failure is asked again
    status, answer = await harness.ask(user())
    (call,) = harness.calls()
    (fault,) = harness.events("fault")
    assert status in (400, 502, 500)
    assert "0123456789abcdef" not in f"{answer} {call} {fault}"
    for text in (answer["error"]["message"], call["error"], fault["detail"]):
        assert f"the engine at {scripted_engine.url}" in text


@pytest.mark.parametrize("parts", MALFORMED.values(), ids=MALFORMED)
async def test_nor_does_what_is_no_http(connect, parts):
    async with raw(*parts) as (url, _):
        client = connect(url)
        for asked in (generate(client), client.served()):
            with pytest.raises(EngineError, match=url) as error:
                await asked
            assert "0123456789abcdef" not in str(error.value)


@pytest.mark.parametrize("name", ["a refusal", "an error event"])
async def test_a_refusal_names_its_status_what_it_is_about_and_where_to_look(
    scripted_engine, client, name
):
    scripted_engine.replies.append(SAID[name])
    words = "answered 400 and named temperature: its log says why"
    with pytest.raises(EngineError, match=f"the engine at {scripted_engine.url} {words}") as error:
        await generate(client)
    assert (error.value.status, error.value.retryable, error.value.answered) == (400, False, True)


@pytest.mark.parametrize("code", cases([10**30, -1, 0, 99, 200, 600, True, "400", None, [], 1.5]))
async def test_a_code_that_is_no_status_of_an_error_is_500(scripted_engine, client, code):
    scripted_engine.replies.append(
        Answer(200, json.dumps({"error": {"message": "no", "code": code}}))
    )
    with pytest.raises(EngineError, match="answered 500") as error:
        await generate(client)
    assert (error.value.status, error.value.retryable) == (502, True)


@pytest.mark.parametrize("token_id", cases([2**40, -1, True, 1.5, "5", None, 2**31, 10**400, [5]]))
async def test_what_is_no_token_id_is_an_invalid_event(harness, scripted_engine, token_id):
    scripted_engine.replies.append(Answer(200, chunk(5, token_id)))
    status, _ = await harness.ask(user())
    (call,) = harness.calls()
    assert status == 502
    assert call["status"] == "failed"
    assert call["completion_ids"] == []
    assert "sent an invalid event" in call["error"]


@pytest.mark.parametrize(
    "fields",
    cases(
        [
            {"weight_versions": [{"version": "1", "start": "0", "end": 1}]},
            {"weight_versions": [{"version": "1", "start": 0, "end": 2**40}]},
            {"weight_versions": [{"version": 1, "start": 0, "end": -1}]},
            {"weight_versions": {"version": "1"}},
        ]
    ),
)
async def test_other_values_of_other_types_are_one_too(scripted_engine, client, fields):
    scripted_engine.replies.append(Answer(200, chunk(5, **fields)))
    with pytest.raises(EngineError, match="sent an invalid event"):
        await generate(client)


@pytest.mark.parametrize("split", [False, True], ids=["in one event", "in several"])
async def test_more_tokens_than_asked_are_a_violation_and_end_the_call(
    harness, scripted_engine, split
):
    ids = list(range(5, 200))
    events = [chunk(i) for i in ids] if split else [chunk(*ids)]
    body = "".join(f"data: {event}\n\n" for event in [*events, chunk(7, finish_reason="stop")])
    scripted_engine.replies.append(Answer(200, body.encode()))
    status, answer = await harness.ask(user(), max_tokens=8)
    (call,) = harness.calls()
    words = "9 token ids where at most 8 were asked"
    assert call["status"] == "failed"
    assert call["violation"] == words
    assert call["completion_ids"] == ids[:9]
    assert len(call["logprobs"]) == 9
    assert status == 502
    assert words in answer["error"]["message"]
    assert len(scripted_engine.requests) == 1


async def test_a_token_beyond_the_vocabulary_is_a_violation_and_ends_the_call(
    harness, rendering, scripted_engine
):
    beyond = rendering.vocabulary
    scripted_engine.replies.append(Answer(200, chunk(5, beyond, 6, finish_reason="stop")))
    status, answer = await harness.ask(user())
    (call,) = harness.calls()
    words = f"token 1 is {beyond}, which is not in the vocabulary"
    assert call["status"] == "failed"
    assert call["violation"] == words
    assert call["completion_ids"] == [5, beyond]
    assert status == 502
    assert words in answer["error"]["message"]
    await told(harness, user("Again"))


async def test_a_stop_text_that_was_not_asked_for_is_not_passed_on(harness, scripted_engine):
    ids = [*scripted_engine.ids("Hi."), scripted_engine.tokenizer.eos_token_id]
    reply = chunk(*ids, finish_reason="stop", stop_reason=SECRET)
    scripted_engine.replies.append(Answer(200, reply))
    body = {"model": "m", "max_tokens": 50, "messages": [user()]}
    _, text = await harness.send(body, path="/v1/messages")
    assert json.loads(text)["stop_sequence"] is None
    assert SECRET not in text
