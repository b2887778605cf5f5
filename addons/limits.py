"""Addon: limits of a session. All are off by default."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mitmproxy import connection, ctx, http

from rolltap.addons.answers import refuse
from rolltap.addons.dialects.types import DialectError
from rolltap.addons.sessions import SESSION
from rolltap.addons.store.records import Event

REMEMBERED = 100_000
"""Number of sessions whose usage is known. A session that is forgotten begins again at nothing."""


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


@dataclass(slots=True)
class Limits:
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

    def response(self, flow: http.HTTPFlow) -> None:
        """End a request whose reply is complete."""
        if flow.websocket is None:
            self._end(flow.client_conn)

    def error(self, flow: http.HTTPFlow) -> None:
        """End a request that failed."""
        self._end(flow.client_conn)

    def websocket_end(self, flow: http.HTTPFlow) -> None:
        """End the request that opened a WebSocket."""
        self._end(flow.client_conn)

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
