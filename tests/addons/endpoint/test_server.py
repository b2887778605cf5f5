"""The endpoint behind a scripted engine: who may ask, errors, and the end of a session."""

import asyncio
import json
import threading
from unittest import mock

import aiohttp
import pytest
from yarl import URL

from rolltap.addons.endpoint import server, session
from rolltap.addons.endpoint.request import SECRET_HEADER
from rolltap.addons.endpoint.session import Session
from rolltap.addons.engine.client import Engine
from rolltap.addons.engine.own_model import Served
from rolltap.addons.prompts.conversations import Conversations
from rolltap.addons.prompts.reply import ReplyParser
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.tables import read_rows
from tests.addons.harness import PATH, recording, user
from tests.scripted_engine import Answer, Say

SCHEMA = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400
NESTED = (
    b'{"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": '
    b'{"name": "t", "parameters": %s}}]}' % SCHEMA.encode()
)
LATE = {"model": "m", "messages": [user()], "input": "Hello"}


class TestErrors:
    @pytest.mark.parametrize(
        ("for_others", "seconds", "faults"), [(False, 0, 1), (False, 600, 0), (True, 0, 0)], ids=str
    )
    async def test_a_call_that_waits_long_for_an_engine_alone_is_a_fault(
        self, harness, monkeypatch, for_others, seconds, faults
    ):
        waiting, left = asyncio.Event(), asyncio.Event()

        async def wait(*_):
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        if for_others:
            await harness.ask(user())
            order = mock.Mock(__aenter__=wait, __aexit__=mock.AsyncMock())
            monkeypatch.setattr(harness.endpoint.sessions["s1"], "_order", order)
        else:
            monkeypatch.setattr(harness.endpoint.engines, "ready", wait)
        monkeypatch.setattr(server, "UNANSWERED_SECONDS", seconds)
        asked = asyncio.create_task(harness.ask(user("More.")))
        await asyncio.wait_for(waiting.wait(), 30)
        asked.cancel()
        await asyncio.wait_for(left.wait(), 30)
        await harness.end()
        assert len(harness.events("fault")) == faults

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("reply", "reply_status"),
        [
            (Answer(500, "bad"), 502),
            (Answer(403, "bad"), 502),
            (Answer(400, "bad"), 400),
            (Answer(413, "bad"), 413),
            (Answer(200, '{"error": {"message": "bad", "code": 400}}'), 400),
        ],
    )
    async def test_an_engine_that_refuses_is_the_apis_own_error_and_a_fault(
        self, harness, scripted_engine, reply, reply_status, stream
    ):
        scripted_engine.replies.append(reply)
        status, text = await harness.send({"messages": [user()], "stream": stream})
        assert status == (200 if stream else reply_status)  # a stream's headers are sent first
        error = json.loads(text.rstrip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        (call,) = harness.calls()
        assert call["status"] == "failed"
        (fault,) = harness.events("fault")
        assert call["error"].endswith(fault["detail"])
        assert (fault["call_id"], "its log says why" in fault["detail"]) == (call["call_id"], True)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_engine_that_dies_fails_the_call_and_keeps_its_tokens(
        self, harness, scripted_engine, stream
    ):
        scripted_engine.replies.append(Say("one two three four", break_after=2))
        status, text = await harness.send({"messages": [user()], "stream": stream})
        *events, last = [
            json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event
        ]
        assert (status, last["error"]["code"]) == ((200, 503) if stream else (503, "engine_error"))
        assert all(event["choices"][0]["finish_reason"] is None for event in events)
        assert (await harness.ask(user()))[0] == 200
        died, served = harness.calls()
        assert (died["status"], len(died["completion_ids"])) == ("failed", 2)
        assert served["status"] == "completed"

    async def test_a_prompt_over_the_context_is_refused_and_max_tokens_never_exceed_its_room(
        self, harness, scripted_engine
    ):
        scripted_engine.max_model_len = 20
        status, reply = await harness.ask(user("word " * 100))
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 20 tokens" in reply["error"]["message"]
        assert "maximum context length" in harness.events("rejected")[0]["detail"]
        await harness.ask(user(), max_tokens=64000)
        (request,) = scripted_engine.requests
        assert request["sampling_params"]["max_tokens"] == 20 - len(request["token_ids"])

    async def test_broken_tokens_are_kept_marked_and_answered(self, harness, scripted_engine):
        choice = {
            "token_ids": [5, 6],
            "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]},
            "finish_reason": "stop",
            "weight_versions": [{"version": "v", "start": 0, "end": 2}],
        }
        scripted_engine.replies.append(Answer(200, json.dumps({"choices": [choice]})))
        assert (await harness.ask(user()))[0] == 200
        (call,) = harness.calls()
        assert (call["status"], call["violation"]) == (
            "completed",
            "2 token ids but 0 log-probabilities",
        )

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("kind", [OSError, ValueError])
    async def test_a_call_that_cannot_be_recorded_is_not_served(
        self, harness, monkeypatch, stream, kind
    ):
        full = mock.Mock(side_effect=kind("No space left on device"))
        monkeypatch.setattr(harness.endpoint.writer, "add_call", full)
        status, text = await harness.send({"messages": [user()], "stream": stream})
        assert "No space left on device" in text
        assert "[DONE]" not in text
        assert (status == 500) == (not stream)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_call_whose_reply_cannot_be_parsed_fails_and_is_recorded(
        self, harness, monkeypatch, stream
    ):
        monkeypatch.setattr(
            ReplyParser, "feed", mock.Mock(side_effect=RuntimeError("no such token"))
        )
        _, text = await harness.send({"messages": [user()], "stream": stream})
        assert "internal error of the recorder" in text
        assert "[DONE]" not in text
        assert [(call["status"], call["error"]) for call in harness.calls()] == [
            ("failed", "no such token")
        ]

    async def test_a_conversation_that_cannot_be_rendered_is_refused_and_recorded(
        self, harness, monkeypatch
    ):
        monkeypatch.setattr(
            harness.endpoint.rendering, "render", mock.Mock(side_effect=RecursionError("too deep"))
        )
        status, reply = await harness.ask(user())
        assert (status, reply["error"]["code"]) == (400, "invalid_request_error")
        assert [event["detail"] for event in harness.events("rejected")] == ["too deep"]
        assert (
            harness.events("fault") == []
        )  # an agent could ask for one, and its session would not count

    @pytest.mark.parametrize(
        ("body", "why"),
        [(b'{"messages": [', ""), (NESTED, "nested more than 128 levels")],
        ids=["JSON", "a tool"],
    )
    async def test_malformed_json_and_a_tool_that_is_nested_too_deep_are_refused(
        self, harness, body, why
    ):
        status, text = await harness.send(body)
        error = json.loads(text)["error"]
        assert (status, error["type"], why in error["message"]) == (
            400,
            "invalid_request_error",
            True,
        )
        assert [len(harness.events(kind)) for kind in ("rejected", "fault")] == [1, 0]


class TestAccess:
    async def test_only_the_addon_may_ask(self, harness):
        status, _ = await harness.send({"messages": [user()]}, headers={SECRET_HEADER: "guess"})
        assert status == 403
        assert harness.calls() == []

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/end"),
            ("POST", "/end?now"),
            ("POST", "/end/"),
            ("POST", "/v1/chat"),
            ("DELETE", "/v1/messages"),
        ],
    )
    async def test_a_request_that_is_none_of_the_proxys_ends_no_session(
        self, harness, method, path
    ):
        headers = harness.endpoint.headers("s1", "api")
        async with harness.client.request(method, harness.url(path), headers=headers) as response:
            assert response.status == 404
        assert harness.events("ended") == []
        assert (await harness.ask(user()))[0] == 200


class TestEndOfSession:
    @pytest.mark.parametrize("why", ["the session ended", "the recorder was stopped"])
    async def test_running_calls_are_recorded_as_aborted(self, harness, scripted_engine, why):
        asked = await harness.held(scripted_engine, Say("one two three", hold_after=1))
        await (harness.end() if why == "the session ended" else harness.endpoint.close())
        status, reply = await asked
        assert (status, reply["error"]["message"]) == (503, why)
        (call,) = harness.calls()
        assert (call["status"], call["error"]) == ("aborted", why)
        # the engine names the weights at the end only: `rolltap verify` asks of every call that
        # this is marked
        assert (call["violation"] is None) == (call["completion_ids"] == [])

    @pytest.mark.parametrize("late", [PATH, "/v1/responses/input_tokens"])
    async def test_a_later_request_is_refused_and_recorded(self, harness, scripted_engine, late):
        await harness.ask(user())
        await harness.end()
        status, text = await harness.send(LATE, path=late)
        assert (status, json.loads(text)["error"]["code"]) == (410, "session_ended")
        assert len(harness.calls()) == len(scripted_engine.requests) == 1
        (event,) = harness.events("rejected")
        assert (event["session_id"], event["path"]) == ("s1", late)
        assert (
            event["detail"]
            == "This session has ended and takes no more calls: use another session id."
        )

    async def test_a_call_that_waits_for_the_engine_at_the_end_is_refused(
        self, harness, scripted_engine, monkeypatch
    ):
        async def served(engine):
            await harness.end()
            return Served("scripted", 8192, None)

        monkeypatch.setattr(Engine, "served", served)
        assert (await harness.ask(user()))[0] == 410
        assert (scripted_engine.requests, harness.calls()) == ([], [])

    async def test_an_ended_session_and_one_with_damaged_options_may_reach_no_host(self, harness):
        SessionOptions(allow=("a.org",)).write(harness.run, "s1")
        assert harness.endpoint.options_of("s1").allow == ("a.org",)
        await harness.end()
        assert harness.endpoint.options_of("s1").allow == ()
        SessionOptions(allow=("a.org",)).write(harness.run, "s2")
        for file in (harness.run / "given").iterdir():
            file.write_text("{")
        assert harness.endpoint.options_of("s2").allow == ()
        assert harness.endpoint.options_of("s3").allow is None

    async def test_a_failed_fsync_at_the_end_of_a_session_is_an_error(self, harness, monkeypatch):
        monkeypatch.setattr(
            harness.endpoint.writer,
            "end_session",
            mock.Mock(side_effect=OSError("the disk is gone")),
        )
        assert await harness.end() == (
            500,
            "the session has ended, but its calls may not be on disk: the disk is gone",
        )


async def test_the_engines_are_in_the_runs_metadata(harness, scripted_engine):
    await harness.ask(user())
    await asyncio.gather(*harness.endpoint._described.values())
    assert read_metadata(harness.run)["engines"] == {
        scripted_engine.url: {
            "model": "scripted",
            "max_model_len": 8192,
            "vllm": None,
            "configuration": None,
        }
    }


async def test_an_engine_that_describes_itself_while_the_recorder_stops_is_in_the_metadata(
    rendering, scripted_engine, tmp_path, monkeypatch
):
    begun, stopping = asyncio.Event(), asyncio.Event()
    describe, abort = Engine.describe, Session.abort

    async def slow(engine):
        begun.set()
        await stopping.wait()
        return await describe(engine)

    def aborted(*arguments):
        abort(*arguments)
        stopping.set()

    monkeypatch.setattr(Engine, "describe", slow)
    monkeypatch.setattr(Session, "abort", aborted)
    async with recording(rendering, tmp_path, scripted_engine.url) as harness:
        await harness.ask(user())
        await begun.wait()
    assert read_metadata(tmp_path)["engines"].keys() == {scripted_engine.url}


async def test_refusals_and_counts_of_tokens_do_not_wait_for_an_engine_that_is_down(
    rendering, tmp_path
):
    async with recording(rendering, tmp_path, "http://127.0.0.1:1", patience=3600) as waiting:
        assert (await waiting.send(b"{"))[0] == 400
        long = {
            "messages": [user("word " * 40_000)]
        }  # beyond any window: harnesses count to compact their history
        status, answer = await waiting.send(long, path="/v1/messages/count_tokens")
        assert (status, json.loads(answer)["input_tokens"] > 40_000) == (200, True)
        await waiting.end()
        assert (await waiting.ask(user()))[0] == 410


async def test_a_call_whose_prompt_is_made_while_the_recorder_stops_is_recorded(
    rendering, scripted_engine, tmp_path, monkeypatch
):
    scripted_engine.replies.append(Say("one two three", hold_after=1))
    begun, stopping = threading.Event(), threading.Event()
    prompt = Conversations.prompt

    def slow(*arguments):
        begun.set()
        stopping.wait()
        return prompt(*arguments)

    monkeypatch.setattr(Conversations, "prompt", slow)
    monkeypatch.setattr(session, "INLINE_BYTES", 1)  # in a thread
    abort = Session.abort

    def aborted(*arguments):
        abort(*arguments)
        stopping.set()

    monkeypatch.setattr(Session, "abort", aborted)
    async with recording(rendering, tmp_path, scripted_engine.url) as harness:
        asked = asyncio.create_task(harness.ask(user()))
        await asyncio.to_thread(begun.wait)
        await harness.endpoint.close()
        await asyncio.wait([asked])
        assert not asked.exception() or isinstance(asked.exception(), aiohttp.ClientError)
    started = {event["call_id"] for event in harness.events("call_started")}
    assert {call["call_id"] for call in harness.calls()} == started


@pytest.mark.parametrize("secret", ["", "wrong", "\u00e9", "\udcff"])
async def test_a_request_without_the_secret_is_refused_whatever_bytes_it_has(harness, secret):
    head = (
        f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Rolltap-Secret: {secret}\r\nContent-Length:"
        " 0\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.endpoint.port)
    writer.write(head.encode("utf-8", "surrogateescape"))
    assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
    writer.close()


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
    path = "/chat/completions"
    headers = harness.endpoint.headers("s1", "azure")
    for body in ({"messages": [user()]}, {}):
        async with harness.client.post(
            URL(harness.url(prefix + path), encoded=True), json=body, headers=headers
        ) as response:
            await response.read()
    (call,) = harness.calls()
    (rejected,) = harness.events("rejected")
    assert call["path"] == rejected["path"] == recorded + path


@pytest.fixture
async def trusting(harness, rendering, scripted_engine):
    """Yield a client of a second recorder of the run, which accepts rewards."""
    scripted_engine.otherwise = lambda request: Say("Hello.", weight_version="7")
    async with recording(
        rendering, harness.run, scripted_engine.url, accept_rewards=True
    ) as client:
        yield client


async def test_a_session_that_rewards_itself_is_refused_and_recorded(harness):
    await harness.ask(user("Hi"))
    status, why = await harness.end(body={"reward": 1.0})
    assert (status, "accepts no rewards" in why) == (403, True)
    assert session_rows(harness.run, "s1") == []
    (event,) = harness.events("refused")
    assert (event["session_id"], event["path"]) == ("s1", "/end")
    assert harness.events("ended") == []
    assert (await harness.ask(user("Ho")))[0] == 200


async def test_the_reward_of_a_session_comes_with_its_end(trusting):
    await trusting.ask(user("Hi"))
    assert (await trusting.send({"model": "m", "messages": [user("Hi")]}, session="s2"))[0] == 200
    body = {"reward": 0.5, "parts": {"speed": 1}, "task": "sort", "group": "sort-1"}
    assert await trusting.end(body=body) == (200, "")
    (session,) = session_rows(trusting.run, "s1")
    assert (session.status, session.reward, session.parts) == ("completed", 0.5, {"speed": 1.0})
    assert (session.task_id, session.group_id, session.policy_version) == ("sort", "sort-1", "7")
    assert session.evidence == {"reward_from": "/end"}
    assert session_rows(trusting.run, "s2") == []
    assert (await trusting.ask(user("Ho")))[0] == 410


async def test_the_first_reward_of_a_session_with_a_completed_call_counts(trusting):
    status, why = await trusting.end("s2", {"reward": 1})
    assert (status, "no session" in why) == (409, True)
    await trusting.ask(user("Hi"))
    assert (await trusting.end(body={"reward": 0}))[0] == 200
    status, why = await trusting.end(body={"reward": 1})
    assert (status, "has the reward 0 already" in why) == (409, True)
    assert [(row["session_id"], row["reward"]) for row in read_rows(trusting.run, "sessions")] == [
        ("s1", 0.0)
    ]
    assert await trusting.end() == (200, "")


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


async def test_a_body_that_is_no_reward_changes_nothing(trusting):
    await trusting.ask(user("Hi"))
    for body in NO_REWARDS:
        assert (await trusting.end(body=body))[0] == 400, body
    assert session_rows(trusting.run, "s1") == []
    assert len(trusting.events("refused")) == len(NO_REWARDS)
    assert (await trusting.ask(user("Ho")))[0] == 200
