import asyncio
import gc
import threading
from unittest import mock

import pytest

from rolltap.addons.concurrency import LARGE_BYTES, Bucket, Shared, Workers


@pytest.fixture
async def workers():
    made = Workers()
    yield made
    made.close()


async def test_large_requests_do_not_keep_the_others_waiting(workers):
    free = threading.Event()
    large = [asyncio.create_task(workers.run(LARGE_BYTES, free.wait)) for _ in range(8)]
    assert await workers.run(1, str, "done") == "done"
    free.set()
    assert await asyncio.gather(*large) == [True] * 8


async def test_an_error_of_the_work_is_raised(workers):
    with pytest.raises(ZeroDivisionError):
        await workers.run(1, divmod, 1, 0)


async def test_work_that_has_not_begun_is_dropped_with_its_caller(workers):
    free = threading.Event()
    ran = []
    running = asyncio.create_task(workers.run(LARGE_BYTES, free.wait))
    waiting = asyncio.create_task(workers.run(LARGE_BYTES, ran.append, True))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    free.set()
    await running
    assert ran == []


async def test_a_cancelled_caller_waits_for_the_end_of_its_work_whose_error_is_not_logged(
    workers, caplog
):
    begun = threading.Event()
    free = threading.Event()
    ended = []

    def work():
        begun.set()
        free.wait()
        ended.append(True)
        raise ValueError("bad body")

    asked = asyncio.create_task(workers.run(1, work))
    await asyncio.to_thread(begun.wait)
    asked.cancel()
    await asyncio.sleep(0)
    assert not asked.done()
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert ended == [True]
    del asked
    gc.collect()
    assert caplog.records == []


def test_a_burst_is_free_and_what_goes_on_is_bounded_by_a_rate():
    with mock.patch("rolltap.addons.concurrency.time.monotonic") as now:
        now.return_value = 100.0
        bucket = Bucket(10, 2)
        assert [bucket.take() for _ in range(11)] == [True] * 10 + [False]
        now.return_value = 101.0
        assert bucket.take()
        assert not bucket.take(2)
        assert bucket.take()
        assert not bucket.take()
        now.return_value = 1000.0
        assert not bucket.take(11)
        assert bucket.take(10)


def question(*answers):
    """Return a function that gives one of the answers, or raises it, each time it is asked; and
    when it may."""
    answered = asyncio.Event()
    answer = mock.Mock(side_effect=answers)

    async def ask():
        await answered.wait()
        return answer()

    return Shared(ask), answered


@pytest.mark.parametrize("first", [1, ValueError("no")])
async def test_all_who_ask_at_once_get_the_answer_or_error_of_one_question_and_the_next_asks_again(
    first,
):
    shared, answered = question(first, 2)
    asked = asyncio.gather(*(shared() for _ in range(5)), return_exceptions=True)
    await asyncio.sleep(0)
    answered.set()
    assert await asked == [first] * 5
    assert await shared() == 2


async def test_one_who_stops_asking_does_not_stop_the_others():
    shared, answered = question(1)
    first = asyncio.create_task(shared())
    second = asyncio.create_task(shared())
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
