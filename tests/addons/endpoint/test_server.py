"""The endpoint behind a scripted engine: who may ask, errors, and the end of a session."""

import asyncio
import json
import os
import threading
from functools import partial

import aiohttp
import pytest

from rolltap.addons import offload
from rolltap.addons.dialects import openai_chat
from rolltap.addons.dialects.routes import Route, find_route
from rolltap.addons.endpoint import server
from rolltap.addons.endpoint.request import SECRET_HEADER
from rolltap.addons.endpoint.server import Expected, Gate
from rolltap.addons.endpoint.session import Session
from rolltap.addons.engine.client import Engine
from rolltap.addons.prompts.continuity import Conversations
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.rewards import session_rows
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.doctor.scripted_engine import Answer, Say
from tests.addons.harness import PATH, recording, user

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}}}]
LATE = {"model": "m", "messages": [user()], "input": "Hello"}
TOOL_CALL = (
    '<think>\nI look.\n</think>\n\n<tool_call>\n{"name":  "bash", "arguments": {"a" :true, "b":"é"}}\n</tool_call>'
)


class TestErrors:
    @pytest.mark.parametrize(("seconds", "faults"), [(0, 1), (600, 0)])
    async def test_a_call_that_waits_for_an_engine_for_long_is_a_fault(self, harness, monkeypatch, seconds, faults):
        waiting, left = asyncio.Event(), asyncio.Event()

        async def ready(*_):
            waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                left.set()

        monkeypatch.setattr(server, "UNANSWERED_SECONDS", seconds)
        monkeypatch.setattr(harness.endpoint.engines, "ready", ready)
        asked = asyncio.create_task(harness.ask(user()))
        await asyncio.wait_for(waiting.wait(), 30)
        asked.cancel()
        await asyncio.wait_for(left.wait(), 30)
        await harness.end()
        assert len(harness.events("fault")) == faults

    async def test_a_call_that_waits_for_others_of_its_session_for_long_is_none(
        self, harness, scripted_engine, monkeypatch
    ):
        monkeypatch.setattr(server, "UNANSWERED_SECONDS", 0)
        waiting, left = asyncio.Event(), asyncio.Event()

        class Held(asyncio.Lock):
            async def __aenter__(self):
                waiting.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    left.set()

        scripted_engine.replies.append(Say("Hi."))
        await harness.ask(user())
        monkeypatch.setattr(harness.endpoint.sessions["s1"], "_order", Held())
        asked = asyncio.create_task(harness.ask(user("More.")))
        await asyncio.wait_for(waiting.wait(), 30)
        asked.cancel()
        await asyncio.wait_for(left.wait(), 30)
        await harness.end()
        assert harness.events("fault") == []

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("reply", "status"),
        [(Answer(500, "broken"), 502), (Answer(403, "closed"), 502), (Answer(400, "bad"), 400)],
    )
    async def test_an_engine_that_refuses_is_the_apis_own_error(self, harness, scripted_engine, reply, status, stream):
        scripted_engine.replies.append(reply)
        async with harness.post({"messages": [user()], "stream": stream}) as response:
            assert response.status == (200 if stream else status)  # a stream's headers are sent first
            *_, last = (await response.text()).rstrip().split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        (call,) = harness.calls()
        assert call["status"] == "failed"
        assert reply.body in call["error"]

    async def test_an_engine_that_dies_fails_the_call_and_keeps_its_tokens(self, harness, scripted_engine):
        scripted_engine.replies += [Say("one two three four", break_after=2), Say("Hi.")]
        status, reply = await harness.ask(user())
        assert (status, reply["error"]["code"]) == (503, "engine_error")
        assert (await harness.ask(user()))[0] == 200
        died, served = harness.calls()
        assert (died["status"], len(died["completion_ids"])) == ("failed", 2)
        assert served["status"] == "completed"

    async def test_a_stream_whose_engine_dies_ends_with_an_error_and_no_terminal_event(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("one two three four", hold_after=2, break_after=3))
        scripted_engine.release()
        _, events = await harness.stream(user())
        assert "error" in json.loads(events[-1])
        assert all(json.loads(e)["choices"][0]["finish_reason"] is None for e in events[:-1])

    async def test_a_prompt_over_the_context_is_refused_before_the_engine_is_asked(self, harness, scripted_engine):
        scripted_engine.max_model_len = 20
        status, reply = await harness.ask(user("word " * 100))
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 20 tokens" in reply["error"]["message"]
        assert scripted_engine.requests == []
        assert "maximum context length" in harness.events("rejected")[0]["detail"]

    async def test_max_tokens_never_exceed_the_room_that_is_left(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("x"))
        await harness.ask(user(), max_tokens=64000)
        request = scripted_engine.requests[0]
        assert request["sampling_params"]["max_tokens"] == 8192 - len(request["token_ids"])

    async def test_malformed_json_is_refused_and_recorded(self, harness):
        async with harness.post(b'{"messages": [') as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert len(harness.events("rejected")) == 1

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
        assert (call["status"], call["violation"]) == ("completed", "2 token ids but 0 log-probabilities")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("kind", [OSError, ValueError])
    async def test_a_call_that_cannot_be_recorded_is_not_served(
        self, harness, scripted_engine, monkeypatch, stream, kind
    ):
        scripted_engine.replies.append(Say("Hi."))

        def full(call):
            raise kind("No space left on device")

        monkeypatch.setattr(harness.endpoint.writer, "add_call", full)
        async with harness.post({"messages": [user()], "stream": stream}) as response:
            text = await response.text()
        assert "No space left on device" in text
        assert "[DONE]" not in text
        assert (response.status == 500) == (not stream)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_call_whose_reply_cannot_be_parsed_fails_and_is_recorded(
        self, harness, scripted_engine, monkeypatch, stream
    ):
        def broken(*args, **kwargs):
            raise RuntimeError("no such token")

        monkeypatch.setattr(harness.endpoint.rendering, "parse", broken)
        scripted_engine.replies.append(Say("Hi."))
        async with harness.post({"messages": [user()], "stream": stream}) as response:
            text = await response.text()
        assert "internal error of the recorder" in text
        assert "[DONE]" not in text
        assert [(call["status"], call["error"]) for call in harness.calls()] == [("failed", "no such token")]

    async def test_a_conversation_that_cannot_be_rendered_is_refused_and_recorded(self, harness, monkeypatch):
        def broken(*args, **kwargs):
            raise RecursionError("too deep")

        monkeypatch.setattr(harness.endpoint.rendering, "render", broken)
        status, reply = await harness.ask(user())
        assert (status, reply["error"]["code"]) == (400, "invalid_request_error")
        assert [event["detail"] for event in harness.events("rejected")] == ["too deep"]
        assert harness.events("fault") == []  # an agent could ask for one, and its session would not count

    async def test_a_tool_that_is_nested_too_deep_is_refused(self, harness):
        schema = {"type": "object"}
        for _ in range(400):
            schema = {"type": "object", "properties": {"a": schema}}
        tool = {"type": "function", "function": {"name": "t", "parameters": schema}}
        status, reply = await harness.ask(user(), tools=[tool])
        assert (status, "nested more than 128 levels" in reply["error"]["message"]) == (400, True)
        assert [len(harness.events(kind)) for kind in ("rejected", "fault")] == [1, 0]


class TestAccess:
    async def test_only_the_addon_may_ask(self, harness):
        async with harness.post({"messages": [user()]}, headers={SECRET_HEADER: "guess"}) as response:
            assert response.status == 403
        assert harness.calls() == []

    async def test_the_route_that_the_addon_found_decides_and_not_the_path(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("Hi."))
        headers = harness.endpoint.headers("s1", "api", Route(openai_chat, "generate"))
        async with harness.client.put(harness.url("/v1/models"), json=LATE, headers=headers) as reply:
            assert (await reply.json())["choices"][0]["message"]["content"] == "Hi."

    async def test_the_models_list_names_the_served_model(self, harness):
        headers = harness.endpoint.headers("s1", "api", find_route("GET", "/v1/models", {}))
        async with harness.client.get(harness.url("/v1/models"), headers=headers) as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["scripted"]

    async def test_a_published_adapter_is_asked_by_its_name_and_is_the_version(self, harness, scripted_engine):
        (harness.run / "policy.json").write_text('{"version": "4", "model": "policy-4"}')
        scripted_engine.replies.append(Say("Hi."))
        await harness.ask(user())
        assert scripted_engine.requests[0]["model"] == "policy-4"
        (call,) = harness.calls()
        assert [span["version"] for span in call["weight_versions"]] == ["4"]


class TestEndOfSession:
    async def test_running_calls_are_recorded_as_aborted(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("one two three", hold_after=1))
        asked = asyncio.create_task(harness.ask(user()))
        await asyncio.to_thread(scripted_engine.holding.wait)
        assert await harness.end() == (200, "")
        assert [(call["status"], call["error"]) for call in harness.calls()] == [("aborted", "the session ended")]
        assert (await asked)[0] == 503

    @pytest.mark.parametrize("late", [PATH, "/v1/responses/input_tokens"])
    async def test_a_later_request_is_refused_and_recorded(self, harness, scripted_engine, late):
        scripted_engine.replies.append(Say("Hi."))
        await harness.ask(user())
        await harness.end()
        async with harness.post(LATE, path=late) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (410, "session_ended")
        assert len(harness.calls()) == len(scripted_engine.requests) == 1
        (event,) = harness.events("rejected")
        assert (event["session_id"], event["path"]) == ("s1", late)
        assert event["detail"] == "This session has ended and takes no more calls: use another session id."

    async def test_a_call_that_waits_for_the_engine_when_it_ends_is_refused(
        self, harness, scripted_engine, monkeypatch
    ):
        async def max_model_len(engine):
            await harness.end()
            return 8192

        monkeypatch.setattr(Engine, "max_model_len", max_model_len)
        assert (await harness.ask(user()))[0] == 410
        assert (scripted_engine.requests, harness.calls()) == ([], [])

    async def test_a_session_without_calls_can_end_and_end_again(self, harness):
        assert [await harness.end("nobody") for _ in range(2)] == [(200, "")] * 2

    async def test_a_failed_fsync_at_the_end_of_a_session_is_an_error(self, harness, monkeypatch):
        def fail():
            raise OSError("the disk is gone")

        monkeypatch.setattr(harness.endpoint.writer, "end_session", fail)
        assert await harness.end() == (500, "the session has ended, but its calls may not be on disk: the disk is gone")


async def test_the_engines_are_in_the_runs_metadata(harness, scripted_engine):
    await harness.ask(user())
    await asyncio.gather(*harness.endpoint._described.values())
    assert read_metadata(harness.run)["engines"] == {
        scripted_engine.url: {"model": "scripted", "max_model_len": 8192, "vllm": None, "configuration": None}
    }


async def test_calls_that_run_when_the_recorder_stops_are_recorded_as_aborted(rendering, scripted_engine, tmp_path):
    scripted_engine.replies.append(Say("one two three", hold_after=1))
    async with recording(rendering, tmp_path, scripted_engine.url) as harness:
        asked = asyncio.create_task(harness.ask(user()))
        await asyncio.to_thread(scripted_engine.holding.wait)
        await harness.endpoint.close()
        status, reply = await asked
    assert (status, reply["error"]["message"]) == (503, "the recorder was stopped")
    assert [call["status"] for call in harness.calls()] == ["aborted"]
    assert os.listdir(tmp_path)


async def test_refusals_do_not_wait_for_an_engine_that_is_down(rendering, tmp_path):
    async with recording(rendering, tmp_path, "http://127.0.0.1:1", patience=3600) as waiting:
        async with waiting.post(b"{") as response:
            assert response.status == 400
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
    monkeypatch.setattr(offload, "INLINE_BYTES", 1)  # in a thread
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


async def test_a_record_has_the_path_that_was_asked_with_the_prefix_of_its_provider(harness, scripted_engine):
    prefix, path = "/openai/deployments/gpt", "/chat/completions"
    headers = harness.endpoint.headers("s1", "azure", find_route("POST", prefix + path, {}))
    scripted_engine.replies.append(Say("Hi."))
    for body in ({"messages": [user()]}, {}):
        async with harness.client.post(harness.url(path), json=body, headers=headers) as response:
            await response.read()
    (call,) = harness.calls()
    (rejected,) = harness.events("rejected")
    assert call["path"] == rejected["path"] == prefix + path


@pytest.fixture
async def trusting(harness, rendering, scripted_engine, replies):
    """Yield a client of a second recorder of the run, which accepts rewards."""
    async with recording(rendering, harness.run, scripted_engine.url, accept_rewards=True) as client:
        yield client


@pytest.fixture
def replies(scripted_engine):
    scripted_engine.otherwise = lambda request: Say("Hello.", weight_version="7")


async def test_a_session_that_rewards_itself_is_refused_and_recorded(harness, replies):
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
    body = {"reward": 0.5, "parts": {"speed": 1}, "task": "sort", "group": "sort-1"}
    assert await trusting.end(body=body) == (200, "")
    (session,) = session_rows(trusting.run, "s1")
    assert (session.status, session.reward, session.parts) == ("completed", 0.5, '{"speed": 1.0}')
    assert (session.task_id, session.group_id, session.policy_version) == ("sort", "sort-1", "7")
    assert json.loads(session.evidence) == {"reward_from": "/end"}
    assert (await trusting.ask(user("Ho")))[0] == 410


async def test_the_first_reward_counts(trusting):
    await trusting.ask(user("Hi"))
    assert (await trusting.end(body={"reward": 0}))[0] == 200
    status, why = await trusting.end(body={"reward": 1})
    assert (status, "has the reward 0 already" in why) == (409, True)
    assert [session.reward for session in session_rows(trusting.run, "s1")] == [0.0]
    assert await trusting.end() == (200, "")


async def test_a_session_without_a_completed_call_has_no_reward(trusting):
    status, why = await trusting.end(body={"reward": 1})
    assert (status, "no session" in why) == (409, True)
    assert list(read_rows(trusting.run, "sessions")) == []


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


async def test_a_session_cannot_name_another_one(trusting):
    await trusting.ask(user("Hi"))
    async with trusting.post({"model": "m", "messages": [user("Hi")]}, session="s2") as response:
        assert response.status == 200
    await trusting.end(body={"reward": 1, "task": "t"})
    assert session_rows(trusting.run, "s2") == []


class Hello(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")


async def test_only_an_expected_connection_is_let_in():
    expected = Expected()
    server = await asyncio.get_running_loop().create_server(partial(Gate, expected, Hello), "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()

        async def received(local=None):
            reader, writer = await asyncio.open_connection(*address, local_addr=local)
            try:
                return await reader.read(5)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        chosen = expected.choose()
        assert await received(chosen) == b"hello"
        assert await received() == b""
        expected.forget(chosen[1])
        assert chosen[1] not in expected
        assert await received(expected.choose()) == b"hello"
