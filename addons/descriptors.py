"""Addon: keeps the process from running out of file descriptors."""

import logging
import os
import resource
from collections import Counter
from collections.abc import Callable

from mitmproxy import connection, http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from rolltap.addons.answers import refuse
from rolltap.addons.dialects.types import DialectError
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)

_PER_SERVER = 3
"""Descriptors of a proxy's connection to the endpoint: its two ends, and the connection to the engine."""
_BURST = 104
"""Descriptors that are kept free for connections: asyncio accepts 100 before the first one is looked at."""
_RESERVE = 128
"""Descriptors that calls keep free, for connections and for the files of the run."""


class Descriptors:
    """Raises the soft limit of descriptors to the hard one, and refuses what does not fit.

    A session whose connection has reached the endpoint goes on. A request of another connection gets 503 with
    `retry-after`. When only `_BURST` descriptors are left, new connections are closed at once. Each refusal
    is recorded.
    """

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record
        self._limit = 0
        self._base = 0
        self._clients: set[connection.Client] = set()
        self._servers: Counter[connection.Client] = Counter()
        """Connection of a client -> number of connections that were opened for it."""

    def load(self, _: object) -> None:
        """Raise the limit."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._limit = hard if hard != resource.RLIM_INFINITY else 1 << 30

    def running(self) -> None:
        """Log how many calls fit."""
        self._base = len(os.listdir("/dev/fd"))
        room = max(0, self._limit - self._base - _RESERVE) // (1 + _PER_SERVER)
        logger.info("room for %d sessions with a call at the same time: the limit is %d open files", room, self._limit)

    def client_connected(self, client: connection.Client) -> None:
        """Count a connection, or close it."""
        self._clients.add(client)
        if self._used() + _BURST > self._limit:
            client.error = "the recorder has no file descriptors left"
            self._record(Event(kind="refused", detail=f"{client.error}: raise the limit (ulimit -Hn)"))

    def client_disconnected(self, client: connection.Client) -> None:
        """Count a connection that was closed."""
        self._clients.discard(client)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Refuse a request that needs a connection for which no room is left."""
        if flow.response is not None or flow.error is not None or self._servers[flow.client_conn]:
            return
        if self._used() + _PER_SERVER + _RESERVE > self._limit:
            message = "The recorder has as many calls as it has file descriptors for. Try again later."
            self._record(refuse(flow, DialectError(message, status=503, code="overloaded"), retry_after=5))

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """Count a connection that is about to be opened."""
        self._servers[data.client] += 1

    def server_connect_error(self, data: ServerConnectionHookData) -> None:
        """Count a connection that was not opened."""
        self._closed(data.client)

    def server_disconnected(self, data: ServerConnectionHookData) -> None:
        """Count a connection that was closed."""
        self._closed(data.client)

    def _closed(self, client: connection.Client) -> None:
        self._servers[client] -= 1
        if self._servers[client] <= 0:
            del self._servers[client]

    def _used(self) -> int:
        return self._base + len(self._clients) + _PER_SERVER * self._servers.total()
