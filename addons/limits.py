"""Addon: divides the process's file descriptors between sessions."""

import asyncio
import logging
import math
import os
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

from mitmproxy import connection, http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from rolltap.addons.capture import ends_session, refuse
from rolltap.addons.dialects.model_call import DialectError
from rolltap.addons.sessions import SESSION
from rolltap.addons.store.records import Event
from rolltap.addons.wire.protocol import close_client

logger = logging.getLogger(__name__)

FIRST_REQUEST_SECONDS = 30.0
"""Seconds that a connection has until its first request with credentials."""
_PER_SERVER = 3
"""Descriptors of a proxy's connection to the endpoint: its two ends, and the connection to the engine."""
_BURST = 124
"""Descriptors that are kept free for connections: asyncio accepts 100 of the proxy's, and the endpoint 20, before the
first one is looked at."""
_RESERVE = 148
"""Descriptors that calls keep free, for connections and for the files of the run."""


class _Phase(IntEnum):
    """Phase of a connection, in the order in which those of a session are closed to make room."""

    SILENT = 0
    """No request with credentials came."""
    IDLE = 1
    SENDING = 2
    """Its request is not complete."""
    WAITING = 3
    """Its request is complete, and has no complete reply."""


@dataclass(slots=True)
class _State:
    deadline: asyncio.TimerHandle
    """Closes the connection. Cancelled by the first request with credentials."""
    session: str | None = None
    """Session of the newest credentials."""
    phase: _Phase = _Phase.SILENT
    servers: int = 0
    """Number of connections that were opened for it."""
    admitted: bool = False
    """Its request may open a connection to the endpoint, and has not yet."""

    @property
    def descriptors(self) -> int:
        return 1 + _PER_SERVER * (self.servers + self.admitted)

    def begin(self, session: str | None, phase: _Phase) -> None:
        self.session, self.phase = session, phase
        self.deadline.cancel()


class Descriptors:
    """Raises the soft limit of descriptors to the hard one, and divides them between sessions.

    When there is no room, connections without a running request are closed: those of the session that holds most, among
    which those without credentials count as one. A new connection takes the place of one whose request is not complete,
    too. A request that needs a connection to the endpoint takes the place of one of a session that holds more than its
    own would: an incomplete request, else the newest. Without such a session it gets 429 if its session holds other
    connections, and 503 if it holds none, both with `retry-after`: no session can cause a 503 of its own, which is a
    fault of the machine. The request that ends a session is served in any case, in the place of what the session holds.
    Without room for a new connection it is closed. Each of these is recorded. Must come after `Sessions`.
    """

    def __init__(
        self, record: Callable[[Event], None], close: Callable[[connection.Client], None] = close_client
    ) -> None:
        self._record = record
        self._close = close
        self._limit = 0
        self._base = 0
        self._clients: dict[connection.Client, _State] = {}
        """Connections, the one that was idle for the longest time first."""

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
        if not self._make_room(_BURST + 1):
            client.error = "the recorder has no file descriptors left"
            self._record(Event(kind="refused", detail=f"{client.error}: raise the limit (ulimit -Hn)"))
        detail = f"no request with credentials in {FIRST_REQUEST_SECONDS:.0f} s"
        loop = asyncio.get_running_loop()
        self._clients[client] = _State(loop.call_later(FIRST_REQUEST_SECONDS, self._drop, client, detail))

    def client_disconnected(self, client: connection.Client) -> None:
        """Count a connection that was closed."""
        if (state := self._clients.pop(client, None)) is not None:
            state.deadline.cancel()

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Note that a tunnel was opened with credentials."""
        if flow.response is None and (state := self._clients.get(flow.client_conn)) is not None:
            state.begin(flow.metadata[SESSION], _Phase.IDLE)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Refuse a request that needs a connection for which no room is left."""
        session, client = flow.metadata.get(SESSION), flow.client_conn
        if session is None:
            return
        if (state := self._clients.get(client)) is None:
            return
        state.begin(session, _Phase.SENDING)
        if flow.response is not None or flow.error is not None or state.servers:
            return
        room = self._make_room(_PER_SERVER + _RESERVE, client)
        if not room and (room := ends_session(flow.request)):
            for other in [other for other, state in self._clients.items() if state.session == session]:
                if other != client:
                    self._drop(other, "closed at the end of the session")
        if room:
            state.admitted = True
        elif self._held()[session] > 1:
            self._refuse(flow, "This session has too many connections open.", 429, "rate_limit_exceeded")
        else:
            self._refuse(flow, "The recorder has as many calls as it has file descriptors for.", 503, "overloaded")

    def _refuse(self, flow: http.HTTPFlow, why: str, status: int, code: str) -> None:
        error = DialectError(f"{why} Try again later.", status=status, code=code)
        self._record(refuse(flow, error, retry_after=5))

    def request(self, flow: http.HTTPFlow) -> None:
        """Note that a request is complete."""
        state = self._clients.get(flow.client_conn)
        if state is not None and state.phase is _Phase.SENDING:
            state.phase = _Phase.WAITING

    def response(self, flow: http.HTTPFlow) -> None:
        """Note that a request is over: its reply is complete, or it failed."""
        if (state := self._clients.pop(flow.client_conn, None)) is not None:
            state.phase, state.admitted = min(state.phase, _Phase.IDLE), False
            self._clients[flow.client_conn] = state

    error = response

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """Count a connection that is about to be opened."""
        if (state := self._clients.get(data.client)) is not None:
            state.servers, state.admitted = state.servers + 1, False

    def server_disconnected(self, data: ServerConnectionHookData) -> None:
        """Count a connection that was closed, or not opened."""
        if (state := self._clients.get(data.client)) is not None:
            state.servers -= 1

    server_connect_error = server_disconnected

    def _make_room(self, descriptors: int, asking: connection.Client | None = None) -> bool:
        """Close connections until so many descriptors are free, for a new connection or the request of one `asking`.

        Returns False if too few can be closed.
        """
        while self._base + (held := self._held()).total() + descriptors > self._limit:
            idle = _Phase.SENDING if asking is None else _Phase.IDLE
            fair = math.inf if asking is None else held[self._clients[asking].session] + _PER_SERVER
            loads = [
                ((phase is _Phase.WAITING, -held[state.session], phase, -i if phase is _Phase.WAITING else i), client)
                for i, (client, state) in enumerate(self._clients.items())
                if (phase := state.phase) <= idle or held[state.session] > fair
            ]
            if not loads:
                return False
            self._drop(min(loads, key=itemgetter(0))[1], "closed to make room for others")
        return True

    def _held(self) -> Counter[str | None]:
        """Return the number of descriptors of each session."""
        held: Counter[str | None] = Counter()
        for state in self._clients.values():
            held[state.session] += state.descriptors
        return held

    def _drop(self, client: connection.Client, detail: str) -> None:
        session = self._clients[client].session
        self.client_disconnected(client)
        self._close(client)
        self._record(Event(kind="refused", session_id=session, detail=detail))
