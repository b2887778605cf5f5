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


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_all_who_ask_at_once_get_the_answer_or_error_of_one_question_and_the_next_asks_again(question, error):
    shared, question.error = Shared(question), error
    asked = asyncio.gather(*(shared() for _ in range(5)), return_exceptions=True)
    await asyncio.sleep(0)
    question.answered.set()
    assert await asked == [error or 1] * 5
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
    @pytest.mark.parametrize(("seconds", "expected"), [(60.0, [0.5, 1, 2, 4, 8, 10, 10, 10, 10]), (0.0, [])])
    async def test_each_pause_is_twice_the_one_before_up_to_a_bound(self, pauses, seconds, expected):
        patience = Patience(seconds)
        while await patience.wait():
            pass
        assert pauses == expected

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
