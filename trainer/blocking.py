"""Calling async functions from a script, or from a notebook, whose thread runs an event loop already."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result.

    When an event loop runs in the calling thread, as in a notebook, the coroutine runs in a thread of its own and the
    caller's loop is blocked. KeyboardInterrupt cancels the coroutine; it is raised after the coroutine's cleanup.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def supervise() -> T:
        task = asyncio.ensure_future(coroutine)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1, "rolltap") as threads:
        result = threads.submit(asyncio.run, supervise())
        try:
            return result.result()
        except KeyboardInterrupt:
            loop, task = started.result()
            with suppress(RuntimeError):  # the loop is closed: the coroutine has just ended
                loop.call_soon_threadsafe(task.cancel)
            raise
