"""A retry of a call whose reply was lost does not sample again."""

import asyncio
import json
from unittest import mock

import pytest

from rolltap.addons.endpoint import generation
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
    await until(lambda: not any(call.listeners for call in session.generations))


async def hang_up_while_it_runs(harness, engine, body):
    async with harness.post(body) as response:
        await response.content.readany()
        await asyncio.to_thread(engine.holding.wait, 30)
        response.close()
    await abandoned(harness)


async def released(harness, engine, headers=None, stream=True):
    """Release the engine and return the status and the text of the reply to another request."""
    asked = asyncio.create_task(harness.send({**STREAM, "stream": stream}, headers=headers))
    await until(lambda: harness.events("joined"))
    engine.release()
    return await asked


async def text(response):
    assert response.status == 200
    return (await response.read()).decode()


class TestJoin:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_retry_joins_the_call_whose_harness_hung_up(
        self, harness, scripted_engine, stream
    ):
        scripted_engine.replies.append(Say("one two three four", hold_after=2))
        await hang_up_while_it_runs(harness, scripted_engine, STREAM)
        status, reply = await released(harness, scripted_engine, stream=stream)
        # from the beginning, not from where the first stream broke off
        assert (status, content(reply) if stream else said(json.loads(reply))) == (
            200,
            "one two three four",
        )
        assert ("[DONE]" in reply) == stream
        assert len(scripted_engine.requests) == 1
        (call,) = harness.calls()
        assert call["status"] == "completed"
        assert [event["call_id"] for event in harness.events("joined")] == [call["call_id"]]

    async def test_a_request_with_a_retry_header_joins_a_call_that_has_a_listener(
        self, harness, scripted_engine
    ):
        scripted_engine.replies.append(Say("one two", hold_after=1))
        async with harness.post(STREAM) as first:
            await asyncio.to_thread(scripted_engine.holding.wait, 30)
            async with harness.post(STREAM, headers=RETRY) as second:
                scripted_engine.release()
                assert content(await text(first)) == content(await text(second)) == "one two"
        assert len(harness.calls()) == 1

    @pytest.mark.parametrize(("changes", "session"), OTHERS, ids=str)
    async def test_another_request_or_session_joins_no_call(
        self, harness, scripted_engine, changes, session
    ):
        scripted_engine.replies.append(Say("one two three", hold_after=2))
        await hang_up_while_it_runs(harness, scripted_engine, STREAM)
        _, events = await harness.send({**STREAM, **changes}, session=session, headers=RETRY)
        assert content(events) == "Hi."
        assert len(scripted_engine.requests) == 2
        assert harness.events("joined") == []

    async def test_the_same_request_at_the_same_time_is_a_second_sample(
        self, harness, scripted_engine
    ):
        scripted_engine.replies += [Say("one two", hold_after=1), Say("three four")]
        async with harness.post(STREAM) as first:
            await asyncio.to_thread(scripted_engine.holding.wait, 30)
            assert content((await harness.send(STREAM))[1]) == "three four"
            scripted_engine.release()
            assert content(await text(first)) == "one two"
        assert len(harness.calls()) == 2


async def test_a_running_call_is_kept_and_of_the_others_the_newest(harness, scripted_engine):
    scripted_engine.replies += [Say("one two", hold_after=1), *[Say("Hi.")] * 12, Say("New.")]
    async with harness.post(STREAM) as first:
        await asyncio.to_thread(scripted_engine.holding.wait, 30)
        for number in range(12):
            await harness.ask(user(str(number)))
        for number, again in ((11, "Hi."), (5, "Hi."), (0, "New.")):
            _, reply = await harness.send(
                {"model": "m", "messages": [user(str(number))]}, headers=RETRY
            )
            assert again in reply
        _, joined = await released(harness, scripted_engine, headers=RETRY)
        assert content(await text(first)) == content(joined) == "one two"


class TestReplay:
    async def test_a_reply_that_was_lost_is_sent_again(self, harness, scripted_engine, monkeypatch):
        """The harness hangs up between the commit and the last event."""
        committed, gone = asyncio.Event(), asyncio.Event()
        advance = generation.Generation.finished

        async def hold(self, timeout):
            done = await advance(self, timeout)
            if done and not gone.is_set():
                committed.set()
                await gone.wait()
            return done

        monkeypatch.setattr(generation.Generation, "finished", hold)
        lost = asyncio.create_task(harness.ask(user()))
        await committed.wait()
        lost.cancel()
        await asyncio.wait({lost})
        await abandoned(harness)
        gone.set()
        status, reply = await harness.ask(user())
        assert (status, said(reply)) == (200, "Hi.")
        assert len(scripted_engine.requests) == 1
        (call,) = harness.calls()
        assert [event["call_id"] for event in harness.events("replayed")] == [call["call_id"]]


async def test_a_marked_retry_joins_its_own_call_and_not_that_of_an_equal_request(
    harness, scripted_engine
):
    scripted_engine.replies += [Say("one two", hold_after=1), Say("three four", hold_after=1)]
    lost = await harness.post(STREAM)
    await asyncio.to_thread(scripted_engine.holding.wait, 30)
    async with harness.post(STREAM) as heard:
        lost.close()
        session = harness.endpoint.sessions["s1"]
        await until(lambda: not session.generations[0].listeners)
        _, again = await released(harness, scripted_engine, headers=RETRY)
        assert content(again) == "one two"
        assert content(await text(heard)) == "three four"


async def test_a_retry_is_answered_though_its_event_cannot_be_written(harness, monkeypatch):
    await harness.send(BODY)
    full = mock.Mock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr(harness.endpoint.writer, "add_event", full)
    assert "Hi." in (await harness.send(BODY, headers=RETRY))[1]


async def test_retries_without_end_are_counted(harness):
    for _ in range(101):
        assert (await harness.send(BODY, headers=RETRY))[0] == 200
    await harness.end()
    assert [event["detail"] for event in harness.events("replayed")] == [""] * 64 + [
        "100 replayed in all, the last: "
    ]
