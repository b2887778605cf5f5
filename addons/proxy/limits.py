"""Addon: bounds the connections of a session, and of all sessions, by the process's file
descriptors."""

import asyncio
import logging
import os
import resource
from collections.abc import Callable, Sized

from mitmproxy import connection, http

from rolltap.addons.dialects.call import DialectError
from rolltap.addons.proxy.capture import ends_session, refuse
from rolltap.addons.proxy.layers import close_client
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)

FIRST_REQUEST_SECONDS = 30.0
"""Seconds that a connection has until its first request with credentials."""
STRANGERS = 124
"""Number of connections without credentials. asyncio accepts 100 of the proxy's, and the endpoint
20, before the first one is looked at."""
SESSION_CONNECTIONS = 1024
"""Number of connections of a session, where the limit of descriptors allows four times as many."""
RETRY_SECONDS = 5
"""Value of `retry-after`."""
_PER_CONNECTION = 4
"""Descriptors of a session's connection: itself, the two ends of the proxy's connection to the
endpoint, and the connection to the engine."""
_RESERVE = 148
"""Descriptors of connections without credentials, and of the files of the run."""
_NO_ROOM = "closed to make room for others"


class Descriptors:
    """Raises the soft limit of descriptors to the hard one, and bounds connections so that it is
    never reached.

    If a session has too many connections, its oldest one without a running request is closed. If
    all sessions have too many, the one that was used least recently is closed. If all connections
    have a running request, a new request gets an error with `retry-after`: 429 if its session has
    too many connections, else 503. So no session alone can cause a 503, which is a fault of the
    machine.

    The request that ends a session is served in any case, in the place of another one of its
    session. Of too many connections without credentials the oldest is closed. Each closed
    connection is recorded.

    Must come after `Sessions`.
    """

    def __init__(
        self,
        record: Callable[[Event], None],
        close: Callable[[connection.Client], None] = close_client,
        boxes: Sized = (),
    ) -> None:
        self._record = record
        self._close = close
        self._boxes = boxes
        self._most = 1
        """Number of connections of all sessions, without a box."""
        self._strangers: dict[connection.Client, asyncio.TimerHandle] = {}
        """Connections without credentials, oldest first -> what closes them in time."""
        self._clients: dict[connection.Client, str] = {}
        """Connections with credentials -> session."""
        self._sessions: dict[str, dict[connection.Client, None]] = {}
        """Session -> its connections, oldest first."""
        self._idle: dict[connection.Client, None] = {}
        """Connections with credentials and without a running request, least recently used first."""

    def load(self, _: object) -> None:
        """Raise the limit."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def running(self) -> None:
        """Find how many connections fit, and log it."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = 1 << 30
        used = len(os.listdir("/dev/fd")) + _RESERVE
        self._most = max(1, (limit - used) // _PER_CONNECTION)
        logger.info(
            "room for %d sessions with a call at the same time: the limit is %d open files",
            self._most,
            limit,
        )

    def client_connected(self, client: connection.Client) -> None:
        """Note a connection, which has no credentials yet."""
        if len(self._strangers) >= STRANGERS:
            self._drop(next(iter(self._strangers)), _NO_ROOM)
        detail = f"no request with credentials in {FIRST_REQUEST_SECONDS:.0f} s"
        loop = asyncio.get_running_loop()
        self._strangers[client] = loop.call_later(FIRST_REQUEST_SECONDS, self._drop, client, detail)

    def client_disconnected(self, client: connection.Client) -> None:
        """Forget a connection that was closed."""
        deadline = self._strangers.pop(client, None)
        if deadline is not None:
            deadline.cancel()
        self._idle.pop(client, None)
        session = self._clients.pop(client, None)
        if session is not None:
            del self._sessions[session][client]
            if not self._sessions[session]:
                del self._sessions[session]

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Note the session of a tunnel. A tunnel gets no error: its first request gets it in words
        of its API."""
        if flow.response is None:
            self._make_room(flow)
            self._idle[flow.client_conn] = None

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Refuse a request if there are too many connections."""
        session = flow.metadata.get(SESSION)
        if session is None or self._make_room(flow) or flow.response is not None:
            return
        own = self._sessions[session]
        if ends_session(flow.request):
            oldest = next(iter(own))
            if oldest != flow.client_conn:
                self._drop(oldest, "closed at the end of the session")
            return
        error = DialectError(
            "The recorder has as many calls as it has file descriptors for. Try again later.",
            status=503,
            code="overloaded",
            retry_after=RETRY_SECONDS,
        )
        if len(own) > self._most_of_session:
            error = DialectError(
                "This session has too many connections open. Try again later.",
                status=429,
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        self._record(refuse(flow, error))
        self._idle[flow.client_conn] = None  # the rest of its request may never come

    def response(self, flow: http.HTTPFlow) -> None:
        """Note that a request is over: its reply is complete, or it failed."""
        if flow.client_conn in self._clients:
            self._idle[flow.client_conn] = None

    error = response

    @property
    def _room(self) -> int:
        """Number of connections of all sessions. A box takes as many descriptors as a connection:
        its socket, its pipe, and what is accepted there before it is looked at."""
        return max(1, self._most - len(self._boxes))

    @property
    def _most_of_session(self) -> int:
        return min(SESSION_CONNECTIONS, max(1, self._room // 4))

    def _make_room(self, flow: http.HTTPFlow) -> bool:
        """Count a connection for its session, and close others. Return False if too few can be
        closed."""
        client = flow.client_conn
        session = flow.metadata[SESSION]
        if self._clients.get(client) != session:
            self.client_disconnected(client)
            self._clients[client] = session
            self._sessions.setdefault(session, {})[client] = None
        self._idle.pop(client, None)
        own = self._sessions[session]
        while len(own) > self._most_of_session:
            idle = next((each for each in own if each in self._idle), None)
            if idle is None:
                return False
            self._drop(idle, _NO_ROOM)
        while len(self._clients) > self._room:
            idle = next(iter(self._idle), None)
            if idle is None:
                return False
            self._drop(idle, _NO_ROOM)
        return True

    def _drop(self, client: connection.Client, detail: str) -> None:
        session = self._clients.get(client)
        self.client_disconnected(client)
        self._close(client)
        self._record(Event(kind="refused", session_id=session, detail=detail))
