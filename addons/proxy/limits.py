"""Addon: divides the process's file descriptors between sessions."""

import asyncio
import logging
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from operator import attrgetter
from typing import Any

from mitmproxy import connection, http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from rolltap.addons.dialects.call import DialectError
from rolltap.addons.proxy.capture import ends_session, refuse
from rolltap.addons.proxy.layers import close_client
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.store.records import Event

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

    IDLE = 0
    SENDING = 1
    """Its request is not complete."""
    WAITING = 2
    """Its request is complete, and has no complete reply."""


@dataclass(frozen=True, slots=True)
class _State:
    deadline: asyncio.TimerHandle
    """Closes the connection. Cancelled by the first request with credentials."""
    session: str | None = None
    """Session of the newest credentials."""
    phase: _Phase = _Phase.IDLE
    servers: int = 0
    """Number of connections that were opened for it."""
    admitted: bool = False
    """Its request may open a connection to the endpoint, and has not yet."""

    @property
    def descriptors(self) -> int:
        return 1 + _PER_SERVER * (self.servers + self.admitted)


@dataclass(slots=True, eq=False)
class _Share:
    """The descriptors and connections of a session."""

    descriptors: int = 0
    clients: tuple[dict[connection.Client, None], ...] = field(
        default_factory=lambda: ({}, {}, {}),
    )
    """Its connections in each phase, the one that came first before the others."""


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
        self._shares: dict[str | None, _Share] = {}
        self._held = 0
        """Number of descriptors of all connections."""

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
        deadline = loop.call_later(FIRST_REQUEST_SECONDS, self._drop, client, detail)
        self._set(client, _State(deadline))

    def client_disconnected(self, client: connection.Client) -> None:
        """Count a connection that was closed."""
        if client in self._clients:
            self._clients[client].deadline.cancel()
            self._set(client, None)

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Note that a tunnel was opened with credentials."""
        if flow.response is None:
            self._change(flow.client_conn, session=flow.metadata[SESSION], phase=_Phase.IDLE)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Refuse a request that needs a connection for which no room is left."""
        session = flow.metadata.get(SESSION)
        client = flow.client_conn
        if session is None or client not in self._clients:
            return
        self._change(client, session=session, phase=_Phase.SENDING)
        if flow.response is not None or flow.error is not None or self._clients[client].servers:
            return
        if self._make_room(_PER_SERVER + _RESERVE, client):
            self._change(client, admitted=True)
        elif ends_session(flow.request):
            for clients in self._shares[session].clients:
                for other in [*clients]:
                    if other != client:
                        self._drop(other, "closed at the end of the session")
            self._change(client, admitted=True)
        else:
            why = "The recorder has as many calls as it has file descriptors for. Try again later."
            error = DialectError(why, status=503, code="overloaded")
            if self._shares[session].descriptors > 1:
                why = "This session has too many connections open. Try again later."
                error = DialectError(why, status=429, code="rate_limit_exceeded")
            self._record(refuse(flow, error, retry_after=5))

    def request(self, flow: http.HTTPFlow) -> None:
        """Note that a request is complete."""
        state = self._clients.get(flow.client_conn)
        if state is not None and state.phase is _Phase.SENDING:
            self._change(flow.client_conn, phase=_Phase.WAITING)

    def response(self, flow: http.HTTPFlow) -> None:
        """Note that a request is over: its reply is complete, or it failed."""
        self._change(flow.client_conn, phase=_Phase.IDLE, admitted=False)

    error = response

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """Count a connection that is about to be opened."""
        state = self._clients.get(data.client)
        if state is not None:
            self._change(data.client, servers=state.servers + 1, admitted=False)

    def server_disconnected(self, data: ServerConnectionHookData) -> None:
        """Count a connection that was closed, or not opened."""
        state = self._clients.get(data.client)
        if state is not None:
            self._change(data.client, servers=state.servers - 1)

    server_connect_error = server_disconnected

    def _make_room(self, descriptors: int, asking: connection.Client | None = None) -> bool:
        """Close connections until so many descriptors are free, for a new one or the request of one `asking`.

        Returns False if too few can be closed.
        """
        while self._base + self._held + descriptors > self._limit:
            found = self._to_close(asking)
            if found is None:
                return False
            self._drop(found, "closed to make room for others")
        return True

    def _to_close(self, asking: connection.Client | None) -> connection.Client | None:
        """Return the connection that `_make_room` closes next. Looks at sessions, not at connections."""
        fair = 0
        if asking is not None:
            fair = self._shares[self._clients[asking].session].descriptors + _PER_SERVER
        shares = sorted(self._shares.values(), key=attrgetter("descriptors"), reverse=True)
        for share in shares:
            idle, sending, _ = share.clients
            if share.descriptors > fair:
                idle = idle or sending
            if idle:
                return next(iter(idle))
        if asking is not None and shares[0].descriptors > fair:
            for client in reversed(shares[0].clients[_Phase.WAITING]):
                return client
        return None

    def _change(self, client: connection.Client, **changes: Any) -> None:
        """Change fields of a connection's state, if it is counted. New credentials end its deadline."""
        state = self._clients.get(client)
        if state is not None:
            if "session" in changes:
                state.deadline.cancel()
            self._set(client, replace(state, **changes))

    def _set(self, client: connection.Client, state: _State | None) -> None:
        """Set the state of a connection, and count what it holds. None: it is closed."""
        old = self._clients.pop(client, None)
        if old is not None:
            share = self._shares[old.session]
            del share.clients[old.phase][client]
            share.descriptors -= old.descriptors
            self._held -= old.descriptors
            if not share.descriptors:
                del self._shares[old.session]
        if state is not None:
            self._clients[client] = state
            share = self._shares.setdefault(state.session, _Share())
            share.clients[state.phase][client] = None
            share.descriptors += state.descriptors
            self._held += state.descriptors

    def _drop(self, client: connection.Client, detail: str) -> None:
        session = self._clients[client].session
        self.client_disconnected(client)
        self._close(client)
        self._record(Event(kind="refused", session_id=session, detail=detail))
