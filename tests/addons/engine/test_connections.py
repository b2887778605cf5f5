import asyncio
from unittest import mock

import pytest

from rolltap.addons.engine.connections import Shared


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
