"""Work of the sessions off the event loop (decoding, rendering and tokenising), questions that many
ask at once, and rates."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES = 1024 * 1024
"""Requests of at least so many bytes share one thread, so that they do not keep the others
waiting."""


async def finished_in(
    pool: ThreadPoolExecutor,
    function: Callable[P, T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call `function` in a thread of `pool`, and return its result.

    A thread cannot be cancelled. When the caller is cancelled, CancelledError is raised after the
    function has returned: until then what the caller holds for it must be held.
    """
    job = pool.submit(function, *args, **kwargs)
    end = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(end)
    except asyncio.CancelledError:
        while not job.cancel() and not end.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([end])
        if end.done() and not end.cancelled():
            end.exception()  # asyncio logs errors that nobody has seen
        raise
    finally:
        # their error refers to this frame: the cycle would keep what the function held
        del job, end


class Workers:
    """Threads for the work of the sessions. Create it inside the event loop that uses it."""

    def __init__(self) -> None:
        self._usual = ThreadPoolExecutor(4, "rolltap-work")
        self._large = ThreadPoolExecutor(1, "rolltap-large")

    async def run(
        self,
        num_bytes: int,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `function` for a request of so many bytes, as `finished_in` does."""
        pool = self._large if num_bytes >= LARGE_BYTES else self._usual
        return await finished_in(pool, function, *args, **kwargs)

    def close(self) -> None:
        """Forget the work that has not begun. Does not wait for the work that has."""
        for pool in (self._usual, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


class Shared(Generic[T]):
    """A question that is asked once at a time: all who ask meanwhile get one answer or error."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._running: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """Return the answer. Cancelling one caller does not cancel the question."""
        if self._running is None:
            self._running = asyncio.create_task(self._ask())
            self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """Cancel the question that is being asked."""
        running = self._running
        if running is not None:
            running.cancel()
            await asyncio.wait([running])

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # asyncio logs errors that nobody has seen: the callers may be gone


class Bucket:
    """Holds at most `size` units, and gains `per_second` of them each second."""

    def __init__(self, size: float, per_second: float) -> None:
        self._size = size
        self._per_second = per_second
        self._left = size
        self._at = time.monotonic()

    def take(self, units: float = 1) -> bool:
        """Take so many units, and return True; return False and take nothing if there are fewer."""
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < units:
            return False
        self._left -= units
        return True
