"""The memory that bodies may take: of one session, and of all."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rolltap.addons.dialects.types import DialectError

_RETRY_SECONDS = 5


class Room:
    """Counts the bytes that sessions hold, at most `of_session` each and `of_all` together.

    A request waits `patience` seconds for room. Not thread-safe: use it in the event loop.
    """

    def __init__(self, of_session: int, of_all: int, patience: float) -> None:
        self.patience = patience
        self._of_session, self._of_all = of_session, of_all
        self._held: Counter[str] = Counter()
        """Session id -> bytes."""
        self._all = 0
        self._waiting: list[asyncio.Future[None]] = []

    @contextmanager
    def share(self, session_id: str) -> "Iterator[Share]":
        """Yield a share of the room for one request. What it holds is freed at the end."""
        share = Share(self, session_id)
        try:
            yield share
        finally:
            share.free(share.held)

    def fits(self, session_id: str, num_bytes: int) -> bool:
        """Return True when there is room for so many more bytes of a session."""
        return self._held[session_id] + num_bytes <= self._of_session and self._all + num_bytes <= self._of_all

    def is_full(self, session_id: str, num_bytes: int) -> bool:
        """Return True when a session itself holds too much for so many more bytes."""
        return self._held[session_id] + num_bytes > self._of_session

    def add(self, session_id: str, num_bytes: int) -> None:
        """Count so many more bytes of a session, or fewer if negative."""
        self._all += num_bytes
        self._held[session_id] += num_bytes
        if not self._held[session_id]:
            del self._held[session_id]
        if num_bytes < 0:
            waiting, self._waiting = self._waiting, []
            for freed in waiting:
                if not freed.done():
                    freed.set_result(None)

    async def freed(self) -> None:
        """Return when something was freed."""
        freed = asyncio.get_running_loop().create_future()
        self._waiting.append(freed)
        await freed


class Share:
    """The bytes that one request, or one connection, holds of a `Room`."""

    def __init__(self, room: Room, session_id: str) -> None:
        self._room, self._session_id = room, session_id
        self.held = 0

    async def take(self, num_bytes: int) -> None:
        """Hold so many more bytes, when there is room for them.

        Raises `DialectError` when there is none for a while: with status 429 when the session itself holds too much,
        which is no fault of ours, and 503 otherwise.
        """
        if self.try_take(num_bytes):
            return
        try:
            async with asyncio.timeout(self._room.patience):
                while not self.try_take(num_bytes):
                    await self._room.freed()
        except TimeoutError:
            raise DialectError(
                "Too many long requests are in progress. Try again later.",
                status=429 if self._room.is_full(self._session_id, num_bytes) else 503,
                code="overloaded",
                retry_after=_RETRY_SECONDS,
            ) from None

    def try_take(self, num_bytes: int) -> bool:
        """Hold so many more bytes, or return False when there is no room for them."""
        if not self.fits(num_bytes):
            return False
        self._add(num_bytes)
        return True

    def fits(self, num_bytes: int) -> bool:
        """Return True when there is room for so many more bytes."""
        return self._room.fits(self._session_id, num_bytes)

    def free(self, num_bytes: int) -> None:
        """Hold so many bytes less."""
        self._add(-num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.held += num_bytes
        self._room.add(self._session_id, num_bytes)
