"""Waiting for an engine: questions that are asked once for all who wait, and pauses between retries."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
"""Bounds in seconds of the pauses between the retries of a call. Each pause is twice the one before."""


class Shared(Generic[T]):
    """A question that is asked once at a time: all who ask meanwhile get the same answer or error."""

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
        if (running := self._running) is not None:
            running.cancel()
            await asyncio.wait([running])

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # asyncio logs errors that nobody has seen: the callers may be gone


class Patience:
    """The pauses of one call between its retries, until `seconds` have passed since its first failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Begin anew, because the call went on."""
        self._pause = FIRST_PAUSE_SECONDS
        self._failed_at: float | None = None

    async def wait(self) -> bool:
        """Pause. Returns False, without a pause, when the time would be used up at its end."""
        now = asyncio.get_running_loop().time()
        if self._failed_at is None:
            self._failed_at = now
        if now - self._failed_at + self._pause > self._seconds:
            return False
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True
