"""Connections of a service, of which anybody may open some: those that ask for nothing are closed,
the oldest first."""

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_SECONDS = 30.0
"""Longest wait for the headers of a request, and for the rest of a body that nobody reads."""
MOST_WAITING = 1_000
"""Most connections without a request that runs."""


class Connection(H11Protocol):
    """A connection that waits for a request no longer than `HEADERS_SECONDS`.

    When too many wait, or when there are as many as uvicorn's `limit_concurrency`, a new one takes
    the place of the one that has waited longest. If none waits, uvicorn answers its request with
    503.
    """

    waiting: ClassVar[dict["Connection", None]] = {}
    """Connections without a request that runs, in the order in which they began to wait."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for a connection."""
        super().connection_made(transport)
        most = self.limit_concurrency
        is_full = most is not None and len(self.connections) >= most
        if self.waiting and (is_full or len(self.waiting) >= MOST_WAITING):
            oldest = next(iter(self.waiting))
            oldest._stop_waiting()
            oldest.transport.abort()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Note that a request begins."""
        before: Any = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Note that a request has ended."""
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        self._stop_waiting()
        self.waiting[self] = None
        self._timer = self.loop.call_later(HEADERS_SECONDS, self._end)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        is_read = self.transport.get_write_buffer_size() > 0  # its last answer, still
        if is_read:
            self._timer = self.loop.call_later(HEADERS_SECONDS, self._end)
        else:
            self.transport.abort()
