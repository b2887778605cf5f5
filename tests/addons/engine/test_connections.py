import asyncio

import pytest

from rolltap.addons.engine import connections
from rolltap.addons.engine.connections import Patience, Shared


class Question:
    """A question that is answered with the number of times it was asked, or with `error`."""

    def __init__(self):
        self.asked, self.answered, self.error = 0, asyncio.Event(), None

    async def __call__(self):
        self.asked += 1
        await self.answered.wait()
        if self.error is not None:
            raise self.error
        return self.asked


@pytest.fixture
async def question():
    return Question()


async def test_all_who_ask_at_once_get_the_answer_to_one_question(question):
    shared = Shared(question)
    asked = asyncio.gather(*(shared() for _ in range(5)))
    await asyncio.sleep(0)
    question.answered.set()
    assert await asked == [1] * 5
    assert await shared() == 2


async def test_all_who_ask_at_once_get_its_error_and_the_next_asks_again(question):
    shared, question.error = Shared(question), ValueError("no")
    question.answered.set()
    errors = await asyncio.gather(shared(), shared(), return_exceptions=True)
    assert [str(error) for error in errors] == ["no", "no"]
    question.error = None
    assert await shared() == 2


async def test_one_who_stops_asking_does_not_stop_the_others(question):
    shared = Shared(question)
    first, second = asyncio.create_task(shared()), asyncio.create_task(shared())
    await asyncio.sleep(0)
    first.cancel()
    question.answered.set()
    assert await second == 1


async def test_closing_ends_the_question(question):
    shared = Shared(question)
    asked = asyncio.create_task(shared())
    await asyncio.sleep(0)
    await shared.close()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await shared.close()


@pytest.fixture
async def pauses(monkeypatch):
    """Return the list of pauses. The clock goes on by them alone."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(connections.asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: sum(pauses))
    return pauses


class TestPatience:
    async def test_each_pause_is_twice_the_one_before_up_to_a_bound(self, pauses):
        patience = Patience(60.0)
        while await patience.wait():
            pass
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0]

    async def test_the_time_of_the_calls_between_the_pauses_counts(self, pauses):
        patience = Patience(60.0)
        assert await patience.wait()
        pauses.append(59.0)
        assert not await patience.wait()

    async def test_a_call_that_went_on_is_waited_for_anew(self, pauses):
        patience = Patience(1.0)
        assert await patience.wait()
        assert not await patience.wait()
        patience.reset()
        assert await patience.wait()

    async def test_without_patience_there_is_no_pause(self, pauses):
        assert not await Patience(0.0).wait()
        assert pauses == []
