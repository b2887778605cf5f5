import asyncio
import gc
import threading

import pytest

from rolltap.addons.concurrency import LARGE_BYTES, Bucket, Workers


@pytest.fixture
async def workers():
    made = Workers()
    yield made
    made.close()


async def test_large_requests_do_not_keep_the_others_waiting(workers):
    free = threading.Event()
    large = [asyncio.create_task(workers.run(LARGE_BYTES, free.wait)) for _ in range(8)]
    assert await workers.run(1, lambda: "done") == "done"
    free.set()
    assert await asyncio.gather(*large) == [True] * 8


async def test_an_error_of_the_work_is_raised(workers):
    with pytest.raises(ZeroDivisionError):
        await workers.run(1, lambda: 1 / 0)


async def test_work_that_has_not_begun_is_dropped_with_its_caller(workers):
    free, ran = threading.Event(), []
    running = asyncio.create_task(workers.run(LARGE_BYTES, free.wait))
    waiting = asyncio.create_task(workers.run(LARGE_BYTES, ran.append, True))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    free.set()
    await running
    assert ran == []


async def test_a_cancelled_caller_waits_for_the_end_of_its_work_whose_error_is_not_logged(workers, caplog):
    begun, free, ended = threading.Event(), threading.Event(), []

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


def test_a_burst_is_free_and_what_goes_on_is_bounded_by_a_rate(monkeypatch):
    now = 100.0
    monkeypatch.setattr("rolltap.addons.concurrency.time.monotonic", lambda: now)
    bucket = Bucket(10, 2)
    assert [bucket.take() for _ in range(11)] == [True] * 10 + [False]
    now = 101.0
    assert [bucket.take(), bucket.take(2), bucket.take(), bucket.take()] == [True, False, True, False]
    now = 1000.0
    assert not bucket.take(11)
    assert bucket.take(10)
