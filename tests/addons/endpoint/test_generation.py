"""Generations that survive a failure of the engine, end at a stop text, or follow a schema."""

import asyncio
import json

import pytest

from rolltap.addons.endpoint import generation, session
from tests.addons.dialects.test_openai_chat import TOOL
from tests.addons.endpoint.asking import told, values
from tests.addons.harness import content, read_until, said, spans, until, user
from tests.scripted_engine import Answer, Say

UNNAMED = "weight version spans leave token 0 out"


class TestContinuation:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_engine_that_dies_is_continued_from_the_last_sampled_token(
        self, patient, scripted_engine, stream
    ):
        scripted_engine.replies += [Say("one two three four", break_after=2), Say(" three four")]
        body = {"messages": [user()], "stream": stream, "max_tokens": 50}
        status, text = await patient.send(body)
        assert status == 200
        assert "error" not in text
        first, second = scripted_engine.requests
        (call,) = patient.calls()
        ids = call["completion_ids"]
        whole = scripted_engine.ids("one two three four")[:2] + scripted_engine.ids(" three four")
        assert ids == [*whole, scripted_engine.tokenizer.eos_token_id]
        assert second["token_ids"] == first["token_ids"] + ids[:2]
        assert second["sampling_params"]["max_tokens"] == 48
        assert len(call["logprobs"]) == len(ids)
        assert spans(call) == [("default", 0, 2), ("default", 2, len(ids))]
        assert call["status"] == "completed"
        assert call["violation"] is None
        assert values(patient.events("continued"), "call_id") == [call["call_id"]]

    async def test_new_weights_in_the_middle_are_two_spans(self, patient, scripted_engine):
        aborted = Say("one two", finish_reason="abort", weight_version="1")
        scripted_engine.replies += [aborted, Say(" three", weight_version="2")]
        await told(patient, user())
        (call,) = patient.calls()
        assert values(call["weight_versions"], "version") == ["1", "2"]
        assert call["violation"] is None

    async def test_tokens_of_an_unknown_weight_version_are_not_trained_on(
        self, patient, scripted_engine
    ):
        def publish(body):
            (patient.run / "policy.json").write_text('{"version": "1", "model": "policy-1"}')
            if len(scripted_engine.requests) == 1:
                return Say("one two three", break_after=2)
            return Say(" three")

        scripted_engine.otherwise = publish
        await told(patient, user())
        assert patient.calls()[0]["violation"] == UNNAMED

    async def test_a_completion_that_lacks_only_its_finish_reason_is_not_sampled_again(
        self, patient, scripted_engine
    ):
        ids = [*scripted_engine.ids("Hi."), scripted_engine.tokenizer.eos_token_id]
        content = [{"token_id": i, "logprob": -1.0} for i in ids]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": None}
        scripted_engine.replies.append(Answer(200, json.dumps({"choices": [choice]})))
        assert await told(patient, user()) == "Hi."
        assert len(scripted_engine.requests) == 1

    @pytest.mark.parametrize("published", [False, True])
    async def test_a_complete_completion_is_returned_although_its_engine_is_down(
        self, harness, scripted_engine, published
    ):
        """The call neither waits for the engine nor fails: only the finish reason is missing."""
        if published:
            (harness.run / "policy.json").write_text('{"version": "7", "model": null}')
        num_ids = len(scripted_engine.ids("one two")) + 1
        scripted_engine.replies.append(Say("one two three", break_after=num_ids))
        await told(harness, user(), max_tokens=num_ids)
        assert len(scripted_engine.requests) == 1
        (call,) = harness.calls()
        assert call["finish_reason"] == "length"
        if published:
            assert call["violation"] is None
            assert spans(call) == [("7", 0, num_ids)]
        else:  # nobody has said which weights the engine had
            assert call["violation"] == f"weight version spans cover 0 of {num_ids} tokens"
            assert spans(call) == []

    @pytest.mark.parametrize(
        ("named", "samples", "violation"),
        [("7", "7", None), (None, "7", UNNAMED), ("default", "7", UNNAMED)],
        ids=["the same", "the engine does not tell", "new weights since it was asked"],
    )
    async def test_unpublished_weights_are_those_that_the_engine_names_before_and_after(
        self, patient, scripted_engine, named, samples, violation
    ):
        scripted_engine.weight_version = named
        scripted_engine.replies += [
            Say("one two three", break_after=1, weight_version=samples),
            Say(" two three", break_after=1, weight_version=samples),
            Say(" three", weight_version=samples),
        ]
        await told(patient, user())
        (call,) = patient.calls()
        assert call["violation"] == violation
        *first, last = spans(call)
        assert first == ([] if violation else [(samples, 0, 2)])
        assert last == (samples, 2, len(call["completion_ids"]))

    @pytest.mark.parametrize(
        ("replies", "status", "continued"),
        [([Answer(503, "loading"), Answer(500, "broken")], 200, 2), ([Answer(400, "bad")], 400, 0)],
    )
    async def test_a_call_waits_for_an_engine_that_is_down_and_not_for_one_that_refuses(
        self, patient, scripted_engine, replies, status, continued
    ):
        scripted_engine.replies += replies
        assert (await patient.ask(user()))[0] == status
        assert len(patient.events("continued")) == continued == len(scripted_engine.requests) - 1


class TestFault:
    """The events with which a session is judged not to have failed by itself."""

    @pytest.mark.parametrize("sampled", [0, 6])
    @pytest.mark.parametrize("silent", [False, True])
    async def test_an_abort_is_a_fault_after_a_long_silence_of_a_healthy_engine_only(
        self, harness, scripted_engine, monkeypatch, sampled, silent
    ):
        monkeypatch.setattr(generation, "UNANSWERED_SECONDS", 0 if silent else 3600)
        scripted_engine.replies.append(Say("one two three four five six", hold_after=sampled))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            await read_until(response, lambda seen: not sampled or content(seen.decode()))
            await asyncio.to_thread(scripted_engine.holding.wait)
            await harness.end()
        (call,) = harness.calls()
        assert bool(call["completion_ids"]) == bool(sampled)
        faults = harness.events("fault")
        if silent:
            (fault,) = faults
            assert fault["call_id"] == call["call_id"]
            words = f"the engine at {scripted_engine.url} sent nobody a token for"
            assert fault["detail"].startswith(words)
            why = f"the session ended, while it waited for an engine: {fault['detail']}"
            assert call["error"] == why
        else:
            assert faults == []
            assert call["error"] == "the session ended"

    @pytest.mark.parametrize("other", ["s1", "s2"])
    async def test_a_call_that_waits_while_the_engine_answers_others_is_given_up_by_its_harness(
        self, harness, scripted_engine, monkeypatch, other
    ):
        monkeypatch.setattr(generation, "UNANSWERED_SECONDS", 3600)
        busy = Say("one two three four five six", hold_after=1)
        scripted_engine.replies += [busy, Say("Hi.", hold_after=0)]
        body = {"messages": [user()], "stream": True}
        asked = asyncio.create_task(harness.send(body, session=other))
        await until(lambda: len(scripted_engine.requests) == 1)
        async with harness.post({"messages": [user("More.")], "stream": True}):
            waiting = harness.endpoint.sessions["s1"].generations[-1]
            waiting._started_at -= 3700  # since then the engine has said "one"
            answered = harness.endpoint.sessions[other].generations[0].call
            await until(lambda: len(answered.completion_ids) == 1)
            waiting.abort("the harness closed the connection")
        scripted_engine.release()
        await asked
        assert harness.events("fault") == []


async def test_of_the_calls_that_a_harness_leaves_behind_few_wait_for_a_retry(
    harness, scripted_engine, monkeypatch
):
    monkeypatch.setattr(session, "LEFT", 2)
    monkeypatch.setattr(generation, "LINGER_SECONDS", 3600)
    scripted_engine.otherwise = lambda request: Say("one two three", hold_after=1)
    for number in range(4):
        body = {"messages": [user(f"Question {number}")], "stream": True}
        async with harness.post(body) as response:
            await read_until(response, lambda seen: b"one" in seen)
        left = harness.endpoint.sessions["s1"].generations[-1]
        await until(lambda left=left: not left.listeners)
    harness.endpoint.sessions["s1"].drop_unheard()
    assert values(harness.calls(), "status") == ["aborted"] * 2
    assert harness.events("fault") == []
    scripted_engine.release()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_reply_and_is_no_part_of_it(harness, scripted_engine, stream):
    scripted_engine.replies.append(Say("one two STOP"))
    _, reply = await harness.send({"messages": [user()], "stream": stream, "stop": ["STOP"]})
    assert (content(reply) if stream else said(json.loads(reply))) == "one two "
    assert scripted_engine.requests[0]["sampling_params"]["stop"] == ["STOP"]


SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}


async def test_the_engine_is_given_the_schema_and_the_call_is_a_side_question(
    harness, scripted_engine
):
    scripted_engine.replies.append(Say('{"title": "x"}'))
    assert await told(harness, user(), response_format=FORMAT) == '{"title": "x"}'
    sent = scripted_engine.requests[0]["sampling_params"]
    assert sent["structured_outputs"] == {"json": SCHEMA}
    assert harness.calls()[0]["role"] == "auxiliary"


async def test_beside_tools_a_schema_is_recorded_and_not_applied(harness, scripted_engine):
    scripted_engine.replies.append(Say("<think>\nHm.\n</think>\n\n"))
    assert not await told(harness, user(), tools=[TOOL], response_format=FORMAT)
    assert "structured_outputs" not in scripted_engine.requests[0]["sampling_params"]
    (call,) = harness.calls()
    sampling = json.loads(call["sampling"])
    assert sampling["asked"]["json_schema"] is True
    assert "structured_outputs" not in sampling
    assert call["role"] == "agent"
