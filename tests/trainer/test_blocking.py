import asyncio
import signal
import threading

import pytest

from rolltap.trainer.concurrency import run_blocking, run_to_end


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
    started, may_end = asyncio.Event(), threading.Event()
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
