"""Calling async functions from a script, or from a notebook, whose thread runs an event loop already."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result.

    When an event loop runs in the calling thread, as in a notebook, the coroutine runs in a thread of its own and the
    caller's loop is blocked. KeyboardInterrupt cancels the coroutine, and is raised after the coroutine's cleanup.
    """
    if not _loop_runs_here():
        return asyncio.run(coroutine)
    begin: Future[bool] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()
    done: Future[T] = Future()

    async def supervise() -> T:
        task = asyncio.ensure_future(coroutine)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def work() -> None:
        if begin.result():
            try:
                done.set_result(asyncio.run(supervise()))
            except BaseException as error:
                done.set_exception(error)

    try:
        threading.Thread(target=work, name="rolltap").start()
        begin.set_result(True)
        return done.result()
    except KeyboardInterrupt:
        if not begin.done():
            begin.set_result(False)
            coroutine.close()
            raise
        loop, task = started.result()
        with suppress(RuntimeError):  # the loop is closed: the coroutine has just ended
            loop.call_soon_threadsafe(task.cancel)
        wait([done])
        raise


async def run_to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in a thread and wait for its end, even when the caller is cancelled meanwhile.

    A thread cannot be cancelled. CancelledError is raised after the function has returned; an error of the function is
    its cause then.
    """
    task = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    if await wait_for_end(task):
        raise asyncio.CancelledError from task.exception()
    return task.result()


async def wait_for_end(task: asyncio.Task[Any]) -> bool:
    """Wait for the end of a task, even when the caller is cancelled. Return True if it was."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
