"""A session keeps the adapter that it began with, while newer ones are published."""

import asyncio
import itertools
import json

import pytest

from rolltap.addons.engine import pool
from rolltap.addons.engine.policy import POLICY_FILE
from rolltap.addons.store.staging import write_atomically
from tests.addons.endpoint.asking import values
from tests.addons.harness import content, read_until, recording, spans, until, user
from tests.scripted_engine import Answer, Say

ONE = "1a2b3c4d.1.0"
TWO = "1a2b3c4d.2.0"
THREE = "1a2b3c4d.3.0"
NUMBERS = itertools.count()
"""A question that is repeated after a restart gets the recorded reply."""


def publish(run, version, *, adapter=True):
    model = f"policy-{version}" if adapter else None
    write_atomically(run / POLICY_FILE, json.dumps({"model": model, "version": version}) + "\n")


async def ask(harness, *, session="s1"):
    """Ask something new, and return the versions that sampled the reply."""
    body = {"model": "m", "messages": [user(f"Question {next(NUMBERS)}")]}
    status, text = await harness.send(body, session=session)
    assert status == 200, text
    call = harness.calls()[-1]
    assert call["violation"] is None
    return values(call["weight_versions"], "version")


def models(engine):
    """Return the model that each request asked the engine for; None for the base model."""
    return [request.get("model") for request in engine.requests]


@pytest.fixture(autouse=True)
def talkative(harness, scripted_engine):
    scripted_engine.otherwise = lambda request: Say("one two three")


@pytest.fixture
async def kept(harness):
    """Return a harness whose session began with the first adapter. The second one is published."""
    publish(harness.run, ONE)
    assert await ask(harness) == [ONE]
    publish(harness.run, TWO)
    return harness


class TestPublication:
    @pytest.mark.parametrize("text", ["{", "[]", '{"model": null}', '{"version": "1", "model": 1}'])
    async def test_a_file_that_says_nothing_of_the_weights_is_a_fault(
        self, harness, scripted_engine, text
    ):
        write_atomically(harness.run / POLICY_FILE, text)
        body = {"model": "m", "messages": [user()]}
        status, answer = await harness.send(body)
        assert (status, POLICY_FILE in answer) == (500, True)
        assert len(harness.events("fault")) == 1
        publish(harness.run, ONE)
        assert await ask(harness) == [ONE]

    async def test_a_session_keeps_its_adapter_and_a_new_session_gets_the_new_one(
        self, kept, scripted_engine
    ):
        assert await ask(kept) == [ONE]
        assert await ask(kept, session="s2") == [TWO]
        assert await ask(kept) == [ONE]
        assert models(scripted_engine) == [f"policy-{version}" for version in (ONE, ONE, TWO, ONE)]

    async def test_it_does_not_without_the_option_also_if_the_version_is_an_integer(
        self, harness, rendering, scripted_engine
    ):
        publish(harness.run, 1)
        async with recording(
            rendering, harness.run, scripted_engine.url, keep_adapter=False
        ) as other:
            assert await ask(other) == ["1"]
            publish(harness.run, TWO)
            assert await ask(other) == [TWO]

    async def test_the_base_model_is_kept_by_nobody(self, harness, scripted_engine):
        """The engine has one set of base weights: those of a checkpoint replace it for all
        sessions."""
        publish(harness.run, ONE, adapter=False)
        await ask(harness)
        publish(harness.run, TWO, adapter=False)
        scripted_engine.otherwise = lambda request: Say("one two three", weight_version=TWO)
        assert await ask(harness) == [TWO]
        assert models(scripted_engine) == [None, None]

    async def test_tokens_of_a_broken_stream_are_the_adapters_whatever_was_published_meanwhile(
        self, patient, scripted_engine
    ):
        publish(patient.run, ONE)

        def break_once(request):
            publish(patient.run, TWO)
            return Say(
                "one two three", break_after=2 if len(scripted_engine.requests) == 1 else None
            )

        scripted_engine.otherwise = break_once
        assert await ask(patient) == [ONE, ONE]
        assert spans(patient.calls()[-1])[0] == (ONE, 0, 2)

    async def test_unpublished_weights_are_named_also_after_retries_that_did_not_reach_the_engine(
        self, patient, scripted_engine
    ):
        def go_down(request):
            scripted_engine.answers["/v1/models"] = Answer(500, "it starts")
            scripted_engine.otherwise = lambda request: Say(" three")
            return Say("one two three", break_after=2)

        scripted_engine.otherwise = go_down
        asked = asyncio.create_task(ask(patient))
        await until(lambda: len(patient.events("continued")) >= 3)
        del scripted_engine.answers["/v1/models"]
        assert await asked == ["default", "default"]

    async def test_tokens_of_an_aborted_call_name_the_adapter_too(self, harness, scripted_engine):
        publish(harness.run, ONE)
        scripted_engine.replies.append(Say("one two three", hold_after=3))
        async with harness.post({"messages": [user()], "stream": True}) as response:
            await read_until(response, lambda seen: content(seen.decode()))
            await asyncio.to_thread(scripted_engine.holding.wait)
            await harness.end()
        (call,) = harness.calls()
        assert call["status"] == "aborted"
        assert call["violation"] is None
        assert spans(call) == [(ONE, 0, len(call["completion_ids"]))]


async def test_the_usage_in_an_event_of_its_own_takes_no_names_of_weights_away(
    harness, scripted_engine
):
    """vLLM sends it so, behind the last tokens."""
    choice = {
        "token_ids": [5],
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]},
        "finish_reason": "length",
        "weight_versions": [{"version": "7", "start": 0, "end": 1}],
    }
    usage = {"prompt_tokens_details": {"cached_tokens": 3}}
    body = ""
    for event in ({"choices": [choice]}, {"choices": [], "usage": usage}):
        body += f"data: {json.dumps(event)}\n\n"
    scripted_engine.replies.append(Answer(200, f"{body}data: [DONE]\n\n".encode()))
    assert (await harness.ask(user()))[0] == 200
    (call,) = harness.calls()
    assert spans(call) == [("7", 0, 1)]
    assert call["cached_tokens"] == 3
    assert call["violation"] is None


class TestGone:
    """An adapter that the engine has unloaded."""

    async def test_the_session_goes_on_with_the_current_policy_and_an_event_says_so(
        self, kept, scripted_engine
    ):
        scripted_engine.adapters = {f"policy-{TWO}", f"policy-{THREE}"}
        assert await ask(kept) == [TWO]
        (event,) = kept.events("switched")
        assert event["session_id"] == "s1"
        assert event["call_id"] == kept.calls()[-1]["call_id"]
        gone = f"no engine has the adapter policy-{ONE} any more"
        assert event["detail"] == f"{gone}: the session goes on with the weights {TWO}"
        publish(kept.run, THREE)
        assert await ask(kept) == [TWO]
        assert len(kept.events("switched")) == 1

    async def test_in_the_middle_of_a_completion_each_token_names_its_own_weights(
        self, patient, scripted_engine
    ):
        publish(patient.run, ONE)

        def unload(request):
            publish(patient.run, TWO)
            scripted_engine.adapters = {f"policy-{TWO}"}
            return Say("one two three", break_after=2)

        await ask(patient)
        scripted_engine.otherwise = lambda request: (
            unload(request) if len(scripted_engine.requests) == 2 else Say(" three")
        )
        await ask(patient)
        end = 2 + len(scripted_engine.ids(" three")) + 1
        assert spans(patient.calls()[-1]) == [(ONE, 0, 2), (TWO, 2, end)]
        assert [len(patient.events(kind)) for kind in ("continued", "switched")] == [1, 1]

    async def test_of_the_base_model_the_session_goes_on_when_that_is_published(
        self, harness, scripted_engine
    ):
        publish(harness.run, ONE)
        await ask(harness)
        publish(harness.run, TWO, adapter=False)
        scripted_engine.adapters = set()
        scripted_engine.otherwise = lambda request: Say("one two three", weight_version=TWO)
        assert await ask(harness) == [TWO]

    async def test_the_current_policy_that_the_engine_does_not_have_is_a_fault(
        self, harness, scripted_engine
    ):
        publish(harness.run, ONE)
        scripted_engine.adapters = set()
        status, answer = await harness.ask(user())
        assert status == 502
        assert answer["error"]["message"].endswith("does not have the weights of this session")
        (fault,) = harness.events("fault")
        assert fault["detail"] == f"the engine at {scripted_engine.url} has no adapter policy-{ONE}"
        assert harness.events("switched") == []

    @pytest.mark.parametrize(
        "body", ['{"detail": "Not Found"}', '{"error": {"message": "No such route"}}', "Not found"]
    )
    async def test_another_404_is_no_lost_adapter(self, kept, scripted_engine, body):
        scripted_engine.replies.append(Answer(404, body))
        status, answer = await kept.ask(user())
        assert status == 502
        assert kept.events("switched") == []
        assert "needs vLLM 0.32 or newer with --enable-scale-out" in answer["error"]["message"]


class TestMemory:
    """The adapter of a session is in the session's rows: the recorder forgets it with the
    session."""

    async def test_a_session_goes_on_with_it_after_it_was_dropped_and_after_a_restart(
        self, kept, rendering, scripted_engine
    ):
        kept.endpoint.forget_idle(0)
        assert kept.endpoint.sessions == {}
        assert await ask(kept) == [ONE]
        async with recording(rendering, kept.run, scripted_engine.url) as other:
            assert await ask(other) == [ONE]
            assert await ask(other, session="s2") == [TWO]

    @pytest.mark.parametrize(
        ("recorded", "published"),
        [
            (
                "default",
                {"version": TWO, "model": f"policy-{TWO}"},
            ),  # sampled by the engine's own weights
            (ONE, {"version": TWO, "model": None}),  # checkpoints: there are no adapters
            ("ffffffff.1.0", {"version": TWO, "model": f"policy-{TWO}"}),  # another training's
            (
                ONE,
                {"version": TWO, "model": "mine"},
            ),  # a name that does not follow from the version
        ],
    )
    async def test_no_name_is_guessed_for_weights_that_are_no_adapter_of_this_training(
        self, harness, rendering, scripted_engine, recorded, published
    ):
        scripted_engine.otherwise = lambda request: Say("one two three", weight_version=recorded)
        await ask(harness)
        write_atomically(harness.run / POLICY_FILE, json.dumps(published))
        async with recording(rendering, harness.run, scripted_engine.url) as other:
            await ask(other)
        assert models(scripted_engine) == [None, published["model"]]
        assert harness.events("switched") == []


class TestPool:
    """Two engines, of which one was started again and has lost its adapters."""

    SESSIONS = tuple(f"x{number}" for number in range(32))
    """Each of the engines is the first choice of some of them, whatever their ports are."""

    @pytest.fixture
    def second(self, two):
        two.otherwise = lambda request: Say("one two three")
        return two

    @pytest.fixture
    async def pooled(self, harness, rendering, scripted_engine, second, monkeypatch):
        """Yield a harness of another endpoint of the same run, with both engines."""
        monkeypatch.setattr(pool, "FIRST_PAUSE_SECONDS", 0)
        async with recording(
            rendering, harness.run, scripted_engine.url, second.url, patience=600
        ) as client:
            yield client

    async def all(self, pooled):
        """Ask once in each session, and return the versions that sampled the replies."""
        return [
            version for session in self.SESSIONS for version in await ask(pooled, session=session)
        ]

    async def test_a_published_adapter_that_one_engine_lost_is_asked_of_the_other(
        self, pooled, scripted_engine, second
    ):
        publish(pooled.run, ONE)
        scripted_engine.adapters = set()
        assert await self.all(pooled) == [ONE] * len(self.SESSIONS)
        assert (scripted_engine.requests, len(second.requests)) == ([], len(self.SESSIONS))
        details = {event["detail"] for event in pooled.events("continued")}
        assert details == {f"the engine at {scripted_engine.url} has no adapter policy-{ONE}"}

    @pytest.mark.parametrize(
        "busy", [False, True], ids=["", "and is asked again if it failed otherwise"]
    )
    async def test_a_session_keeps_its_adapter_while_any_engine_has_it(
        self, pooled, scripted_engine, second, busy
    ):
        publish(pooled.run, ONE)
        await self.all(pooled)
        publish(pooled.run, TWO)
        scripted_engine.adapters = {f"policy-{TWO}"}
        if busy:
            second.replies += [Answer(500, "busy")]
            assert await ask(pooled) == [TWO]
        assert await self.all(pooled) == [ONE] * len(self.SESSIONS)
        assert pooled.events("switched") == []

    async def test_a_policy_that_no_engine_has_is_waited_for(self, pooled, scripted_engine, second):
        """Both were started again: the trainer loads its adapter when it publishes next."""
        publish(pooled.run, ONE)
        await ask(pooled)
        scripted_engine.adapters = second.adapters = set()
        asked = asyncio.create_task(ask(pooled))
        await until(lambda: len(pooled.events("continued")) >= 4)
        scripted_engine.adapters = {f"policy-{TWO}"}
        publish(pooled.run, TWO)
        assert await asked == [TWO]
        assert len(pooled.events("switched")) == 1
