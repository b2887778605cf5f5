import asyncio
import logging

import pytest

from rolltap.addons.engine import client
from rolltap.addons.engine import pool as module
from rolltap.addons.engine.client import GENERATE
from rolltap.addons.engine.pool import EnginePool, Patience
from rolltap.addons.errors import EngineError
from tests.addons.endpoint.asking import refused, told, values
from tests.addons.harness import said, until, user
from tests.scripted_engine import Answer, Say

DOWN = EngineError("it is down", retryable=True)
NOBODY = "http://127.0.0.1:9"
URLS = [f"http://10.0.0.{n}:8000" for n in range(1, 5)]
SESSIONS = [f"s{n}" for n in range(400)]
UNHEALTHY = Answer(500, "")


@pytest.fixture
async def engines():
    engines = EnginePool(URLS)
    yield engines
    await engines.close()


def homes(engines):
    return {session: engines.of(session).url for session in SESSIONS}


async def test_a_session_stays_with_one_engine_and_every_engine_has_sessions(engines):
    before = homes(engines)
    assert homes(engines) == before
    for url in URLS:
        assert 60 < list(before.values()).count(url) < 140


@pytest.fixture
def quick(monkeypatch):
    """Retry without a pause, and soon ask an engine that says nothing for its health."""
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.1)


@pytest.fixture
def impatient(quick, monkeypatch):
    """Do as `quick`, and do not wait long for the answer of an engine that is deaf. One that is
    well has this time too."""
    monkeypatch.setattr(client, "HEALTH_SECONDS", 2.0)


async def statuses(harness, sessions=32):
    """Return the statuses of one call of each session. Each of two engines is the first choice of
    some of them."""
    body = {"model": "m", "messages": [user()]}
    asked = [harness.send(body, session=f"s{number}") for number in range(sessions)]
    return {status for status, _ in await asyncio.gather(*asked)}


def in_order(harness, one, two):
    """Return the engine of session s1 and the other one."""
    if harness.endpoint.engines.of("s1").url == one.url:
        return one, two
    return two, one


def states(caplog):
    """Return the first words of each line that the pool has logged."""
    lines = [each.message for each in caplog.records if each.name == module.__name__]
    return [line.partition(":")[0] for line in lines]


async def test_only_the_sessions_of_an_engine_that_failed_move_until_all_failed(engines):
    before = homes(engines)
    failed = engines.of("s0")
    assert engines.failed(failed, DOWN)
    moved = homes(engines)
    for session, url in before.items():
        assert moved[session] != failed.url
        assert moved[session] == url or url == failed.url
    one, two, three = engines.up()
    assert engines.failed(one, DOWN)
    assert engines.failed(two, DOWN)
    assert not engines.failed(three, DOWN)
    assert homes(engines) == before


async def test_the_sessions_of_an_engine_come_back_when_it_is_healthy_again(
    one, two, caplog, monkeypatch
):
    monkeypatch.setattr(module, "DOWN_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    engines = EnginePool([one.url, two.url])
    before = homes(engines)
    one.answers["/health"] = UNHEALTHY
    (first,) = [engine for engine in engines.up() if engine.url == one.url]
    for _ in range(3):
        engines.failed(first, DOWN)
    await until(lambda: "/health" in one.asked)
    assert set(homes(engines).values()) == {two.url}
    one.answers.clear()
    await until(lambda: homes(engines) == before)
    await engines.close()
    assert states(caplog) == ["engine down", "engine back"]
    assert "in which 3 requests failed" in caplog.text


async def test_a_request_that_engines_answer_with_an_error_takes_none_from_the_others(
    one, two, recorded
):
    async with recorded(one.url, two.url) as harness:
        for engine in (one, two):
            engine.replies.append(Answer(500, "a grammar that breaks"))
        assert (await refused(harness, user()))[0] == 502
        assert len(one.requests) == len(two.requests) == 1
        assert len(harness.endpoint.engines.up()) == 2
        assert await statuses(harness) == {200}


class TestFirstContact:
    async def test_engines_that_nobody_runs_or_that_accept_and_say_nothing_are_replaced(
        self, one, two, recorded, impatient
    ):
        one.deaf = True
        async with recorded(NOBODY, one.url, two.url) as harness:
            assert await statuses(harness) == {200}
        assert one.requests == []

    async def test_the_only_engine_is_waited_for(self, one, recorded, quick, caplog):
        one.answers["/v1/models"] = one.answers["/health"] = UNHEALTHY
        async with recorded(one.url, patience=600) as harness:
            asked = asyncio.create_task(statuses(harness))
            await until(lambda: one.asked.count("/v1/models") > 1)
            one.answers.clear()
            assert await asked == {200}
        assert states(caplog) == ["engine down"]

    async def test_many_sessions_ask_once(self, one, recorded):
        async with recorded(one.url) as harness:
            assert await statuses(harness) == {200}
        assert one.asked.count("/v1/models") == 1


async def test_without_patience_calls_fail_and_the_engine_is_one_line_however_many_there_are(
    recorded, caplog
):
    async with recorded(NOBODY) as harness:
        assert await statuses(harness, sessions=30) == {503}
    assert states(caplog) == ["engine down"]


async def test_a_call_whose_engine_dies_goes_on_at_another_one(one, two, recorded, monkeypatch):
    """The call does not wait for the engine that died."""
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 1000.0)
    async with recorded(one.url, two.url) as harness:
        first, second = in_order(harness, one, two)
        first.replies += [Say("one two three", break_after=2), Answer(500, "down")]
        second.replies.append(Say(" three"))
        await told(harness, user())
        await told(harness, user("Again"))
    begun = first.requests[0]["token_ids"]
    assert second.requests[0]["token_ids"][: len(begun)] == begun
    calls = harness.calls()
    assert values(calls, "engine") == [second.url] * 2
    assert calls[0]["finish_reason"] == "stop"
    assert calls[0]["violation"] is None


async def test_a_call_whose_engine_falls_silent_goes_on_at_another_one(one, two, recorded, quick):
    async with recorded(one.url, two.url) as harness:
        first, second = in_order(harness, one, two)
        second.replies.append(Say(" three"))
        asked = await harness.held(first, Say("one two three", hold_after=2))
        first.answers["/health"] = UNHEALTHY
        status, reply = await asked
        await asyncio.to_thread(first.disconnected.wait)
    assert status == 200
    assert reply["choices"][0]["finish_reason"] == "stop"
    sampled = first.ids("one two three")[:2]
    assert second.requests[0]["token_ids"] == first.requests[0]["token_ids"] + sampled
    (event,) = harness.events("continued")
    assert "neither a token nor an answer to /health" in event["detail"]


async def test_a_silent_generation_of_an_engine_that_is_healthy_is_waited_for(one, recorded, quick):
    """vLLM 0.32 is paused during a weight update."""
    async with recorded(one.url) as harness:
        asked = await harness.held(one, Say("one two three", hold_after=0))
        await until(lambda: one.asked.count("/health") > 2)
        one.release()
        _, reply = await asked
    assert said(reply) == "one two three"
    assert len(one.requests) == 1


class TestPaused:
    """vLLM 0.33 refuses requests while it is paused for a weight update."""

    @pytest.fixture(autouse=True)
    def often(self, monkeypatch):
        monkeypatch.setattr(client, "PAUSED_SECONDS", 0.05)

    async def test_a_call_waits_longer_than_any_patience_and_is_no_failure(
        self, one, two, recorded
    ):
        async with recorded(one.url, two.url) as harness:
            paused, other = in_order(harness, one, two)
            paused.paused = True
            asked = asyncio.create_task(told(harness, user()))
            await until(lambda: paused.asked.count("/is_paused") > 2)
            paused.paused = False
            assert await asked == "Hi."
        assert len(paused.requests) == 1
        assert other.requests == []
        (call,) = harness.calls()
        assert call["status"] == "completed"
        assert call["violation"] is None
        assert harness.events("continued") == harness.events("fault") == []

    async def test_calls_that_wait_ask_once_for_all(self, one, recorded):
        one.paused = True
        async with recorded(one.url) as harness:
            asked = asyncio.create_task(statuses(harness))
            await until(lambda: one.asked.count(GENERATE) >= 32)
            before = one.asked.count("/is_paused")
            await until(lambda: one.asked.count("/is_paused") > before + 2)
            assert one.asked.count(GENERATE) == 32
            one.paused = False
            assert await asked == {200}

    async def test_a_reply_that_broke_off_goes_on_after_the_pause_with_its_next_token(
        self, one, recorded, quick
    ):
        def break_off(request):
            one.paused = True
            return Say("one two three", break_after=2)

        one.otherwise = break_off
        async with recorded(one.url, patience=600) as harness:
            asked = asyncio.create_task(told(harness, user()))
            await until(lambda: "/is_paused" in one.asked)
            one.otherwise = lambda request: Say("wo three")
            one.paused = False
            assert await asked == "one two three"
        assert len(harness.events("continued")) == 1

    async def test_when_the_engine_ends_meanwhile_another_one_goes_on(
        self, one, two, recorded, impatient
    ):
        async with recorded(one.url, two.url) as harness:
            paused, other = in_order(harness, one, two)
            paused.paused = True
            asked = asyncio.create_task(told(harness, user()))
            await until(lambda: "/is_paused" in paused.asked)
            paused.deaf = True
            await asked
        assert paused.requests == []
        assert len(other.requests) == 1


class TestPatience:
    @pytest.fixture
    async def pauses(self, monkeypatch):
        """Return the list of pauses. The clock goes on by them alone."""
        pauses = []

        async def sleep(seconds):
            pauses.append(seconds)

        monkeypatch.setattr(module.asyncio, "sleep", sleep)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: sum(pauses))
        return pauses

    async def test_each_pause_is_twice_the_one_before_up_to_a_bound(self, pauses):
        assert not await Patience(0.0).wait()
        patience = Patience(60.0)
        while await patience.wait():
            pass
        assert pauses == [0.5, 1, 2, 4, 8, 10, 10, 10, 10]

    async def test_the_time_between_the_pauses_counts_and_a_call_that_went_on_is_waited_for_anew(
        self, pauses
    ):
        patience = Patience(60.0)
        assert await patience.wait()
        pauses.append(59.0)
        assert not await patience.wait()
        patience.reset()
        assert await patience.wait()
