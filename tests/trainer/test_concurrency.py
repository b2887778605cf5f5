"""Blocking and async code, and values that are made once."""

import asyncio
import signal
import threading

import pytest

from rolltap.trainer.concurrency import Once, backoff, run_blocking, run_to_end


async def thread_name():
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_a_script_runs_it_in_its_own_thread():
    assert run_blocking(thread_name()) == threading.main_thread().name


async def test_inside_an_event_loop_it_runs_in_another_thread():
    assert run_blocking(thread_name()) != threading.current_thread().name


async def test_an_error_is_raised_to_the_caller():
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_blocking(fail())


async def test_an_error_after_a_cancellation_is_its_cause():
    started = asyncio.Event()
    may_end = threading.Event()
    loop = asyncio.get_running_loop()

    def fail():
        loop.call_soon_threadsafe(started.set)
        may_end.wait()
        raise ValueError("no")

    task = asyncio.create_task(run_to_end(fail))
    await started.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert str(cancelled.value.__cause__) == "no"


async def test_ctrl_c_cancels_it_and_waits_for_its_cleanup():
    cleaned = []

    async def wait():
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_blocking(wait())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert cleaned == [True]


async def ask_three_times(once, make):
    """Return what three who ask together get."""
    asking = [once.get("a", make) for _ in range(3)]
    return await asyncio.gather(*asking, return_exceptions=True)


async def test_those_who_ask_together_get_one_value_and_other_keys_do_not_wait():
    once = Once()
    made = []
    begun = asyncio.Event()
    blocked = asyncio.Event()

    async def make_slow():
        made.append("slow")
        begun.set()
        await blocked.wait()
        return "SLOW"

    async def make_quick():
        return "QUICK"

    slow = asyncio.create_task(ask_three_times(once, make_slow))
    await begun.wait()
    assert await once.get("b", make_quick) == "QUICK"
    blocked.set()
    assert await slow == ["SLOW"] * 3
    assert made == ["slow"]


def test_a_failure_is_not_kept_and_the_next_who_asks_may_be_in_another_event_loop():
    once = Once()
    answers = [OSError("full"), 7]

    async def make():
        await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    first = asyncio.run(ask_three_times(once, make))
    assert [str(answer) for answer in first] == ["full", "7", "7"]
    assert asyncio.run(ask_three_times(once, make)) == [7, 7, 7]


async def test_a_value_that_is_not_kept_is_that_of_all_who_wait_for_it():
    values = iter(range(10))
    once = Once(lambda value: value > 0)

    async def make():
        await asyncio.sleep(0)
        return next(values)

    assert await ask_three_times(once, make) == [0, 0, 0]
    assert len(once) == 0
    assert await ask_three_times(once, make) == [1, 1, 1]
    assert await once.get("a", make) == 1


async def test_those_who_wait_for_one_that_is_cancelled_make_the_value_themselves():
    once = Once()
    started = asyncio.Event()

    async def never():
        started.set()
        await asyncio.Event().wait()

    async def make():
        return 7

    first = asyncio.create_task(once.get("a", never))
    await started.wait()
    second = asyncio.create_task(once.get("a", make))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 7
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.parametrize(
    ("given", "pauses"),
    [((0, 1.0), [None]), ((3, 1.0), [1, 2, 4, None]), ((3, 2.0, 5.0), [2, 4, 5, None])],
)
def test_pauses_between_attempts_grow_up_to_the_longest_and_none_comes_after_the_last(
    given, pauses
):
    assert list(backoff(*given)) == pauses
