"""The endpoint behind a scripted engine: its replies, their order and their records on disk."""

import asyncio
import json
import os
import threading

import aiohttp
import pytest

from rolltap.addons import offload
from rolltap.addons.dialects import openai_chat
from rolltap.addons.dialects.routes import Route, find_route
from rolltap.addons.endpoint import exchange, generation, server
from rolltap.addons.endpoint.request import SECRET_HEADER
from rolltap.addons.endpoint.session import Session
from rolltap.addons.engine.client import Engine
from rolltap.addons.prompts.continuity import Conversations
from rolltap.addons.store import tables
from rolltap.addons.store.metadata import read_metadata
from rolltap.trainer.doctor.scripted_engine import Answer, Say
from tests.addons.harness import PATH, content, recording, user

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}}}]
LATE = {"model": "m", "messages": [user()], "input": "Hello"}
TOOL_CALL = (
    '<think>\nI look.\n</think>\n\n<tool_call>\n{"name":  "bash", "arguments": {"a" :true, "b":"é"}}\n</tool_call>'
)


class TestReply:
    async def test_a_reply_is_parsed_and_recorded_token_for_token(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("<think>\nHm.\n</think>\n\nHi there."))
        status, reply = await harness.ask(user(), max_tokens=50)
        message = reply["choices"][0]["message"]
        assert status == 200
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi there.")
        (call,) = harness.calls()
        ids = [*scripted_engine.ids("<think>\nHm.\n</think>\n\nHi there."), scripted_engine.tokenizer.eos_token_id]
        assert call["completion_ids"] == ids
        assert call["logprobs"] == [-0.125 * (1 + i % 5) for i in range(len(ids))]
        assert call["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]
        assert (call["status"], call["violation"], call["kind"]) == ("completed", None, "root")
        assert reply["usage"]["prompt_tokens"] == call["prompt_length"]
        assert reply["usage"]["completion_tokens"] == len(ids)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_calls_id_is_the_requests_id(self, harness, scripted_engine, stream):
        scripted_engine.replies.append(Say("Hi."))
        async with harness.post({"messages": [user()], "stream": stream}) as response:
            await response.read()
        (call,) = harness.calls()
        assert response.headers["x-request-id"] == response.headers["request-id"] == call["call_id"]

    async def test_sampling_is_neutral_whatever_the_harness_asks_for(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("x"))
        await harness.ask(user(), temperature=0.1, top_p=0.5, seed=3, max_tokens=9)
        sent = scripted_engine.requests[0]["sampling_params"]
        assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["max_tokens"]) == (1.0, 1.0, 0, 9)
        assert "seed" not in sent
        recorded = json.loads(harness.calls()[0]["sampling"])
        assert recorded.pop("asked") == {"temperature": 0.1, "top_p": 0.5, "seed": 3}
        assert sent == {**recorded, "logprobs": 0, "stream_interval": 8}

    async def test_a_reply_at_the_token_limit_has_finish_reason_length(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("<think>\nI think and", finish_reason="length"))
        _, reply = await harness.ask(user())
        assert reply["choices"][0]["finish_reason"] == "length"

    async def test_the_next_turn_continues_the_tokens(self, harness, scripted_engine):
        scripted_engine.replies += [Say(TOOL_CALL), Say("Done.")]
        _, first = await harness.ask(user(), tools=TOOLS)
        message = first["choices"][0]["message"]
        (tool_call,) = message["tool_calls"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(tool_call["function"]["arguments"]) == {"a": True, "b": "é"}
        tool_call["function"]["arguments"] = '{ "b": "\\u00e9", "a": true }'  # as harnesses re-serialise it
        del message["reasoning_content"]
        result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "ok"}
        await harness.ask(user(), message, result, tools=TOOLS)
        one, two = harness.calls()
        assert (two["kind"], two["parent_id"], two["kind_reason"]) == ("bridged", one["call_id"], None)
        prompts = [request["token_ids"] for request in scripted_engine.requests]
        assert prompts[1][: len(prompts[0]) + len(one["completion_ids"])] == prompts[0] + one["completion_ids"]
        assert two["prompt_tail_ids"] == prompts[1][len(prompts[0]) + len(one["completion_ids"]) :]
        assert json.loads(two["messages"]) == [{**result, "name": "bash"}]
        assert two["tools"] is None

    async def test_sessions_do_not_continue_each_other(self, harness, scripted_engine):
        scripted_engine.replies += [Say("Hi."), Say("Ho.")]
        await harness.ask(user())
        body = {"messages": [user(), {"role": "assistant", "content": "Hi."}, user("More")]}
        async with harness.post(body, session="s2") as response:
            assert response.status == 200
        one, two = harness.calls()
        assert (one["kind"], two["kind"], two["parent_id"], two["kind_reason"]) == (
            "root",
            "root",
            None,
            "no earlier call",
        )

    async def test_a_tool_call_that_is_not_json_stays_text(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("<tool_call>\n{broken\n</tool_call>"))
        _, reply = await harness.ask(user(), tools=TOOLS)
        assert "{broken" in reply["choices"][0]["message"]["content"]
        assert reply["choices"][0]["finish_reason"] == "stop"

    async def test_slow_replies_are_kept_alive_by_leading_white_space(self, harness, scripted_engine, monkeypatch):
        monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", 0.01)
        scripted_engine.replies.append(Say("Hi.", hold_after=1))
        async with harness.post({"messages": [user()]}) as response:
            assert response.status == 200
            assert (await response.content.readexactly(3)) == b"   "
            scripted_engine.release()
            assert json.loads(await response.read())["choices"][0]["message"]["content"] == "Hi."

    async def test_a_failure_after_the_first_keep_alive_breaks_the_connection(
        self, harness, scripted_engine, monkeypatch
    ):
        """An error with status 200 would be taken for an answer."""
        monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", 0.01)
        scripted_engine.replies.append(Say("one two", hold_after=1, break_after=2))
        async with harness.post({"messages": [user()]}) as response:
            assert (await response.content.readexactly(3)) == b"   "
            scripted_engine.release()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        (call,) = harness.calls()
        assert call["status"] == "failed"


class TestStream:
    async def test_a_stream_ends_with_the_call_on_disk(self, harness, scripted_engine):
        scripted_engine.replies.append(Say(TOOL_CALL))
        status, events = await harness.stream(user(), tools=TOOLS, stream_options={"include_usage": True})
        assert status == 200
        assert events[-1] == "[DONE]"
        *chunks, usage = [json.loads(event) for event in events[:-1]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I look."
        (call,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert call["function"]["name"] == "bash"
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        (recorded,) = harness.calls()
        assert usage["usage"]["completion_tokens"] == len(recorded["completion_ids"])

    async def test_text_arrives_while_the_engine_still_generates(self, harness, scripted_engine):
        held = len(scripted_engine.ids("one two three"))
        scripted_engine.replies.append(Say("one two three four five six", hold_after=held))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            seen = b""
            while "two" not in content(seen.decode()):
                seen += await response.content.readany()
            assert harness.calls() == []
            scripted_engine.release()
            seen += await response.content.read()
        assert content(seen.decode()) == "one two three four five six"
        assert seen.endswith(b"data: [DONE]\n\n")
        assert len(harness.calls()) == 1

    async def test_nothing_is_committed_after_the_last_event(self, harness, scripted_engine, monkeypatch):
        """The last event of the stream is sent after the call can be read from the run."""
        on_disk = []
        finish = openai_chat.StreamEncoder.finish

        def spy(encoder, *args):
            on_disk.append(len(harness.calls()))
            return finish(encoder, *args)

        monkeypatch.setattr(openai_chat.StreamEncoder, "finish", spy)
        scripted_engine.replies.append(Say("Hi."))
        await harness.stream(user())
        assert on_disk == [1]

    async def test_keep_alives_of_a_stream_are_empty_deltas(self, harness, scripted_engine, monkeypatch):
        monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", 0.01)
        scripted_engine.replies.append(Say("Hi.", hold_after=0))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            seen = b""
            while seen.count(b'"delta":{}') < 3:
                seen += await response.content.readany()
            scripted_engine.release()
            assert b"[DONE]" in await response.content.read()

    async def test_headers_and_the_first_event_come_before_the_engine_answers(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("Hi.", hold_after=0))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            assert response.status == 200
            assert b'"role":"assistant"' in await response.content.readany()
            assert await asyncio.to_thread(scripted_engine.holding.wait, 30)
            scripted_engine.release()
            assert b"[DONE]" in await response.content.read()

    async def test_a_harness_that_hangs_up_stops_the_generation(self, harness, scripted_engine, monkeypatch):
        monkeypatch.setattr(generation, "LINGER_SECONDS", 0)
        committed = asyncio.Event()
        add_call = harness.endpoint.writer.add_call
        monkeypatch.setattr(harness.endpoint.writer, "add_call", lambda call: (add_call(call), committed.set()))
        scripted_engine.replies.append(Say("one two three four five six", hold_after=3))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            await response.content.readany()
            await asyncio.to_thread(scripted_engine.holding.wait)
            response.close()
        assert await asyncio.to_thread(scripted_engine.disconnected.wait, 30)
        await asyncio.wait_for(committed.wait(), 30)
        (call,) = harness.calls()
        assert call["status"] == "aborted"
        assert len(call["completion_ids"]) == 3


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

    async def test_an_engine_that_aborts_fails_the_call(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("one two", finish_reason="abort"))
        status, _ = await harness.ask(user())
        assert status == 503
        assert (harness.calls()[0]["status"], harness.calls()[0]["violation"]) == ("failed", None)

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

    async def test_an_engine_that_is_down_is_unavailable_until_it_is_up(self, harness, scripted_engine):
        url, harness.endpoint.engines._engines[0].url = harness.endpoint.engines._engines[0].url, "http://127.0.0.1:9"
        assert (await harness.ask(user()))[0] == 503
        harness.endpoint.engines._engines[0].url = url
        scripted_engine.replies.append(Say("Hi."))
        assert (await harness.ask(user()))[0] == 200

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
        headers = harness.endpoint.headers("s1", "api", find_route("POST", late, {}))
        async with harness.client.post(harness.url(late), json=LATE, headers=headers) as response:
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

    async def test_its_generations_and_conversations_are_freed(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("Hi."))
        await harness.ask(user())
        await harness.end()
        session = harness.endpoint.sessions["s1"]
        assert (session.generations, session._recovered) == ([], None)

    async def test_a_session_without_calls_can_end_and_end_again(self, harness):
        assert [await harness.end("nobody") for _ in range(2)] == [(200, "")] * 2

    async def test_a_failed_fsync_at_the_end_of_a_session_is_an_error(self, harness, monkeypatch):
        def fail():
            raise OSError("the disk is gone")

        monkeypatch.setattr(harness.endpoint.writer, "end_session", fail)
        assert await harness.end() == (500, "the session has ended, but its calls may not be on disk: the disk is gone")


async def test_a_call_is_not_begun_when_the_disk_is_almost_full(harness, scripted_engine, monkeypatch):
    monkeypatch.setattr(tables, "ROOM_BYTES", 1 << 60)
    async with harness.post({"messages": [user()]}) as response:
        reply = await response.json()
        assert (response.status, reply["error"]["code"]) == (503, "not_recorded")
        assert int(response.headers["retry-after"]) > 0
    assert "MiB are free" in reply["error"]["message"]
    assert (scripted_engine.requests, harness.calls()) == ([], [])


async def test_a_reply_whose_record_cannot_be_synced_is_not_sent(harness, scripted_engine, monkeypatch):
    def fail():
        raise OSError("the disk is gone")

    harness.endpoint.writer.sync_policy = "call"
    monkeypatch.setattr(harness.endpoint.writer, "sync", fail)
    scripted_engine.replies.append(Say("Hi."))
    status, reply = await harness.ask(user())
    assert (status, reply["error"]["code"]) == (500, "not_recorded")
    assert [call["status"] for call in harness.calls()] == ["completed"]


async def test_a_reply_does_not_grow_while_its_record_is_synced(harness, scripted_engine, monkeypatch):
    loop, grown = asyncio.get_running_loop(), []

    async def advance():
        [session] = harness.endpoint.sessions.values()
        return session.generations[-1].advance()

    def sync():
        grown.append(asyncio.run_coroutine_threadsafe(advance(), loop).result())

    harness.endpoint.writer.sync_policy = "call"
    monkeypatch.setattr(harness.endpoint.writer, "sync", sync)
    scripted_engine.replies.append(Say("Hi."))
    status, _ = await harness.ask(user())
    assert (status, grown) == (200, [False])


async def test_a_call_that_fails_after_its_commit_is_recorded_once(harness, scripted_engine, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Conversations, "add", fail)
    scripted_engine.replies.append(Say("Hi."))
    status, _ = await harness.ask(user())
    assert status == 500
    assert [call["status"] for call in harness.calls()] == ["completed"]


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


class TestIdleSessions:
    async def test_an_idle_session_is_forgotten_and_its_next_call_is_still_bridged(self, harness, scripted_engine):
        scripted_engine.replies += [Say("Hi."), Say("Ho.")]
        _, reply = await harness.ask(user())
        harness.endpoint.forget_idle(0)
        assert harness.endpoint.sessions == {}
        await harness.ask(user(), reply["choices"][0]["message"], user("Again"))
        assert [call["kind"] for call in harness.calls()] == ["root", "bridged"]

    async def test_a_session_with_a_running_call_is_kept(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("one two", hold_after=1))
        asked = asyncio.create_task(harness.ask(user()))
        await asyncio.to_thread(scripted_engine.holding.wait)
        harness.endpoint.forget_idle(0)
        assert list(harness.endpoint.sessions) == ["s1"]
        scripted_engine.release()
        assert (await asked)[0] == 200

    async def test_a_finished_call_keeps_no_tokens_in_memory(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("Hi."))
        await harness.ask(user())
        session = harness.endpoint.sessions["s1"]
        assert (session.generations, len(session._recovered.finished)) == ([], 1)

    async def test_a_forgotten_session_that_ended_is_still_refused(self, harness, scripted_engine):
        await harness.end()
        harness.endpoint.forget_idle(0)
        assert (await harness.ask(user()))[0] == 410


class TestEngineIsDown:
    """Answers without an engine come at once: the engine of these tests would be waited for."""

    @pytest.fixture
    async def waiting(self, rendering, tmp_path):
        async with recording(rendering, tmp_path, "http://127.0.0.1:1", patience=3600.0) as client:
            yield client

    async def test_an_invalid_request_is_refused(self, waiting):
        async with waiting.post(b"{") as response:
            assert response.status == 400

    async def test_a_call_of_an_ended_session_is_refused(self, waiting):
        await waiting.end()
        assert (await waiting.ask(user()))[0] == 410

    async def test_tokens_are_counted(self, waiting):
        assert await count(waiting, "Hello") > 0


async def count(harness, text):
    path = "/v1/messages/count_tokens"
    headers = harness.endpoint.headers("s1", "api", find_route("POST", path, {}))
    async with harness.client.post(harness.url(path), json={"messages": [user(text)]}, headers=headers) as response:
        assert response.status == 200
        return (await response.json())["input_tokens"]


async def test_more_tokens_than_the_window_are_counted(harness):
    """Harnesses count in order to compact their history."""
    assert await count(harness, "word " * 40_000) > 40_000


async def test_a_streamed_reply_that_was_not_held_to_its_schema_is_the_same_as_a_plain_one(harness, scripted_engine):
    said = '<think>\nLet me think about it.\n</think>\n\n{"answer": 42}'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    replies = []
    for stream in (False, True):
        scripted_engine.replies += [Answer(400, '{"error": {"message": "no such grammar"}}'), Say(said)]
        body = {"messages": [user()], "stream": stream, "response_format": form}
        async with harness.post(body) as response:
            body = await response.text()
            replies.append(content(body) if stream else json.loads(body)["choices"][0]["message"]["content"])
    assert replies == ['{"answer": 42}'] * 2


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


SEEN = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}]


async def test_a_conversation_with_an_image_is_answered_continued_and_marked(harness, scripted_engine):
    scripted_engine.replies += [Say("Nice."), Say("Bye.")]
    asked = [{"role": "user", "content": SEEN}]
    assert (await harness.ask(*asked))[0] == 200
    await harness.ask(*asked, {"role": "assistant", "content": "Nice."}, user("And now?"))
    first, second = harness.calls()
    assert (first["kind"], second["kind"]) == ("root", "bridged")
    assert "[image/png, not shown: this model reads text]" in first["messages"]
    assert [(event["call_id"], event["detail"]) for event in harness.events("hidden")] == [
        (first["call_id"], "1"),
        (second["call_id"], "1"),
    ]
    assert b"iVBO" not in b"".join(path.read_bytes() for path in harness.run.rglob("*") if path.is_file())


async def test_images_can_be_refused(rendering, scripted_engine, tmp_path):
    async with recording(rendering, tmp_path, scripted_engine.url, images="refuse") as client:
        status, refusal = await client.ask({"role": "user", "content": SEEN})
        assert status == 400
        assert (
            "takes text only. The conversation has other parts (images, audio, files): 1."
            in refusal["error"]["message"]
        )
        assert len(client.events("rejected")) == 1
        assert client.calls() == client.events("hidden") == []
