"""Reads the bodies of requests: bounded on the wire, in memory, in time, and decompressed with a bound."""

import asyncio
import io
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from aiohttp import web

from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint.decompress import decompress, too_large
from rolltap.addons.endpoint.room import Room, Share
from rolltap.addons.endpoint.work import finished_in

BODY_LIMIT = 32 * 1024 * 1024
"""Maximum bytes of a body, as it is sent and after decompression. The limit of Anthropic's Messages API."""
SESSION_ROOM, ROOM = 2 * BODY_LIMIT, 16 * BODY_LIMIT
"""Bytes of the bodies that are read or worked on at the same time: of one session, and of all."""
BODY_SECONDS = 120.0
"""Maximum time in which a body arrives."""
_PATIENCE = 30.0
"""Seconds that a request waits for room."""


class Bodies:
    """The bodies of all sessions. Create it inside the event loop that uses it.

    A session decompresses one body at a time, in threads that do nothing else.
    """

    def __init__(
        self,
        limit: int = BODY_LIMIT,
        session_room: int = SESSION_ROOM,
        room: int = ROOM,
        *,
        seconds: float = BODY_SECONDS,
        patience: float = _PATIENCE,
    ) -> None:
        self.room = Room(session_room, room, patience)
        self._limit, self._seconds = limit, seconds
        self._threads = ThreadPoolExecutor(2, "rolltap-decompress")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def read(self, request: web.Request, session_id: str) -> AsyncIterator[bytes]:
        """Yield the body of `request`, decompressed as its Content-Encoding says: zstd, gzip, deflate or br.

        Until the end of the context the body takes room. A request that finds none waits, and does not read on.

        Raises `DialectError` with status 413 when the body is longer than the limit, before or after decompression,
        400 when it cannot be decompressed, 408 when it takes too long to arrive, and as `Share.take` for no room.
        """
        with self.room.share(session_id) as share:
            body = await self._received(request, share)
            encoding = request.headers.get("content-encoding", "").strip().lower()
            if body and encoding not in ("", "identity"):
                # the lock lives as long as somebody uses it
                turn = self._turns.setdefault(session_id, asyncio.Lock())
                async with turn:
                    # what it becomes is not known yet
                    await share.take(self._limit)
                    body = await finished_in(self._threads, decompress, body, encoding, self._limit)
                    share.free(share.held - len(body))
            yield body

    def close(self) -> None:
        """Forget the bodies that wait for decompression."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _received(self, request: web.Request, share: Share) -> bytes:
        if (request.content_length or 0) > self._limit:
            raise too_large(self._limit)
        body = io.BytesIO()  # its value is not a copy
        try:
            async with asyncio.timeout(self._seconds):
                async for piece in request.content.iter_any():
                    if body.tell() + len(piece) > self._limit:
                        raise too_large(self._limit)
                    await share.take(len(piece))
                    body.write(piece)
        except TimeoutError:
            why = f"The request body did not arrive within {self._seconds:g} seconds."
            raise DialectError(why, status=408, code="request_timeout") from None
        return body.getvalue()
