"""Work of the sessions off the event loop (decoding, rendering and tokenising), pauses between
retries, and rates."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""Requests of fewer bytes are worked on in the event loop. With a known prefix they take some
milliseconds. In a thread they would take twice the CPU time: the loop and the thread interrupt each
other."""
LARGE_BYTES = 1024 * 1024
"""Requests of at least so many bytes share one thread, so that they do not keep the others
waiting."""


async def finished_in(pool: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
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
        del (
            job,
            end,
        )  # their error refers to this frame: the cycle would keep what the function held


class Workers:
    """Threads for the work of the sessions. Create it inside the event loop that uses it."""

    def __init__(self) -> None:
        self._usual = ThreadPoolExecutor(4, "rolltap-work")
        self._large = ThreadPoolExecutor(1, "rolltap-large")

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` as `finished_in` does, or in the caller's thread if the request has few
        bytes."""
        if num_bytes < INLINE_BYTES:
            return function(*args, **kwargs)
        pool = self._large if num_bytes >= LARGE_BYTES else self._usual
        return await finished_in(pool, function, *args, **kwargs)

    def close(self) -> None:
        """Forget the work that has not begun. Does not wait for the work that has."""
        for pool in (self._usual, self._large):
            pool.shutdown(wait=False, cancel_futures=True)


def backoff(retries: int | None, first: float, longest: float = math.inf) -> Iterator[float | None]:
    """Yield the pause in seconds after each attempt of a loop, and None after the last one. None as
    `retries`: no end.

    The first pause is `first`; each one after it is twice as long, and none is over `longest`.
    """
    pause = first
    for _ in count() if retries is None else range(retries):
        yield min(pause, longest)
        pause *= 2.0
    yield None


class Bucket:
    """Holds at most `size` units, and gains `per_second` of them each second."""

    def __init__(self, size: float, per_second: float) -> None:
        self._size, self._per_second = size, per_second
        self._left, self._at = size, time.monotonic()

    def take(self, units: float = 1) -> bool:
        """Take so many units, and return True; return False and take nothing if there are fewer."""
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < units:
            return False
        self._left -= units
        return True
