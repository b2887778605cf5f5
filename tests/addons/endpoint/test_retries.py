"""A retry of a call whose reply was lost does not sample again."""

import asyncio
import errno

import pytest

from rolltap.addons.endpoint import generation
from rolltap.trainer.doctor.scripted_engine import Say
from tests.addons.harness import content, user

RETRY = {"x-stainless-retry-count": "1"}
STREAM = {"messages": [user()], "stream": True}


async def abandoned(harness):
    """Wait until the endpoint has noticed that the harness is gone."""
    session = harness.endpoint.sessions["s1"]
    while any(call.listeners for call in session.generations):  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0)


async def hang_up_while_it_runs(harness, engine, body):
    async with harness.post(body) as response:
        await response.content.readany()
        await asyncio.to_thread(engine.holding.wait, 30)
        response.close()
    await abandoned(harness)


async def text(response):
    assert response.status == 200
    return (await response.read()).decode()


class TestJoin:
    async def test_a_retry_joins_the_call_whose_harness_hung_up(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("one two three four", hold_after=2))
        await hang_up_while_it_runs(harness, scripted_engine, STREAM)
        async with harness.post(STREAM) as response:
            scripted_engine.release()
            events = await text(response)
        # from the beginning, not from where the first stream broke off
        assert content(events) == "one two three four"
        assert "[DONE]" in events
        assert len(scripted_engine.requests) == 1
        (call,) = harness.calls()
        assert call["status"] == "completed"
        assert [event["call_id"] for event in harness.events("joined")] == [call["call_id"]]

    async def test_a_retry_may_ask_for_a_body_where_a_stream_was_lost(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("one two three four", hold_after=2))
        await hang_up_while_it_runs(harness, scripted_engine, STREAM)
        asked = asyncio.create_task(harness.ask(user(), model=None))
        scripted_engine.release()
        status, reply = await asked
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "one two three four")
        assert len(harness.calls()) == 1

    async def test_a_request_with_a_retry_header_joins_a_call_that_has_a_listener(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("one two", hold_after=1))
        async with harness.post(STREAM) as first:
            await asyncio.to_thread(scripted_engine.holding.wait, 30)
            async with harness.post(STREAM, headers=RETRY) as second:
                scripted_engine.release()
                assert content(await text(first)) == content(await text(second)) == "one two"
        assert len(harness.calls()) == 1

    @pytest.mark.parametrize(
        "changes", [{"messages": [user("Other")]}, {"model": "other"}, {"max_tokens": 5}, {"temperature": 0.5}]
    )
    async def test_another_request_is_not_a_retry(self, harness, scripted_engine, changes):
        scripted_engine.replies += [Say("one two three", hold_after=2), Say("Hi.")]
        await hang_up_while_it_runs(harness, scripted_engine, STREAM)
        async with harness.post({**STREAM, **changes}, headers=RETRY) as response:
            assert "[DONE]" in await text(response)
        assert len(scripted_engine.requests) == 2
        assert harness.events("joined") == []

    async def test_a_request_of_another_session_joins_no_call(self, harness, scripted_engine):
        scripted_engine.replies += [Say("one two three", hold_after=2), Say("Hi.")]
        await hang_up_while_it_runs(harness, scripted_engine, STREAM)
        async with harness.post(STREAM, session="s2", headers=RETRY) as response:
            assert content(await text(response)) == "Hi."

    async def test_the_same_request_at_the_same_time_is_a_second_sample(self, harness, scripted_engine):
        scripted_engine.replies += [Say("one two", hold_after=1), Say("three four")]
        async with harness.post(STREAM) as first:
            await asyncio.to_thread(scripted_engine.holding.wait, 30)
            async with harness.post(STREAM) as second:
                assert content(await text(second)) == "three four"
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
            async with harness.post({"model": "m", "messages": [user(str(number))]}, headers=RETRY) as response:
                assert again in await text(response)
        async with harness.post(STREAM, headers=RETRY) as joined:
            scripted_engine.release()
            assert content(await text(first)) == content(await text(joined)) == "one two"


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
        scripted_engine.replies.append(Say("Hi."))
        lost = asyncio.create_task(harness.ask(user()))
        await committed.wait()
        lost.cancel()
        await asyncio.wait({lost})
        await abandoned(harness)
        gone.set()
        status, reply = await harness.ask(user())
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hi.")
        assert len(scripted_engine.requests) == 1
        (call,) = harness.calls()
        assert [event["call_id"] for event in harness.events("replayed")] == [call["call_id"]]

    async def test_a_request_with_a_retry_header_gets_the_same_reply_again(self, harness, scripted_engine):
        scripted_engine.replies.append(Say("Hi."))
        replies = []
        for headers in ({}, RETRY):
            async with harness.post({"messages": [user()]}, headers=headers) as response:
                replies.append(await response.json())
        assert replies[0]["choices"] == replies[1]["choices"]
        assert replies[0]["id"] == replies[1]["id"]
        assert len(harness.calls()) == 1

    async def test_an_equal_request_after_a_delivered_reply_is_a_second_sample(self, harness, scripted_engine):
        scripted_engine.replies += [Say("Hi."), Say("Ho.")]
        await harness.ask(user())
        _, reply = await harness.ask(user())
        assert reply["choices"][0]["message"]["content"] == "Ho."
        assert len(harness.calls()) == 2

    async def test_a_call_that_failed_is_not_repeated(self, harness, scripted_engine):
        scripted_engine.replies += [Say("one two", break_after=1), Say("Hi.")]
        assert (await harness.ask(user()))[0] == 503
        async with harness.post({"messages": [user()]}, headers=RETRY) as response:
            assert "Hi." in await text(response)
        assert [call["status"] for call in harness.calls()] == ["failed", "completed"]


async def test_a_marked_retry_joins_its_own_call_and_not_that_of_an_equal_request(harness, scripted_engine):
    scripted_engine.replies += [Say("one two", hold_after=1), Say("three four", hold_after=1)]
    lost = await harness.post(STREAM)
    await asyncio.to_thread(scripted_engine.holding.wait, 30)
    async with harness.post(STREAM) as heard:
        lost.close()
        session = harness.endpoint.sessions["s1"]
        while session.generations[0].listeners:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        async with harness.post(STREAM, headers=RETRY) as again:
            scripted_engine.release()
            assert content(await text(again)) == "one two"
        assert content(await text(heard)) == "three four"


async def test_a_retry_is_answered_though_its_event_cannot_be_written(harness, scripted_engine, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    scripted_engine.replies.append(Say("Hi."))
    await harness.ask(user(), model=None)
    monkeypatch.setattr(harness.endpoint.writer, "add_event", fail)
    async with harness.post({"messages": [user()]}, headers=RETRY) as response:
        assert "Hi." in await text(response)


async def test_retries_without_end_are_counted(harness, scripted_engine):
    scripted_engine.replies.append(Say("Hi."))
    await harness.ask(user(), model=None)
    for _ in range(100):
        async with harness.post({"messages": [user()]}, headers=RETRY) as response:
            await text(response)
    await harness.end()
    assert [event["detail"] for event in harness.events("replayed")] == [""] * 64 + ["100 replayed in all, the last: "]
