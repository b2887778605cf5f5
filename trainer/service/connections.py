"""Connections of a service, of which anybody may open some: those that ask for nothing are closed, the oldest first."""

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_SECONDS = 30.0
"""Longest wait for the headers of a request, and for the rest of a body that nobody reads."""


class Connection(H11Protocol):
    """A connection that waits for a request no longer than `HEADERS_SECONDS`.

    With uvicorn's `limit_concurrency`, a new connection takes the place of the one that has waited longest. If none
    waits, uvicorn answers its request with 503.
    """

    waits_since: float | None = None
    """Time from which on no request runs; None while one does."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for a connection."""
        super().connection_made(transport)
        most = self.limit_concurrency
        if most is not None and len(self.connections) >= most:
            waiting = {each.waits_since: each for each in self._others() if each.waits_since is not None}
            if waiting:
                oldest = waiting[min(waiting)]
                oldest._stop_waiting()
                oldest.transport.abort()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
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

    def _others(self) -> list["Connection"]:
        return [each for each in self.connections if isinstance(each, Connection) and each is not self]

    def _wait(self) -> None:
        self._stop_waiting()
        self.waits_since = time.monotonic()
        self._timer = self.loop.call_later(HEADERS_SECONDS, self._end)

    def _stop_waiting(self) -> None:
        self.waits_since = None
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        if self.transport.get_write_buffer_size():
            self._timer = self.loop.call_later(HEADERS_SECONDS, self._end)  # its last answer is still read
        else:
            self.transport.abort()
