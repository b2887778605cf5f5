"""Replies as a harness receives them, plain and streamed, and their records on disk."""

import asyncio
import json

import aiohttp
import pytest

from rolltap.addons.endpoint import generation, server
from rolltap.addons.store.tables import RunWriter
from tests.addons.endpoint.asking import GEMINI, assistant, refused, told, values
from tests.addons.endpoint.test_server import failing
from tests.addons.harness import content, read_until, said, until, user, with_result
from tests.scripted_engine import Answer, Say

FUNCTION = {"name": "bash", "description": "Run", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
TOOL_CALL = (
    '<think>\nI look.\n</think>\n\n<tool_call>\n{"name":  "bash", "arguments": {"a" :true,'
    ' "b":"é"}}\n</tool_call>'
)
STREAM = {"messages": [user()], "stream": True}


@pytest.fixture
def quick(monkeypatch):
    """Send a keep-alive every hundredth of a second."""
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.01)


class TestReply:
    async def test_a_reply_is_parsed_and_recorded_token_for_token(self, harness, scripted_engine):
        text = "<think>\nHm.\n</think>\n\nHi there."
        scripted_engine.replies.append(Say(text))
        _, reply = await harness.ask(user(), max_tokens=50)
        message = reply["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["content"] == "Hi there."
        (call,) = harness.calls()
        ids = [*scripted_engine.ids(text), scripted_engine.tokenizer.eos_token_id]
        assert call["completion_ids"] == ids
        assert call["logprobs"] == [-0.125 * (1 + i % 5) for i in range(len(ids))]
        assert call["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]
        assert call["status"] == "completed"
        assert call["violation"] is None
        assert call["kind"] == "root"
        assert reply["usage"]["prompt_tokens"] == call["prompt_length"]
        assert reply["usage"]["completion_tokens"] == len(ids)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_calls_id_is_the_requests_id(self, harness, stream):
        async with harness.post({"messages": [user()], "stream": stream}) as response:
            await response.read()
        (call,) = harness.calls()
        assert response.headers["x-request-id"] == call["call_id"]
        assert response.headers["request-id"] == call["call_id"]

    async def test_sampling_is_neutral_whatever_the_harness_asks_for(
        self, harness, scripted_engine
    ):
        await told(harness, user(), temperature=0.1, top_p=0.5, seed=3, max_tokens=9)
        sent = scripted_engine.requests[0]["sampling_params"]
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 9}
        assert sent | neutral == sent
        assert "seed" not in sent
        recorded = json.loads(harness.calls()[0]["sampling"])
        assert recorded.pop("asked") == {"temperature": 0.1, "top_p": 0.5, "seed": 3}
        assert sent == {**recorded, "logprobs": 0, "stream_interval": 8}

    async def test_the_next_turn_continues_the_tokens(self, harness, scripted_engine):
        scripted_engine.replies.append(Say(TOOL_CALL))
        _, first = await harness.ask(user(), tools=TOOLS)
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        message, result = with_result(first)
        function = message["tool_calls"][0]["function"]
        assert json.loads(function["arguments"]) == {"a": True, "b": "é"}
        # as harnesses re-serialise it
        function["arguments"] = '{ "b": "\\u00e9", "a": true }'
        del message["reasoning_content"]
        await told(harness, user(), message, result, tools=TOOLS)
        one, two = harness.calls()
        assert two["kind"] == "bridged"
        assert two["parent_id"] == one["call_id"]
        assert two["kind_reason"] is None
        before, prompt = values(scripted_engine.requests, "token_ids")
        assert prompt == before + one["completion_ids"] + two["prompt_tail_ids"]
        assert json.loads(two["messages"]) == [{**result, "name": "bash"}]
        assert two["tools"] is None

    async def test_sessions_do_not_continue_each_other(self, harness):
        reply = await told(harness, user())
        body = {"messages": [user(), assistant(reply), user("More")]}
        for session in ("s2", "", "s", "S1", "s10"):
            await harness.send(body, session=session)
        assert values(harness.calls(), "kind_reason") == ["no earlier call"] * 6

    @pytest.mark.parametrize(
        ("text", "reason", "part"),
        [
            ("<tool_call>\n{broken\n</tool_call>", "stop", "content"),
            ("<think>\n{broken", "length", "reasoning_content"),
        ],
    )
    async def test_a_tool_call_that_is_not_json_stays_text_and_a_cut_thought_is_reasoning(
        self, harness, scripted_engine, text, reason, part
    ):
        scripted_engine.replies.append(Say(text, finish_reason=reason))
        _, reply = await harness.ask(user(), tools=TOOLS)
        assert reply["choices"][0]["finish_reason"] == reason
        assert "{broken" in reply["choices"][0]["message"][part]

    @pytest.mark.parametrize("breaks", [None, 2])
    async def test_slow_replies_are_kept_alive_by_leading_white_space_and_a_failure_breaks_the_connection(
        self, harness, scripted_engine, quick, breaks
    ):
        """An error with status 200 would be taken for an answer."""
        scripted_engine.replies.append(Say("one two", hold_after=1, break_after=breaks))
        async with harness.post({"messages": [user()]}) as response:
            assert response.status == 200
            assert await response.content.readexactly(3) == b"   "
            scripted_engine.release()
            if breaks:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            else:
                assert said(json.loads(await response.read())) == "one two"
        assert values(harness.calls(), "status") == ["failed" if breaks else "completed"]


class TestStream:
    async def test_a_stream_ends_with_the_call_on_disk(self, harness, scripted_engine):
        scripted_engine.replies.append(Say(TOOL_CALL))
        options = {"include_usage": True}
        status, events = await harness.stream(user(), tools=TOOLS, stream_options=options)
        assert status == 200
        assert events.pop() == "[DONE]"
        *chunks, usage = map(json.loads, events)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I look."
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert calls[0]["function"]["name"] == "bash"
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        (recorded,) = harness.calls()
        assert usage["usage"]["completion_tokens"] == len(recorded["completion_ids"])

    async def test_text_arrives_while_the_engine_still_generates(self, harness, scripted_engine):
        held = len(scripted_engine.ids("one two three"))
        scripted_engine.replies.append(Say("one two three four five six", hold_after=held))
        async with harness.post(STREAM) as response:
            seen = await read_until(response, lambda seen: "two" in content(seen.decode()))
            assert harness.calls() == []
            scripted_engine.release()
            seen += await response.content.read()
        assert content(seen.decode()) == "one two three four five six"
        assert seen.endswith(b"data: [DONE]\n\n")
        assert len(harness.calls()) == 1

    async def test_headers_and_the_first_event_come_before_the_engine_answers_and_then_keep_alives(
        self, harness, scripted_engine, quick
    ):
        scripted_engine.replies.append(Say("Hi.", hold_after=0))
        async with harness.post(STREAM) as response:
            assert response.status == 200
            assert b'"role":"assistant"' in await response.content.readany()
            await asyncio.to_thread(scripted_engine.holding.wait)
            await read_until(response, lambda seen: seen.count(b'"delta":{}') >= 3)
            scripted_engine.release()
            assert b"[DONE]" in await response.content.read()

    async def test_a_harness_that_hangs_up_stops_the_generation(
        self, harness, scripted_engine, monkeypatch
    ):
        monkeypatch.setattr(generation, "LINGER_SECONDS", 0)
        committed = harness.committed(monkeypatch)
        scripted_engine.replies.append(Say("one two three four five six", hold_after=3))
        async with harness.post(STREAM) as response:
            await response.content.readany()
            (running,) = harness.endpoint.sessions["s1"].generations
            await until(lambda: len(running.call.completion_ids) == 3)
            response.close()
        await asyncio.to_thread(scripted_engine.disconnected.wait)
        await committed.wait()
        (call,) = harness.calls()
        assert call["status"] == "aborted"
        assert len(call["completion_ids"]) == 3


async def test_a_streamed_reply_that_was_not_held_to_its_schema_is_the_same_as_a_plain_one(
    harness, scripted_engine
):
    refusal = Answer(400, '{"error": {"message": "no such grammar"}}')
    reply = Say('<think>\nLet me think about it.\n</think>\n\n{"answer": 42}')
    scripted_engine.replies += [refusal, reply, refusal, reply]
    schema = {"name": "x", "schema": {"type": "object"}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert await told(harness, user(), **form) == '{"answer": 42}'
    _, events = await harness.send({**STREAM, **form})
    assert content(events) == '{"answer": 42}'
    sent = values(scripted_engine.requests, "sampling_params")
    assert ["structured_outputs" in each for each in sent] == [True, False] * 2


async def test_a_reply_whose_record_cannot_be_synced_is_not_sent(harness, monkeypatch):
    harness.endpoint.writer.sync_policy = "call"
    monkeypatch.setattr(RunWriter, "sync", failing(OSError("the disk is gone")))
    assert await refused(harness, user()) == (500, "not_recorded")
    assert values(harness.calls(), "status") == ["completed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_one_of_the_texts_that_gemini_is_asked_for(
    harness, scripted_engine, stream
):
    scripted_engine.replies.append(Say("yes"))
    schema = {"type": "STRING", "enum": ["yes", "no"]}
    config = {"responseMimeType": "text/x.enum", "responseSchema": schema}
    body = {"contents": [{"parts": [{"text": "Is it?"}]}], "generationConfig": config}
    path = GEMINI.replace("generate", "streamGenerate") if stream else GEMINI
    _, text = await harness.send(body, path=path)
    chunks = json.loads(text) if stream else [json.loads(text)]
    texts = []
    for chunk in chunks:
        for part in chunk["candidates"][0]["content"]["parts"]:
            assert not part.get("thought")
            texts.append(part["text"])
    assert "".join(texts) == "yes"
    (request,) = scripted_engine.requests
    assert request["sampling_params"]["structured_outputs"] == {"choice": ["yes", "no"]}
    assert harness.calls()[0]["role"] == "auxiliary"
