"""A retry of a call whose reply was lost does not sample again."""

import asyncio
import json

import pytest

from rolltap.addons.endpoint.generation import Generation
from rolltap.addons.store.tables import RunWriter
from tests.addons.endpoint.asking import told, values
from tests.addons.harness import RETRY, content, said, until, user
from tests.scripted_engine import Say

BODY = {"messages": [user()]}
STREAM = {**BODY, "stream": True}
OTHERS = [
    ({"messages": [user("Other")]}, "s1"),
    ({"model": "other"}, "s1"),
    ({"max_tokens": 5}, "s1"),
    ({"temperature": 0.5}, "s1"),
    ({"stop": "x"}, "s1"),
    ({}, "s2"),
]
"""Changes of a request and a session that make it another one."""


async def abandoned(harness):
    """Wait until the endpoint has noticed that the harness is gone."""
    session = harness.endpoint.sessions["s1"]
    await until(lambda: not session.generations[0].listeners)


async def hang_up_while_it_runs(harness, engine):
    async with harness.post(STREAM) as response:
        await response.content.readany()
        await asyncio.to_thread(engine.holding.wait)
        response.close()
    await abandoned(harness)


async def released(harness, engine, headers=None, stream=True):
    """Release the engine once another request has joined the call, and return that one's reply."""
    asked = asyncio.create_task(harness.send({**STREAM, "stream": stream}, headers=headers))
    await until(lambda: harness.events("joined"))
    engine.release()
    status, reply = await asked
    assert status == 200
    return reply


async def text(response):
    assert response.status == 200
    return content((await response.read()).decode())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_retry_joins_the_call_whose_harness_hung_up(harness, scripted_engine, stream):
    scripted_engine.replies.append(Say("one two three four", hold_after=2))
    await hang_up_while_it_runs(harness, scripted_engine)
    reply = await released(harness, scripted_engine, stream=stream)
    # from the beginning, not from where the first stream broke off
    assert (content(reply) if stream else said(json.loads(reply))) == "one two three four"
    assert ("[DONE]" in reply) == stream
    assert len(scripted_engine.requests) == 1
    (call,) = harness.calls()
    assert call["status"] == "completed"
    assert values(harness.events("joined"), "call_id") == [call["call_id"]]


@pytest.mark.parametrize(("changes", "session"), OTHERS, ids=str)
async def test_another_request_or_session_joins_no_call(harness, scripted_engine, changes, session):
    scripted_engine.replies.append(Say("one two three", hold_after=2))
    await hang_up_while_it_runs(harness, scripted_engine)
    _, events = await harness.send({**STREAM, **changes}, session=session, headers=RETRY)
    assert content(events) == "Hi."
    assert len(scripted_engine.requests) == 2
    assert harness.events("joined") == []


async def test_a_request_beside_a_call_that_has_a_listener_joins_it_only_if_it_is_marked(
    harness, scripted_engine
):
    """Else the same request at the same time is a second sample."""
    scripted_engine.replies += [Say("one two", hold_after=1), Say("three four")]
    async with harness.post(STREAM) as first:
        await asyncio.to_thread(scripted_engine.holding.wait)
        async with harness.post(STREAM, headers=RETRY) as joined:
            assert content((await harness.send(STREAM))[1]) == "three four"
            scripted_engine.release()
            assert await text(first) == await text(joined) == "one two"
    assert len(harness.calls()) == 2


async def test_a_running_call_is_kept_and_of_the_others_the_newest(harness, scripted_engine):
    scripted_engine.replies += [Say("one two", hold_after=1), *[Say("Hi.")] * 12, Say("New.")]
    async with harness.post(STREAM) as first:
        await asyncio.to_thread(scripted_engine.holding.wait)
        for number in range(12):
            await told(harness, user(str(number)))
        for number, again in ((11, "Hi."), (5, "Hi."), (0, "New.")):
            body = {"model": "m", "messages": [user(str(number))]}
            assert again in (await harness.send(body, headers=RETRY))[1]
        joined = await released(harness, scripted_engine, headers=RETRY)
        assert await text(first) == content(joined) == "one two"


async def test_a_reply_that_was_lost_between_the_commit_and_the_last_event_is_sent_again(
    harness, scripted_engine, monkeypatch
):
    committed = asyncio.Event()
    gone = asyncio.Event()
    finished = Generation.finished

    async def hold(self, timeout):
        done = await finished(self, timeout)
        if done and not gone.is_set():
            committed.set()
            await gone.wait()
        return done

    monkeypatch.setattr(Generation, "finished", hold)
    lost = asyncio.create_task(harness.ask(user()))
    await committed.wait()
    lost.cancel()
    await abandoned(harness)
    gone.set()
    assert await told(harness, user()) == "Hi."
    assert len(scripted_engine.requests) == 1
    (call,) = harness.calls()
    assert values(harness.events("replayed"), "call_id") == [call["call_id"]]


async def test_a_marked_retry_joins_its_own_call_and_not_that_of_an_equal_request(
    harness, scripted_engine
):
    scripted_engine.replies += [Say("one two", hold_after=1), Say("three four", hold_after=1)]
    lost = await harness.post(STREAM)
    await asyncio.to_thread(scripted_engine.holding.wait)
    async with harness.post(STREAM) as heard:
        lost.close()
        await abandoned(harness)
        again = await released(harness, scripted_engine, headers=RETRY)
        assert content(again) == "one two"
        assert await text(heard) == "three four"


async def test_a_retry_is_answered_though_its_event_cannot_be_written(harness, monkeypatch):
    await harness.send(BODY)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(RunWriter, "add_event", full)
    assert "Hi." in (await harness.send(BODY, headers=RETRY))[1]
