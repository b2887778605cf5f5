"""The endpoint behind a scripted engine: who may ask, errors, and the end of a session."""

import asyncio
import json
import threading
from unittest import mock

import aiohttp
import pytest
from yarl import URL

from rolltap.addons.endpoint import server, session
from rolltap.addons.endpoint.session import Session
from rolltap.addons.engine.client import Engine
from rolltap.addons.engine.own_model import Served
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.prompts.conversations import Conversations
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.reply import ReplyParser
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.tables import RunWriter, read_rows
from tests.addons.endpoint.asking import refused, told, values
from tests.addons.harness import PATH, recording, user
from tests.scripted_engine import Answer, Say

ENDED = (410, "session_ended")


def failing(error):
    return mock.Mock(side_effect=error)


def errors_of(text):
    """Return the error of a reply, or of the last event of a stream."""
    return json.loads(text.rstrip().split("\n\n")[-1].removeprefix("data: "))["error"]


@pytest.mark.parametrize(
    ("part", "name", "seconds", "faults"),
    [(EnginePool, "ready", 0, 1), (EnginePool, "ready", 600, 0), (Session, "decode", 0, 0)],
    ids=["long", "not long", "for others"],
)
async def test_a_call_that_waits_long_for_an_engine_alone_is_a_fault(
    restart, monkeypatch, part, name, seconds, faults
):
    waiting = asyncio.Event()

    async def wait(*_):
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(part, name, wait)
    monkeypatch.setattr(server, "UNANSWERED_SECONDS", seconds)
    async with restart() as harness:
        asked = asyncio.create_task(harness.ask(user()))
        await waiting.wait()
        asked.cancel()
    assert len(harness.events("fault")) == faults


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Answer(500, "bad"), 502),
        (Answer(403, "bad"), 502),
        (Answer(400, "bad"), 400),
        (Answer(413, "bad"), 413),
        (Answer(200, '{"error": {"message": "bad", "code": 400}}'), 400),
    ],
    ids=["500", "403", "400", "413", "in an event"],
)
async def test_an_engine_that_refuses_is_the_apis_own_error_and_a_fault(
    harness, scripted_engine, reply, expected, stream
):
    scripted_engine.replies.append(reply)
    status, text = await harness.send({"messages": [user()], "stream": stream})
    assert status == (200 if stream else expected)  # a stream's headers are sent first
    assert set(errors_of(text)) == {"message", "type", "param", "code"}
    (call,) = harness.calls()
    assert call["status"] == "failed"
    (fault,) = harness.events("fault")
    assert fault["call_id"] == call["call_id"]
    assert call["error"].endswith(fault["detail"])
    assert "its log says why" in fault["detail"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_fails_the_call_and_keeps_its_tokens(
    harness, scripted_engine, stream
):
    scripted_engine.replies.append(Say("one two three four", break_after=2))
    status, text = await harness.send({"messages": [user()], "stream": stream})
    assert status == (200 if stream else 503)
    assert errors_of(text)["code"] == (503 if stream else "engine_error")
    assert '"finish_reason":"' not in text.replace(" ", "")
    await told(harness, user())
    died, served = harness.calls()
    assert died["status"] == "failed"
    assert len(died["completion_ids"]) == 2
    assert served["status"] == "completed"


async def test_a_prompt_over_the_context_is_refused_and_max_tokens_never_exceed_its_room(
    harness, scripted_engine
):
    scripted_engine.max_model_len = 20
    status, reply = await harness.ask(user("word " * 100))
    assert status == 400
    assert reply["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 20 tokens" in reply["error"]["message"]
    assert "maximum context length" in harness.events("rejected")[0]["detail"]
    await harness.ask(user(), max_tokens=64000)
    (request,) = scripted_engine.requests
    assert request["sampling_params"]["max_tokens"] == 20 - len(request["token_ids"])


async def test_broken_tokens_are_kept_marked_and_answered(harness, scripted_engine):
    choice = {
        "token_ids": [5, 6],
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "v", "start": 0, "end": 2}],
    }
    scripted_engine.replies.append(Answer(200, json.dumps({"choices": [choice]})))
    await told(harness, user())
    (call,) = harness.calls()
    assert call["status"] == "completed"
    assert call["violation"] == "2 token ids but 0 log-probabilities"


FULL = OSError("No space left on device")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("part", "name", "error", "words", "recorded"),
    [
        (RunWriter, "add_call", FULL, "No space left on device", []),
        (RunWriter, "add_call", ValueError("no such column"), "no such column", []),
        (ReplyParser, "feed", RuntimeError("no such token"), "internal error", ["no such token"]),
    ],
    ids=["a full disk", "a wrong row", "a parser that fails"],
)
async def test_a_call_that_cannot_be_recorded_or_read_is_not_served(
    harness, monkeypatch, part, name, error, words, recorded, stream
):
    monkeypatch.setattr(part, name, failing(error))
    status, text = await harness.send({"messages": [user()], "stream": stream})
    assert status == (200 if stream else 500)
    assert words in text
    assert "[DONE]" not in text
    assert values(harness.calls(), "error") == recorded
    assert "completed" not in values(harness.calls(), "status")


async def test_a_conversation_that_cannot_be_rendered_is_refused_and_recorded(harness, monkeypatch):
    """It is no fault: an agent could ask for one, and its session would not count."""
    monkeypatch.setattr(Rendering, "render", failing(RecursionError("too deep")))
    assert await refused(harness, user()) == (400, "invalid_request_error")
    assert values(harness.events("rejected"), "detail") == ["too deep"]
    assert harness.events("fault") == []


SCHEMA = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400
NESTED = f'{{"type": "function", "function": {{"name": "t", "parameters": {SCHEMA}}}}}'
TOO_DEEP = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "tools": [{NESTED}]}}'


@pytest.mark.parametrize(
    ("body", "why"), [('{"messages": [', ""), (TOO_DEEP, "nested more than 128 levels")]
)
async def test_malformed_json_and_a_tool_that_is_nested_too_deep_are_refused(harness, body, why):
    status, text = await harness.send(body.encode())
    error = errors_of(text)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert why in error["message"]
    assert len(harness.events("rejected")) == 1
    assert harness.events("fault") == []


@pytest.mark.parametrize("secret", ["", "wrong", "\u00e9", "\udcff"])
async def test_a_request_without_the_secret_is_refused_whatever_bytes_it_has(harness, secret):
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nX-Rolltap-Secret: {secret}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.endpoint.port)
    writer.write(f"{head}Content-Length: 0\r\n\r\n".encode("utf-8", "surrogateescape"))
    assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
    writer.close()


@pytest.mark.parametrize(
    "request_line",
    ["GET /end", "POST /end?now", "POST /end/", "POST /v1/chat", "DELETE /v1/messages"],
)
async def test_a_request_that_is_none_of_the_proxys_ends_no_session(harness, request_line):
    method, path = request_line.split()
    headers = harness.endpoint.headers("s1", "api")
    async with harness.client.request(method, harness.url(path), headers=headers) as response:
        assert response.status == 404
    assert harness.events("ended") == []
    await told(harness, user())


@pytest.mark.parametrize(
    ("prefix", "recorded"),
    [
        ("/openai/deployments/gpt", "/openai/deployments/gpt"),
        ("/my/../gateway/", "/my/../gateway/"),
        ("/", "/"),
        ("/sk-live-0123456789abcdef/x%3Fkey=1", "/(24 characters)/(9 characters)"),
    ],
)
async def test_a_record_has_the_path_that_was_asked_without_what_may_be_a_key(
    harness, prefix, recorded
):
    url = URL(harness.url(f"{prefix}/chat/completions"), encoded=True)
    headers = harness.endpoint.headers("s1", "azure")
    for body in ({"messages": [user()]}, {}):
        async with harness.client.post(url, json=body, headers=headers) as response:
            await response.read()
    (call,) = harness.calls()
    (rejected,) = harness.events("rejected")
    assert call["path"] == rejected["path"] == f"{recorded}/chat/completions"


class TestEndOfSession:
    @pytest.mark.parametrize("why", ["the session ended", "the recorder was stopped"])
    async def test_running_calls_are_recorded_as_aborted(self, harness, scripted_engine, why):
        asked = await harness.held(scripted_engine, Say("one two three", hold_after=1))
        await (harness.end() if why == "the session ended" else harness.endpoint.close())
        status, reply = await asked
        assert status == 503
        assert reply["error"]["message"] == why
        (call,) = harness.calls()
        assert call["status"] == "aborted"
        assert call["error"] == why
        # the engine names the weights at the end only: `rolltap verify` asks of every call that
        # this is marked
        assert (call["violation"] is None) == (call["completion_ids"] == [])

    @pytest.mark.parametrize("late", [PATH, "/v1/responses/input_tokens"])
    async def test_a_later_request_is_refused_and_recorded(self, harness, scripted_engine, late):
        await told(harness, user())
        await harness.end()
        body = {"model": "m", "messages": [user()], "input": "Hello"}
        status, text = await harness.send(body, path=late)
        assert (status, errors_of(text)["code"]) == ENDED
        assert len(harness.calls()) == len(scripted_engine.requests) == 1
        (event,) = harness.events("rejected")
        assert event["session_id"] == "s1"
        assert event["path"] == late
        assert event["detail"].endswith("takes no more calls: use another session id.")

    async def test_a_call_that_waits_for_the_engine_at_the_end_is_refused(
        self, harness, scripted_engine, monkeypatch
    ):
        async def served(engine):
            await harness.end()
            return Served("scripted", 8192, None)

        monkeypatch.setattr(Engine, "served", served)
        assert await refused(harness, user()) == ENDED
        assert scripted_engine.requests == []
        assert harness.calls() == []

    async def test_an_ended_session_and_one_with_damaged_options_may_reach_no_host(self, harness):
        options_of = harness.endpoint.options_of
        for session_id in ("s1", "s2"):
            SessionOptions(allow=("a.org",)).write(harness.run, session_id)
        assert options_of("s1").allow == ("a.org",)
        await harness.end()
        for file in (harness.run / "given").iterdir():
            file.write_text("{")
        assert options_of("s1").allow == options_of("s2").allow == ()
        assert options_of("s3").allow is None

    async def test_a_failed_fsync_at_the_end_of_a_session_is_an_error(self, harness, monkeypatch):
        monkeypatch.setattr(RunWriter, "end_session", failing(OSError("the disk is gone")))
        why = "the session has ended, but its calls may not be on disk: the disk is gone"
        assert await harness.end() == (500, why)


async def test_an_engine_that_describes_itself_while_the_recorder_stops_is_in_the_metadata(
    restart, scripted_engine, monkeypatch
):
    begun = asyncio.Event()
    stopping = asyncio.Event()
    describe = Engine.describe

    async def slow(engine):
        begun.set()
        await stopping.wait()
        return await describe(engine)

    monkeypatch.setattr(Engine, "describe", slow)
    scripted_engine.replies.append(Say("Hi."))
    stops(monkeypatch, stopping)
    async with restart() as harness:
        await told(harness, user())
        await begun.wait()
    described = {
        "model": "scripted",
        "max_model_len": 8192,
        "vllm": None,
        "configuration": None,
    }
    assert read_metadata(harness.run)["engines"] == {scripted_engine.url: described}


async def test_an_engine_that_does_not_describe_itself_is_a_warning(
    restart, scripted_engine, monkeypatch, caplog
):
    monkeypatch.setattr(Engine, "describe", failing(OSError("no answer")))
    scripted_engine.replies.append(Say("Hi."))
    async with restart() as harness:
        await told(harness, user())
    why = f"the description of the engine at {scripted_engine.url} is not in run.json: no answer"
    assert why in caplog.messages


def stops(monkeypatch, event):
    """Set an event once the recorder stops."""
    abort = Session.abort

    def aborted(*arguments):
        abort(*arguments)
        event.set()

    monkeypatch.setattr(Session, "abort", aborted)


async def test_a_call_whose_prompt_is_made_while_the_recorder_stops_is_recorded(
    restart, scripted_engine, monkeypatch
):
    scripted_engine.replies.append(Say("one two three", hold_after=1))
    begun = threading.Event()
    stopping = threading.Event()
    prompt = Conversations.prompt

    def slow(*arguments):
        begun.set()
        stopping.wait()
        return prompt(*arguments)

    monkeypatch.setattr(Conversations, "prompt", slow)
    monkeypatch.setattr(session, "INLINE_BYTES", 1)  # in a thread
    stops(monkeypatch, stopping)
    async with restart() as harness:
        asked = asyncio.create_task(harness.ask(user()))
        await asyncio.to_thread(begun.wait)
        await harness.endpoint.close()
        (error,) = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(error, tuple | aiohttp.ClientError)
    started = values(harness.events("call_started"), "call_id")
    assert values(harness.calls(), "call_id") == started


async def test_refusals_and_counts_of_tokens_do_not_wait_for_an_engine_that_is_down(
    rendering, tmp_path
):
    async with recording(rendering, tmp_path, "http://127.0.0.1:1", patience=3600) as waiting:
        assert (await waiting.send(b"{"))[0] == 400
        # beyond any window: harnesses count to compact their history
        long = {"messages": [user("word " * 40_000)]}
        status, answer = await waiting.send(long, path="/v1/messages/count_tokens")
        assert status == 200
        assert json.loads(answer)["input_tokens"] > 40_000
        await waiting.end()
        assert await refused(waiting, user()) == ENDED


class TestRewards:
    @pytest.fixture
    async def trusting(self, restart, scripted_engine):
        """Yield a client of a recorder that accepts rewards."""
        scripted_engine.otherwise = lambda request: Say("Hello.", weight_version="7")
        async with restart(accept_rewards=True) as client:
            yield client

    async def test_a_session_that_rewards_itself_is_refused_and_recorded(self, harness):
        await told(harness, user())
        status, why = await harness.end(body={"reward": 1.0})
        assert status == 403
        assert "accepts no rewards" in why
        assert session_rows(harness.run, "s1") == []
        (event,) = harness.events("refused")
        assert event["session_id"] == "s1"
        assert event["path"] == "/end"
        assert harness.events("ended") == []
        await told(harness, user("Ho"))

    async def test_the_reward_of_a_session_comes_with_its_end(self, trusting):
        await told(trusting, user())
        await trusting.send({"model": "m", "messages": [user()]}, session="s2")
        body = {"reward": 0.5, "parts": {"speed": 1}, "task": "sort", "group": "sort-1"}
        assert await trusting.end(body=body) == (200, "")
        (session,) = session_rows(trusting.run, "s1")
        assert session.status == "completed"
        assert session.reward == 0.5
        assert session.parts == {"speed": 1.0}
        assert session.task_id == "sort"
        assert session.group_id == "sort-1"
        assert session.policy_version == "7"
        assert session.evidence == {"reward_from": "/end"}
        assert session_rows(trusting.run, "s2") == []
        assert await refused(trusting, user("Ho")) == ENDED

    async def test_the_first_reward_of_a_session_with_a_completed_call_counts(self, trusting):
        status, why = await trusting.end("s2", {"reward": 1})
        assert status == 409
        assert "no session" in why
        await told(trusting, user())
        assert await trusting.end(body={"reward": 0}) == (200, "")
        status, why = await trusting.end(body={"reward": 1})
        assert status == 409
        assert "has the reward 0 already" in why
        (session,) = read_rows(trusting.run, "sessions")
        assert session["session_id"] == "s1"
        assert session["reward"] == 0.0
        assert await trusting.end() == (200, "")

    async def test_a_body_that_is_no_reward_changes_nothing(self, trusting):
        await told(trusting, user())
        for body in NO_REWARDS:
            assert (await trusting.end(body=body))[0] == 400, body
        assert session_rows(trusting.run, "s1") == []
        assert len(trusting.events("refused")) == len(NO_REWARDS)
        await told(trusting, user("Ho"))


NO_REWARDS = [
    b"1.0",
    b"{",
    b'{"reward": NaN}',
    b'{"reward": 1e999}',
    b'{"reward": 1' + b"0" * 400 + b"}",
    b'{"reward": true}',
    b'{"reward": "1"}',
    b'{"reward": null}',
    b'{"parts": {"speed": 1}}',
    b'{"reward": 1, "parts": {"speed": Infinity}}',
    b'{"reward": 1, "parts": [1]}',
    b'{"reward": 1, "session": "s2"}',
    b'{"reward": 1, "task": "a\\u001b[2J"}',
    b'{"reward": 1, "group": 5}',
    b"[" * 100_000,
    b'\xff{"reward": 1}',
]
