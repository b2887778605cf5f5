"""mitmproxy's layers for HTTP/1 and TLS with bounds, for everybody who connects: authenticated or not.

mitmproxy has no bound for headers, for what waits behind a request, for the first bytes of a connection, and for
messages and frames of WebSockets. It keeps bodies of requests that are answered here, answers bad requests without
telling an addon, and gives addons no call to close a connection.
"""

import json
import re
import time
from collections.abc import Callable

from h11._readers import ChunkedReader
from mitmproxy import connection, ctx, http
from mitmproxy.net.http import http1
from mitmproxy.proxy import commands, events, layer
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import NextLayer
from mitmproxy.proxy.layers import ClientTLSLayer
from mitmproxy.proxy.layers.http import HttpLayer, HTTPMode, HttpStream
from mitmproxy.proxy.layers.http._base import ReceiveHttp
from mitmproxy.proxy.layers.http._events import (
    HttpEvent,
    RequestData,
    RequestEndOfMessage,
    RequestHeaders,
    RequestProtocolError,
    RequestTrailers,
    ResponseProtocolError,
)
from mitmproxy.proxy.layers.http._http1 import Http1Server
from mitmproxy.proxy.layers.websocket import WebsocketLayer
from mitmproxy.proxy.server import ConnectionHandler

HEADER_LIMIT = 64 * 1024
"""Maximum bytes of a request line and its headers, and of what a client sends before it has the reply."""
HEADER_COUNT = 100
"""Maximum number of headers. aiohttp's own limit is 128."""
MESSAGE_LIMIT = 16 * 1024 * 1024
"""Maximum bytes of a WebSocket message. mitmproxy takes quadratic time to join its parts."""
SMALL_CHUNKS = 1_000
"""Number of chunks of a body that may have any size."""
CHUNK_BYTES = 64
"""Minimum bytes of the chunks of a body with more of them, on average."""

Report = Callable[[connection.Client, http.Request | None, str], None]
"""Takes the connection, the request if it could be read, and the reason of a refusal."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110: the characters of methods and of header names."""
_BROKEN = re.compile(rb"[\r\n\0]")
"""RFC 9110, 5.5: what no value has. A server may read a line break in a value as the end of the header."""
_SILENT = 444
"""mitmproxy's status for a connection that is closed without an answer."""
_HANDSHAKE = b"\x16"
"""First byte of a TLS record that begins a handshake. No request begins with it."""
_TELLING = 3
"""Number of bytes that tell TLS from HTTP."""
HELLO_BYTES = 16 * 1024
"""Maximum bytes before the end of a ClientHello. Those of browsers have less than 3 KiB."""
HELLO_READS = 32
"""Maximum number of reads up to the end of a ClientHello. mitmproxy parses all of it again at each."""
BURST = 1_000
"""Number of frames that may come at once."""
PER_SECOND = 200.0
"""Number of frames that may come each second after that."""
FREE_BYTES = 1_024
"""Bytes of data for which one more frame is free: a long message in many frames is no flood."""

_MASK_LENGTH = 4


def close_client(client: connection.Client) -> None:
    """Close the connection of a client, and those that were opened for it."""
    handler = _handler(client)
    transport = handler.transports.get(client) if handler is not None else None
    if handler is not None and transport is not None and transport.handler is not None:
        handler.close_connection(client)


def close_server(client: connection.Client, server: connection.Server) -> None:
    """Close a connection that was opened for `client`. Nothing is written to it from now on."""
    handler = _handler(client)
    if handler is not None and server in handler.transports:
        writer = handler.transports[server].writer
        if writer is not None:
            writer.close()


def _handler(client: connection.Client) -> ConnectionHandler | None:
    connections: dict[object, ConnectionHandler] = ctx.master.addons.get("proxyserver").connections
    return connections.get(client.id)


class Bucket:
    """Holds at most `size` units, and gains `per_second` of them each second."""

    def __init__(self, size: float, per_second: float) -> None:
        self._size, self._per_second = size, per_second
        self._left, self._at = size, time.monotonic()

    def take(self, units: float = 1) -> bool:
        """Take so many units, and return True; return False and take nothing if there are fewer."""
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < units:
            return False
        self._left -= units
        return True


def is_open(data: bytes) -> bool:
    """Return True when `data`, the first bytes of a connection, do not yet tell TLS from HTTP."""
    return data[:1] == _HANDSHAKE and len(data) < _TELLING


class FirstBytes(NextLayer):
    """Waits for the bytes that tell TLS from HTTP, and then asks the addons.

    While no addon names a layer, mitmproxy names one by itself, without our bounds: this is the layer until then.
    """

    def _ask(self) -> layer.CommandGenerator[None]:
        if not is_open(self.data_client()):  # type: ignore[no-untyped-call]
            yield from super()._ask()  # type: ignore[no-untyped-call]


class BoundedClientTLS(ClientTLSLayer):
    """TLS from a client. Ends a connection whose ClientHello is too long or comes in too many pieces."""

    _reads = 0

    def receive_handshake_data(self, data: bytes) -> layer.CommandGenerator[tuple[bool, str | None]]:
        """Take a part of the handshake. Return whether it is complete, and an error or None."""
        if not self.client_hello_parsed:
            self._reads += 1
            if len(self.recv_buffer) + len(data) > HELLO_BYTES or self._reads > HELLO_READS:
                return False, f"a ClientHello over {HELLO_BYTES} bytes or {HELLO_READS} pieces"
        return (yield from super().receive_handshake_data(data))

    def receive_data(self, data: bytes) -> layer.CommandGenerator[None]:
        """Take data after the handshake. Drop what still arrives after one that failed."""
        if self.tls is not None:
            yield from super().receive_data(data)


class Frames:
    """Counts the frames in what a client sends. mitmproxy spends some 60 µs on each, in one go for all of a read."""

    def __init__(self) -> None:
        self._room = Bucket(BURST, PER_SECOND)
        self._head = bytearray()
        self._skip = 0
        """Bytes of the current frame's payload that have not come yet."""

    def accept(self, data: bytes) -> bool:
        """Return True unless `data`, the next bytes of the connection, bring more frames than may come."""
        return self._room.take(max(0, self._count(data) - len(data) // FREE_BYTES))

    def _count(self, data: bytes) -> int:
        """Return the number of frames whose head is complete with `data` (RFC 6455, 5.2)."""
        number = position = 0
        while position < len(data):
            if self._skip:
                step = min(self._skip, len(data) - position)
                self._skip -= step
                position += step
                continue
            self._head.append(data[position])
            position += 1
            if len(self._head) < 2:
                continue
            masked, length = self._head[1] >> 7, self._head[1] & 127
            extended = {126: 2, 127: 8}.get(length, 0)
            if len(self._head) == 2 + extended:
                payload = int.from_bytes(self._head[2:]) if extended else length
                self._skip = payload + masked * _MASK_LENGTH
                self._head.clear()
                number += 1
        return number


class Http(HttpLayer):
    """HTTP/1 from a client. `report` is called for each request that is refused here."""

    def __init__(self, context: Context, mode: HTTPMode, report: Report) -> None:
        super().__init__(context, mode)
        self._report = report
        # mitmproxy keeps a connection that exists; otherwise a client could choose HTTP/2
        self.connections[context.client] = _Server(context.fork(), report)

    def handle_event(self, event: events.Event) -> layer.CommandGenerator[None]:
        """Handle an event. An error in mitmproxy's layers costs this connection, and is recorded."""
        try:
            yield from super().handle_event(event)
        except Exception as error:
            self._report(self.context.client, None, f"an error in mitmproxy's layers: {error!r}")
            self._handle_event = self._drop  # type: ignore[method-assign]
            self._paused = None
            self._paused_event_queue.clear()
            yield commands.CloseConnection(self.context.client)

    def _drop(self, event: events.Event) -> layer.CommandGenerator[None]:
        """Drop what still arrives."""
        yield from ()

    def make_stream(self, stream_id: int) -> layer.CommandGenerator[None]:
        """Start the exchange of one request."""
        self.streams[stream_id] = _Stream(self.context.fork(), stream_id, self._report)
        yield from self.event_to_child(self.streams[stream_id], events.Start())


class _Stream(HttpStream):
    def __init__(self, context: Context, stream_id: int, report: Report) -> None:
        super().__init__(context, stream_id)
        self._report = report
        self._frames = Frames()

    def state_consume_request_body(
        self, event: RequestData | RequestTrailers | RequestEndOfMessage
    ) -> layer.CommandGenerator[None]:
        """Drop the body of a request that is not streamed: nobody reads it, the request is answered here."""
        if not isinstance(event, RequestData):
            yield from super().state_consume_request_body(event)

    def passthrough(self, event: events.Event) -> layer.CommandGenerator[None]:
        """Close a WebSocket whose message is too long, or whose client sends too many frames."""
        child = self.child_layer
        if isinstance(child, WebsocketLayer) and isinstance(event, RequestData) and not self._frames.accept(event.data):
            return (yield from self._close("too many WebSocket frames"))
        yield from super().passthrough(event)
        if isinstance(child, WebsocketLayer) and (
            max(sum(map(len, side.frame_buf)) for side in (child.client_ws, child.server_ws)) > MESSAGE_LIMIT
        ):
            yield from self._close(f"a WebSocket message over {MESSAGE_LIMIT} bytes")

    def _close(self, reason: str) -> layer.CommandGenerator[None]:
        self._report(self.context.client, self.flow.request, reason)
        self._handle_event = self.state_errored  # what still arrives is dropped
        yield commands.CloseConnection(self.context.client)


class _Server(Http1Server):
    def __init__(self, context: Context, report: Report) -> None:
        super().__init__(context)
        self._report = report
        self._chunk_count = self._chunk_bytes = 0

    def _handle_event(self, event: events.Event) -> layer.CommandGenerator[None]:
        yield from super()._handle_event(event)
        if len(self.buf) > HEADER_LIMIT and self.state != self.done:
            yield from self._refuse(431, f"more than {HEADER_LIMIT} bytes of headers, or behind a request")

    def read_headers(self, event: events.ConnectionEvent) -> layer.CommandGenerator[None]:
        """Read a request up to its body, and refuse one that is malformed."""
        for command in super().read_headers(event):
            if isinstance(command, commands.SendData):  # mitmproxy's answer to bytes that it cannot parse
                return (yield from self._refuse(400, "not an HTTP/1.1 request"))
            if isinstance(command, ReceiveHttp) and isinstance(command.event, RequestHeaders):
                self._chunk_count = self._chunk_bytes = 0
                status, mistake = _mistake(command.event.request)
                if mistake:
                    return (yield from self._refuse(status, mistake))
            if not isinstance(command, commands.Log):  # its lines quote what the client sent
                yield command
        begun = bytes(self.buf).lstrip(b"\r\n") if self.state == self.read_headers else b""
        if begun and isinstance(event, events.ConnectionClosed):
            self._tell("the connection ended within the headers")
        elif begun and not _TOKEN.match(begun):
            yield from self._refuse(400, "not an HTTP/1.1 request")

    def read_body(self, event: events.Event) -> layer.CommandGenerator[None]:
        """Read a body, and report one that breaks the protocol. The chunks of one read become one."""
        hangs_up = isinstance(event, events.ConnectionClosed)
        chunks: list[bytes] = []
        try:
            for command in super().read_body(event):
                if isinstance(command, ReceiveHttp) and isinstance(command.event, RequestData):
                    chunks.append(command.event.data)
                    if self._are_too_small(command.event.data):
                        yield from self._break(f"chunks of less than {CHUNK_BYTES} bytes")
                        return
                    continue
                if chunks:
                    yield self._joined(chunks)
                if (
                    not hangs_up
                    and isinstance(command, ReceiveHttp)
                    and isinstance(command.event, RequestProtocolError)
                ):
                    self._tell("the body breaks HTTP/1.1")
                yield command
            if chunks:
                yield self._joined(chunks)
        except NotImplementedError:
            yield from self._break("trailers are not served")

    def _break(self, reason: str) -> layer.CommandGenerator[None]:
        """End a request within its body."""
        assert self.stream_id is not None
        self._tell(reason)
        yield commands.CloseConnection(self.conn)
        yield ReceiveHttp(RequestProtocolError(self.stream_id, reason, RequestProtocolError.code))
        self.state = self.done

    def send(self, event: HttpEvent) -> layer.CommandGenerator[None]:
        """Send a part of a response, and report an error of the client that mitmproxy answers by itself."""
        if isinstance(event, ResponseProtocolError) and not self.response:
            # a number in mitmproxy 11, an enumeration in mitmproxy 12
            status = getattr(event.code, "http_status_code", lambda: event.code)()
            if status is not None and status < 500 and status != _SILENT:
                self._tell(event.message)
        yield from super().send(event)

    def _are_too_small(self, chunk: bytes) -> bool:
        self._chunk_count += 1
        self._chunk_bytes += len(chunk)
        return (
            isinstance(self.body_reader, ChunkedReader)
            and self._chunk_count > SMALL_CHUNKS
            and self._chunk_bytes < self._chunk_count * CHUNK_BYTES
        )

    def _joined(self, chunks: list[bytes]) -> ReceiveHttp:
        assert self.stream_id is not None
        data = b"".join(chunks)
        chunks.clear()
        return ReceiveHttp(RequestData(self.stream_id, data))

    def _tell(self, reason: str) -> None:
        assert isinstance(self.conn, connection.Client)
        self._report(self.conn, self.request, reason)

    def _refuse(self, status: int, reason: str) -> layer.CommandGenerator[None]:
        self._tell(reason)
        if not self.response:
            body = json.dumps({"error": {"message": reason, "type": "invalid_request_error", "code": status}})
            headers = {"content-type": "application/json", "connection": "close"}
            yield commands.SendData(self.conn, http1.assemble_response(http.Response.make(status, body, headers)))
        yield commands.CloseConnection(self.conn)
        if self.state != self.wait:
            self.state = self.done


def _mistake(request: http.Request) -> tuple[int, str]:
    """Return the status and the reason for which a request is refused. The reason is empty for a good request."""
    method, names = request.data.method, [name for name, _ in request.headers.fields]
    if request.http_version not in ("HTTP/1.0", "HTTP/1.1"):
        return 505, f"{request.http_version} is not served"
    if len(names) > HEADER_COUNT:
        return 431, f"{len(names)} headers, the limit is {HEADER_COUNT}"
    if sum(len(name) + len(value) for name, value in request.headers.fields) > HEADER_LIMIT:
        return 431, f"more than {HEADER_LIMIT} bytes of headers"
    if not all(map(_TOKEN.fullmatch, (method, *names))):
        return 400, "a method or the name of a header has a character that is not allowed"
    if any(map(_BROKEN.search, (request.data.path, *(value for _, value in request.headers.fields)))):
        return 400, "a path or the value of a header has a line break or a NUL"
    if method.upper() == b"CONNECT" and (
        method != b"CONNECT"
        or request.headers.get("content-length", "0") != "0"
        or "transfer-encoding" in request.headers
    ):
        return 400, "a CONNECT with a body"
    return 0, ""
