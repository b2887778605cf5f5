"""Generations that survive a failure of the engine, end at a stop text, or follow a schema."""

import asyncio
import json

import pytest

from rolltap.addons.endpoint import generation, session
from tests.addons.dialects.test_openai_chat import TOOL
from tests.addons.harness import content, read_until, said, spans, until, user
from tests.scripted_engine import Answer, Say


class TestContinuation:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_engine_that_dies_is_continued_from_the_last_sampled_token(
        self, patient, scripted_engine, stream
    ):
        scripted_engine.replies += [Say("one two three four", break_after=2), Say(" three four")]
        status, text = await patient.send(
            {"messages": [user()], "stream": stream, "max_tokens": 50}
        )
        assert status == 200
        assert "error" not in text
        first, second = scripted_engine.requests
        (call,) = patient.calls()
        assert second["token_ids"] == first["token_ids"] + call["completion_ids"][:2]
        assert second["sampling_params"]["max_tokens"] == 48
        ids = scripted_engine.ids("one two three four")[:2] + scripted_engine.ids(" three four")
        assert call["completion_ids"] == [*ids, scripted_engine.tokenizer.eos_token_id]
        assert len(call["logprobs"]) == len(call["completion_ids"])
        assert spans(call) == [("default", 0, 2), ("default", 2, len(call["completion_ids"]))]
        assert (call["status"], call["violation"]) == ("completed", None)
        assert [event["call_id"] for event in patient.events("continued")] == [call["call_id"]]

    async def test_new_weights_in_the_middle_are_two_spans(self, patient, scripted_engine):
        aborted = Say("one two", finish_reason="abort", weight_version="1")
        scripted_engine.replies += [aborted, Say(" three", weight_version="2")]
        await patient.ask(user())
        (call,) = patient.calls()
        assert [span["version"] for span in call["weight_versions"]] == ["1", "2"]
        assert call["violation"] is None

    async def test_tokens_of_an_unknown_weight_version_are_not_trained_on(
        self, patient, scripted_engine, monkeypatch
    ):
        def publish(body):
            (patient.run / "policy.json").write_text('{"version": "1", "model": "policy-1"}')
            return (
                Say("one two three", break_after=2)
                if len(scripted_engine.requests) == 1
                else Say(" three")
            )

        scripted_engine.otherwise = publish
        await patient.ask(user())
        (call,) = patient.calls()
        assert call["violation"] == "weight version spans leave token 0 out"

    async def test_a_completion_that_lacks_only_its_finish_reason_is_not_sampled_again(
        self, patient, scripted_engine
    ):
        ids = [*scripted_engine.ids("Hi."), scripted_engine.tokenizer.eos_token_id]
        content = [{"token_id": i, "logprob": -1.0} for i in ids]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": None}
        scripted_engine.replies.append(Answer(200, json.dumps({"choices": [choice]})))
        status, reply = await patient.ask(user())
        assert (status, said(reply)) == (200, "Hi.")
        assert len(scripted_engine.requests) == 1

    @pytest.mark.parametrize("published", [False, True])
    async def test_a_complete_completion_is_returned_although_its_engine_is_down(
        self, harness, scripted_engine, published
    ):
        """The call neither waits for the engine nor fails: only the finish reason is missing."""
        if published:
            (harness.run / "policy.json").write_text('{"version": "7", "model": null}')
        ids = len(scripted_engine.ids("one two")) + 1
        scripted_engine.replies.append(Say("one two three", break_after=ids))
        status, reply = await harness.ask(user(), max_tokens=ids)
        assert (status, reply["choices"][0]["finish_reason"]) == (200, "length")
        assert len(scripted_engine.requests) == 1
        (call,) = harness.calls()
        # unless they are published, nobody has said which weights the engine had
        unknown = f"weight version spans cover 0 of {ids} tokens"
        assert (call["violation"], spans(call)) == (
            (None, [("7", 0, ids)]) if published else (unknown, [])
        )

    @pytest.mark.parametrize(
        ("asked", "samples", "violation"),
        [
            ("7", "7", None),
            (None, "7", "weight version spans leave token 0 out"),  # the engine does not tell
            (
                "default",
                "7",
                "weight version spans leave token 0 out",
            ),  # new weights since it was asked
        ],
    )
    async def test_unpublished_weights_are_those_that_the_engine_names_before_and_after(
        self, patient, scripted_engine, asked, samples, violation
    ):
        scripted_engine.weight_version = asked
        scripted_engine.replies += [
            Say("one two three", break_after=1, weight_version=samples),
            Say(" two three", break_after=1, weight_version=samples),
            Say(" three", weight_version=samples),
        ]
        await patient.ask(user())
        (call,) = patient.calls()
        assert call["violation"] == violation
        named = [(samples, 0, 2)] if violation is None else []
        assert spans(call) == [*named, (samples, 2, len(call["completion_ids"]))]

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
        if silent:
            monkeypatch.setattr(generation, "UNANSWERED_SECONDS", 0)
        scripted_engine.replies.append(Say("one two three four five six", hold_after=sampled))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            await read_until(response, lambda seen: not sampled or content(seen.decode()))
            assert await asyncio.to_thread(scripted_engine.holding.wait, 30)
            await harness.end()
        (call,), faults = harness.calls(), harness.events("fault")
        assert bool(call["completion_ids"]) == bool(sampled)
        assert [fault["call_id"] for fault in faults] == [call["call_id"]] * silent
        why = "".join(f", while it waited for an engine: {fault['detail']}" for fault in faults)
        assert call["error"] == "the session ended" + why
        assert (f"the engine at {scripted_engine.url} sent nobody a token for" in why) == silent

    @pytest.mark.parametrize("other", ["s1", "s2"])
    async def test_a_call_that_waits_while_the_engine_answers_others_is_given_up_by_its_harness(
        self, harness, scripted_engine, monkeypatch, other
    ):
        monkeypatch.setattr(generation, "UNANSWERED_SECONDS", 60)
        say = Say("one two three four five six", hold_after=1)
        scripted_engine.replies += [say, Say("Hi.", hold_after=0)]
        busy = asyncio.create_task(
            harness.send({"messages": [user()], "stream": True}, session=other)
        )
        await until(lambda: len(scripted_engine.requests) == 1)
        async with harness.post({"messages": [user("More.")], "stream": True}):
            waiting = harness.endpoint.sessions["s1"].generations[-1]
            waiting._started_at -= 64  # since then the engine has said "one"
            await until(
                lambda: (
                    len(harness.endpoint.sessions[other].generations[0].call.completion_ids) == 1
                )
            )
            waiting.abort("the harness closed the connection")
        scripted_engine.release()
        await busy
        assert harness.events("fault") == []


async def test_of_the_calls_that_a_harness_leaves_behind_few_wait_for_a_retry(
    harness, scripted_engine, monkeypatch
):
    monkeypatch.setattr(session, "LEFT", 2)
    scripted_engine.otherwise = lambda request: Say("one two three", hold_after=1)
    for i in range(4):
        async with harness.post({"messages": [user(f"Question {i}")], "stream": True}) as response:
            await read_until(response, lambda seen: b"one" in seen)
        left = harness.endpoint.sessions["s1"].generations[-1]
        await until(lambda left=left: not left.listeners)
    harness.endpoint.sessions["s1"].drop_unheard()
    assert [call["status"] for call in harness.calls()] == ["aborted"] * 2
    assert harness.events("fault") == []
    scripted_engine.release()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_reply_and_is_no_part_of_it(harness, scripted_engine, stream):
    scripted_engine.replies.append(Say("one two STOP"))
    _, reply = await harness.send({"messages": [user()], "stream": stream, "stop": ["STOP"]})
    assert (content(reply) if stream else said(json.loads(reply))) == "one two "
    assert scripted_engine.requests[0]["sampling_params"]["stop"] == ["STOP"]


class TestSchema:
    SCHEMA: dict = {"type": "object", "properties": {"title": {"type": "string"}}}  # noqa: RUF012
    FORMAT: dict = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}  # noqa: RUF012

    async def test_the_engine_is_given_the_schema_and_the_call_is_a_side_question(
        self, harness, scripted_engine
    ):
        scripted_engine.replies.append(Say('{"title": "x"}'))
        _, reply = await harness.ask(user(), response_format=self.FORMAT)
        assert json.loads(said(reply)) == {"title": "x"}
        sent = scripted_engine.requests[0]["sampling_params"]["structured_outputs"]
        assert sent == {"json": self.SCHEMA}
        assert harness.calls()[0]["role"] == "auxiliary"

    async def test_beside_tools_a_schema_is_recorded_and_not_applied(
        self, harness, scripted_engine
    ):
        scripted_engine.replies.append(Say("<think>\nHm.\n</think>\n\n"))
        _, reply = await harness.ask(user(), tools=[TOOL], response_format=self.FORMAT)
        assert not reply["choices"][0]["message"]["content"]
        assert "structured_outputs" not in scripted_engine.requests[0]["sampling_params"]
        (call,) = harness.calls()
        sampling = json.loads(call["sampling"])
        assert (sampling["asked"]["json_schema"], "structured_outputs" in sampling) == (True, False)
        assert call["role"] == "agent"
