"""Addon: limits of a session. All are off by default."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mitmproxy import connection, ctx, http

from rolltap.addons.answers import refuse
from rolltap.addons.dialects.types import DialectError
from rolltap.addons.sessions import SESSION
from rolltap.addons.store.records import Event


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
    they pass, and compared with the limit when a request begins. Must come after `Sessions`.
    """

    record: Callable[[Event], None]
    _usage: dict[str, _Usage] = field(default_factory=dict)
    """Session id -> what it used. Empty while no limit is set."""
    _running: dict[connection.Client, _Usage] = field(default_factory=dict)
    """Connection of a running request -> usage of its session. A connection has one request at a time."""

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Refuse a request over a limit, count any other."""
        options = ctx.options
        calls, size = options.rolltap_max_concurrent_calls, options.rolltap_max_session_bytes
        requests = options.rolltap_max_requests_per_minute
        if flow.response is not None or flow.error is not None or not (calls or size or requests):
            return
        usage = self._usage.setdefault(flow.metadata[SESSION], _Usage())
        minute, second = divmod(int(time.monotonic()), 60)
        if usage.minute != minute:
            usage.minute, usage.requests = minute, 0
        usage.requests += 1
        if calls and usage.running >= calls:
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

    def _end(self, client: connection.Client) -> None:
        usage = self._running.pop(client, None)
        if usage is not None:
            usage.running -= 1

    def _refuse(self, flow: http.HTTPFlow, message: str, retry_after: int | None) -> None:
        error = DialectError(message, status=429, code="rate_limit_exceeded")
        self.record(refuse(flow, error, retry_after=retry_after))
