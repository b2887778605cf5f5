"""Addons that bound what sessions use: the process's file descriptors, and the limits of each session."""

import asyncio
import logging
import math
import os
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter

from mitmproxy import connection, ctx, http
from mitmproxy.net.http import http1
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
REMEMBERED = 100_000
"""Number of sessions whose usage is known. A session that is forgotten begins again at nothing."""


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


class _Requests:
    """Tells when a request is over: `_end` gets its connection."""

    def _end(self, client: connection.Client) -> None:
        raise NotImplementedError

    def response(self, flow: http.HTTPFlow) -> None:
        """End a request whose reply is complete, or that failed."""
        self._end(flow.client_conn)

    error = response


class Descriptors(_Requests):
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

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """Count a connection that is about to be opened."""
        if (state := self._clients.get(data.client)) is not None:
            state.servers, state.admitted = state.servers + 1, False

    def server_disconnected(self, data: ServerConnectionHookData) -> None:
        """Count a connection that was closed, or not opened."""
        if (state := self._clients.get(data.client)) is not None:
            state.servers -= 1

    server_connect_error = server_disconnected

    def _end(self, client: connection.Client) -> None:
        if (state := self._clients.pop(client, None)) is not None:
            state.phase, state.admitted = min(state.phase, _Phase.IDLE), False
            self._clients[client] = state

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


@dataclass(slots=True)
class _Usage:
    running: int = 0
    transferred: int = 0
    minute: int = 0
    """Number of the minute in which the last request began, on the monotonic clock."""
    requests: int = 0
    """Number of requests that began in that minute."""

    def count(self, data: bytes) -> bytes:
        self.transferred += len(data)
        return data


@dataclass
class Limits(_Requests):
    """Answers 429 to a request over a limit of its session, and records it as `rejected`.

    All requests of a session count, also to hosts that are refused. Bytes are those of bodies. They are counted while
    they pass, and compared with the limit when a request begins. `generations` returns the number of those of a
    session that run. One may run on for a while after its request was dropped: with more of them than the limit, no
    request begins; with as many, one may, because it may be a retry that joins one. Must come after `Sessions`.
    """

    record: Callable[[Event], None]
    generations: Callable[[str], int]
    _usage: OrderedDict[str, _Usage] = field(default_factory=OrderedDict)
    """Session id -> what it used, of the `REMEMBERED` sessions that asked last. Empty while no limit is set."""
    _running: dict[connection.Client, _Usage] = field(default_factory=dict)
    """Connection of a running request -> usage of its session. A connection has one request at a time."""

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Refuse a request over a limit, count any other."""
        options = ctx.options
        calls, size = options.rolltap_max_concurrent_calls, options.rolltap_max_session_bytes
        requests = options.rolltap_max_requests_per_minute
        if flow.response is not None or flow.error is not None or not (calls or size or requests):
            return
        if ends_session(flow.request) and http1.expected_http_body_size(flow.request) == 0:
            return
        usage = self._used(flow.metadata[SESSION])
        minute, second = divmod(int(time.monotonic()), 60)
        if usage.minute != minute:
            usage.minute, usage.requests = minute, 0
        usage.requests += 1
        if calls and (usage.running >= calls or self.generations(flow.metadata[SESSION]) > calls):
            self._refuse(flow, f"{calls} requests of this session run already: the limit.", 1)
        elif requests and usage.requests > requests:
            self._refuse(flow, f"This session may send {requests} requests a minute.", 60 - second)
        elif size and usage.transferred >= size:
            self._refuse(flow, f"This session has used the {size:,} bytes that it may transfer.", None)
        else:
            self._running[flow.client_conn] = usage
            usage.running += 1
            flow.request.stream = usage.count

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Count the bytes of a reply."""
        usage = self._running.get(flow.client_conn)
        if usage is not None and flow.response is not None:
            flow.response.stream = usage.count

    def client_disconnected(self, client: connection.Client) -> None:
        """End the request of a connection that was closed."""
        self._end(client)

    def _used(self, session_id: str) -> _Usage:
        usage = self._usage.setdefault(session_id, _Usage())
        self._usage.move_to_end(session_id)
        while len(self._usage) > REMEMBERED:
            self._usage.popitem(last=False)
        return usage

    def _end(self, client: connection.Client) -> None:
        usage = self._running.pop(client, None)
        if usage is not None:
            usage.running -= 1

    def _refuse(self, flow: http.HTTPFlow, message: str, retry_after: int | None) -> None:
        error = DialectError(message, status=429, code="rate_limit_exceeded")
        self.record(refuse(flow, error, retry_after=retry_after))
