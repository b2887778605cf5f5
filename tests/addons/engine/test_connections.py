import asyncio
from unittest import mock

import pytest

from rolltap.addons.engine import connections
from rolltap.addons.engine.connections import Patience, Shared


def question(*answers):
    """Return a function that gives one of the answers, or raises it, each time it is asked; and when it may."""
    answered, answer = asyncio.Event(), mock.Mock(side_effect=answers)

    async def ask():
        await answered.wait()
        return answer()

    return Shared(ask), answered


@pytest.mark.parametrize("first", [1, ValueError("no")])
async def test_all_who_ask_at_once_get_the_answer_or_error_of_one_question_and_the_next_asks_again(first):
    shared, answered = question(first, 2)
    asked = asyncio.gather(*(shared() for _ in range(5)), return_exceptions=True)
    await asyncio.sleep(0)
    answered.set()
    assert await asked == [first] * 5
    assert await shared() == 2


async def test_one_who_stops_asking_does_not_stop_the_others():
    shared, answered = question(1)
    first, second = asyncio.create_task(shared()), asyncio.create_task(shared())
    await asyncio.sleep(0)
    first.cancel()
    answered.set()
    assert await second == 1


async def test_closing_ends_the_question():
    shared, _ = question()
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

    async def test_the_time_between_the_pauses_counts_and_a_call_that_went_on_is_waited_for_anew(self, pauses):
        patience = Patience(60.0)
        assert await patience.wait()
        pauses.append(59.0)
        assert not await patience.wait()
        patience.reset()
        assert await patience.wait()
