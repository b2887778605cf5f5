"""Replies as a harness receives them, plain and streamed, and their records on disk."""

import asyncio
import json
from unittest import mock

import aiohttp
import pytest

from rolltap.addons.endpoint import generation, server
from tests.addons.harness import content, read_until, said, until, user
from tests.scripted_engine import Answer, Say

TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}},
    }
]
TOOL_CALL = (
    '<think>\nI look.\n</think>\n\n<tool_call>\n{"name":  "bash", "arguments": {"a" :true,'
    ' "b":"é"}}\n</tool_call>'
)


@pytest.fixture
def quick(monkeypatch):
    """Send a keep-alive every hundredth of a second."""
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.01)


class TestReply:
    async def test_a_reply_is_parsed_and_recorded_token_for_token(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("<think>\nHm.\n</think>\n\nHi there."))
        status, reply = await harness.ask(user(), max_tokens=50)
        message = reply["choices"][0]["message"]
        assert status == 200
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi there.")
        (call,) = harness.calls()
        ids = [
            *scripted_engine.ids("<think>\nHm.\n</think>\n\nHi there."),
            scripted_engine.tokenizer.eos_token_id,
        ]
        assert call["completion_ids"] == ids
        assert call["logprobs"] == [-0.125 * (1 + i % 5) for i in range(len(ids))]
        assert call["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]
        assert (call["status"], call["violation"], call["kind"]) == ("completed", None, "root")
        assert reply["usage"]["prompt_tokens"] == call["prompt_length"]
        assert reply["usage"]["completion_tokens"] == len(ids)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_calls_id_is_the_requests_id(self, harness, stream):
        async with harness.post({"messages": [user()], "stream": stream}) as response:
            await response.read()
        (call,) = harness.calls()
        assert response.headers["x-request-id"] == response.headers["request-id"] == call["call_id"]

    async def test_sampling_is_neutral_whatever_the_harness_asks_for(
        self, harness, scripted_engine
    ):
        scripted_engine.replies.append(Say("x"))
        await harness.ask(user(), temperature=0.1, top_p=0.5, seed=3, max_tokens=9)
        sent = scripted_engine.requests[0]["sampling_params"]
        assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["max_tokens"]) == (
            1.0,
            1.0,
            0,
            9,
        )
        assert "seed" not in sent
        recorded = json.loads(harness.calls()[0]["sampling"])
        assert recorded.pop("asked") == {"temperature": 0.1, "top_p": 0.5, "seed": 3}
        assert sent == {**recorded, "logprobs": 0, "stream_interval": 8}

    async def test_the_next_turn_continues_the_tokens(self, harness, scripted_engine):
        scripted_engine.replies += [Say(TOOL_CALL), Say("Done.")]
        _, first = await harness.ask(user(), tools=TOOLS)
        message = first["choices"][0]["message"]
        (tool_call,) = message["tool_calls"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(tool_call["function"]["arguments"]) == {"a": True, "b": "é"}
        tool_call["function"]["arguments"] = (
            '{ "b": "\\u00e9", "a": true }'  # as harnesses re-serialise it
        )
        del message["reasoning_content"]
        result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "ok"}
        await harness.ask(user(), message, result, tools=TOOLS)
        one, two = harness.calls()
        assert (two["kind"], two["parent_id"], two["kind_reason"]) == (
            "bridged",
            one["call_id"],
            None,
        )
        prompts = [request["token_ids"] for request in scripted_engine.requests]
        assert (
            prompts[1][: len(prompts[0]) + len(one["completion_ids"])]
            == prompts[0] + one["completion_ids"]
        )
        assert two["prompt_tail_ids"] == prompts[1][len(prompts[0]) + len(one["completion_ids"]) :]
        assert json.loads(two["messages"]) == [{**result, "name": "bash"}]
        assert two["tools"] is None

    async def test_sessions_do_not_continue_each_other(self, harness):
        await harness.ask(user())
        body = {"messages": [user(), {"role": "assistant", "content": "Hi."}, user("More")]}
        for session in ("s2", "", "s", "S1", "s10"):
            await harness.send(body, session=session)
        assert [(call["kind"], call["kind_reason"]) for call in harness.calls()] == [
            ("root", "no earlier call")
        ] * 6

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
        (choice,) = (await harness.ask(user(), tools=TOOLS))[1]["choices"]
        assert (choice["finish_reason"], "{broken" in choice["message"][part]) == (reason, True)

    @pytest.mark.parametrize("breaks", [False, True])
    async def test_slow_replies_are_kept_alive_by_leading_white_space_and_a_failure_breaks_the_connection(
        self, harness, scripted_engine, quick, breaks
    ):
        """An error with status 200 would be taken for an answer."""
        scripted_engine.replies.append(
            Say("one two", hold_after=1, break_after=2 if breaks else None)
        )
        async with harness.post({"messages": [user()]}) as response:
            assert response.status == 200
            assert (await response.content.readexactly(3)) == b"   "
            scripted_engine.release()
            if breaks:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            else:
                assert said(json.loads(await response.read())) == "one two"
        assert [call["status"] for call in harness.calls()] == ["failed" if breaks else "completed"]


class TestStream:
    async def test_a_stream_ends_with_the_call_on_disk(self, harness, scripted_engine):
        scripted_engine.replies.append(Say(TOOL_CALL))
        status, events = await harness.stream(
            user(), tools=TOOLS, stream_options={"include_usage": True}
        )
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
        async with harness.post({"messages": [user()], "stream": True}) as response:
            assert response.status == 200
            assert b'"role":"assistant"' in await response.content.readany()
            assert await asyncio.to_thread(scripted_engine.holding.wait, 30)
            await read_until(response, lambda seen: seen.count(b'"delta":{}') >= 3)
            scripted_engine.release()
            assert b"[DONE]" in await response.content.read()

    async def test_a_harness_that_hangs_up_stops_the_generation(
        self, harness, scripted_engine, monkeypatch
    ):
        monkeypatch.setattr(generation, "LINGER_SECONDS", 0)
        committed = harness.committed(monkeypatch)
        scripted_engine.replies.append(Say("one two three four five six", hold_after=3))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            await response.content.readany()
            (running,) = harness.endpoint.sessions["s1"].generations
            await until(lambda: len(running.call.completion_ids) == 3)
            response.close()
        assert await asyncio.to_thread(scripted_engine.disconnected.wait, 30)
        await asyncio.wait_for(committed.wait(), 30)
        (call,) = harness.calls()
        assert (call["status"], len(call["completion_ids"])) == ("aborted", 3)


async def test_a_streamed_reply_that_was_not_held_to_its_schema_is_the_same_as_a_plain_one(
    harness, scripted_engine
):
    text = '<think>\nLet me think about it.\n</think>\n\n{"answer": 42}'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    replies = []
    for stream in (False, True):
        scripted_engine.replies += [
            Answer(400, '{"error": {"message": "no such grammar"}}'),
            Say(text),
        ]
        body = {"messages": [user()], "stream": stream, "response_format": form}
        _, body = await harness.send(body)
        replies.append(content(body) if stream else said(json.loads(body)))
    assert replies == ['{"answer": 42}'] * 2
    held = [
        "structured_outputs" in request["sampling_params"] for request in scripted_engine.requests
    ]
    assert held == [True, False] * 2


async def test_a_reply_whose_record_cannot_be_synced_is_not_sent(harness, monkeypatch):
    harness.endpoint.writer.sync_policy = "call"
    monkeypatch.setattr(
        harness.endpoint.writer, "sync", mock.Mock(side_effect=OSError("the disk is gone"))
    )
    status, reply = await harness.ask(user())
    assert (status, reply["error"]["code"]) == (500, "not_recorded")
    assert [call["status"] for call in harness.calls()] == ["completed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_one_of_the_texts_that_gemini_is_asked_for(
    harness, scripted_engine, stream
):
    scripted_engine.replies.append(Say("yes"))
    config = {
        "responseMimeType": "text/x.enum",
        "responseSchema": {"type": "STRING", "enum": ["yes", "no"]},
    }
    body = {"contents": [{"parts": [{"text": "Is it?"}]}], "generationConfig": config}
    method = "streamGenerateContent" if stream else "generateContent"
    status, text = await harness.send(body, path=f"/v1beta/models/m:{method}")
    chunks = json.loads(text) if stream else [json.loads(text)]
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert (status, "".join(part["text"] for part in parts)) == (200, "yes")
    assert not any(part.get("thought") for part in parts)
    (request,) = scripted_engine.requests
    assert request["sampling_params"]["structured_outputs"] == {"choice": ["yes", "no"]}
    assert harness.calls()[0]["role"] == "auxiliary"
