"""mitmproxy's layers for HTTP/1 and TLS with bounds, for both sides: clients, authenticated or not,
and allowed hosts.

mitmproxy has no bound for headers, for chunks, for what waits behind a message, and for the first
bytes of a connection. It takes an interim reply for the last one, and fails at trailers. It keeps
bodies of requests that are answered here, answers bad messages without telling an addon, and gives
addons no call to close a connection.
"""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer
from mitmproxy import connection, ctx, http
from mitmproxy.net.http import http1
from mitmproxy.net.http.validate import validate_headers
from mitmproxy.proxy import commands, events, layer
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers import ClientTLSLayer
from mitmproxy.proxy.layers.http import (
    HttpClient,
    HttpLayer,
    HTTPMode,
    HttpStream,
    RegisterHttpConnection,
)
from mitmproxy.proxy.layers.http._base import ReceiveHttp
from mitmproxy.proxy.layers.http._events import (
    HttpEvent,
    RequestData,
    RequestEndOfMessage,
    RequestHeaders,
    RequestProtocolError,
    RequestTrailers,
    ResponseHeaders,
    ResponseProtocolError,
)
from mitmproxy.proxy.layers.http._http1 import Http1Client, Http1Connection, Http1Server
from mitmproxy.proxy.server import ConnectionHandler

from rolltap.addons.concurrency import Bucket

HEADER_LIMIT = 64 * 1024
"""Maximum bytes of a first line and its headers, of trailers, and of what waits behind a
message."""
HEADER_COUNT = 100
"""Maximum number of headers. aiohttp's own limit is 128."""
INTERIM_COUNT = 100
"""Maximum number of interim replies (RFC 9110, 15.2) before the reply."""
WAITING_LIMIT = 16 * 1024 * 1024
"""Maximum bytes of a body that waits for an addon or a connection."""

CHUNK_BURST = 50_000
"""Number of small chunks that may come at once. They take some 100 ms."""
CHUNKS_PER_SECOND = 10_000.0
"""Number of small chunks that may come each second after that."""
CHUNK_BYTES = 16
"""Bytes of data for which one more chunk is free: short events and lines are no flood."""
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,20})(?:;[^\n]*|[ \t]*)")
"""RFC 9112, 7.1: the line before the data of a chunk, as h11 reads it."""

Report = Callable[[Context, http.Request | None, str], None]
"""Takes the context of a connection, the request if it could be read, and the reason of a
refusal."""

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110: the characters of methods and of header names."""
_BROKEN = re.compile(rb"[\r\n\0]")
"""RFC 9110, 5.5: what no value has. A server may read a line break in a value as the end of the
header."""
_SILENT = 444
"""mitmproxy's status for a connection that is closed without an answer."""
_HANDSHAKE = b"\x16"
"""First byte of a TLS record that begins a handshake."""
HELLO_BYTES = 16 * 1024
"""Maximum bytes before the end of a ClientHello. Those of browsers have less than 3 KiB."""
HELLO_READS = 32
"""Maximum number of reads up to the end of a ClientHello. mitmproxy parses all of it again at
each."""


def close_client(client: connection.Client) -> None:
    """Close the connection of a client, and those that were opened for it."""
    connections: dict[object, ConnectionHandler] = ctx.master.addons.get("proxyserver").connections
    handler = connections.get(client.id)
    if handler is None or client not in handler.transports:
        return
    transport = handler.transports[client]
    if not isinstance(transport.writer, asyncio.StreamWriter):
        return
    if transport.handler is None:
        client.error = "closed before it was read"  # mitmproxy closes it then
    else:
        handler.close_connection(client)
    # a task that is cancelled before it begins closes nothing, and a close waits for a client that
    # does not read
    transport.writer.transport.abort()


def begins_tls(data: bytes) -> bool:
    """Return True for the first bytes of a TLS connection. No HTTP request begins with them."""
    return data.startswith(_HANDSHAKE)


class BoundedClientTLS(ClientTLSLayer):
    """TLS from a client. Ends a connection whose ClientHello is too long or comes in too many
    pieces."""

    _reads = 0

    def receive_handshake_data(
        self,
        data: bytes,
    ) -> layer.CommandGenerator[tuple[bool, str | None]]:
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


class Http(HttpLayer):
    """HTTP/1 from a client, and to the hosts that it asks.

    `report` is called for each message that is refused here. `is_ours` is true for a client that
    asks our own endpoint: what the endpoint sends is not counted.
    """

    def __init__(
        self,
        context: Context,
        mode: HTTPMode,
        report: Report,
        is_ours: Callable[[connection.Client], bool],
    ) -> None:
        super().__init__(context, mode)
        self._report = report
        self._is_ours = is_ours
        # mitmproxy keeps a connection that exists; otherwise a client could choose HTTP/2
        self.connections[context.client] = _ClientSide(context.fork(), report)

    def handle_event(self, event: events.Event) -> layer.CommandGenerator[None]:
        """Handle an event. An error in mitmproxy's layers costs this connection, and is
        recorded."""
        try:
            yield from super().handle_event(event)
        except Exception as error:
            self._report(self.context, None, f"an error in mitmproxy's layers: {error!r}")
            self._handle_event = _drop  # type: ignore[method-assign]
            self._paused = None
            self._paused_event_queue.clear()
            yield commands.CloseConnection(self.context.client)

    def make_stream(self, stream_id: int) -> layer.CommandGenerator[None]:
        """Start the exchange of one request."""
        self.streams[stream_id] = _Stream(self.context.fork(), stream_id, self._report)
        yield from self.event_to_child(self.streams[stream_id], events.Start())

    def register_connection(self, command: RegisterHttpConnection) -> layer.CommandGenerator[None]:
        """Bound what comes from a host that was connected to, before the first byte is sent to
        it."""
        if not command.err and not self._is_ours(self.context.client):
            opened: Any = self.connections[command.connection]
            while not isinstance(opened, HttpClient):
                opened = opened.child_layer  # TLS
            opened.child_layer = _HostSide(opened.context, self._report)
            opened._handle_event = opened.child_layer.handle_event
            yield from opened.child_layer.handle_event(events.Start())
        yield from super().register_connection(command)


def _drop(event: events.Event) -> layer.CommandGenerator[None]:
    yield from ()


class _Stream(HttpStream):
    def __init__(self, context: Context, stream_id: int, report: Report) -> None:
        super().__init__(context, stream_id)
        self._report = report
        self._kept = 0
        """Bytes of the body that wait for an addon or a connection: mitmproxy reads on
        meanwhile."""

    def handle_event(self, event: events.Event) -> layer.CommandGenerator[None]:
        """Handle an event. Close the connection when more than `WAITING_LIMIT` bytes of a body
        wait."""
        if self._paused and isinstance(event, RequestData):
            self._kept += len(event.data)
        else:
            self._kept = 0
        if self._kept > WAITING_LIMIT:
            reason = f"{self._kept} bytes of a body that nobody reads yet"
            self._report(self.context, self.flow.request, reason)
            close_client(self.context.client)
            return
        yield from super().handle_event(event)

    def state_consume_request_body(
        self, event: RequestData | RequestTrailers | RequestEndOfMessage
    ) -> layer.CommandGenerator[None]:
        """Drop the body of a request that is not streamed: nobody reads it, the request is answered
        here."""
        if not isinstance(event, RequestData):
            yield from super().state_consume_request_body(event)


class Chunks(ChunkedReader):
    """Reads the chunks of a body, those of one read in one go, and drops its trailers.

    h11 spends 9 µs on each chunk, and this some 2 µs. On a line that it refuses, h11 spends
    quadratic time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusal = ""
        self._room = Bucket(CHUNK_BURST, CHUNKS_PER_SECOND)
        self._left: int | None = None
        """Bytes of the current chunk that have not come yet. None between chunks."""
        self._over = False
        """True after the last chunk."""

    def __call__(self, buf: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        """Return the data of all chunks in `buf`, or the end of the body; None when more must
        come."""
        data = bytes(buf)
        position = 0
        parts = []
        number = 0
        while not self._over:
            if self._left is None:
                line_end = data.find(b"\r\n", position)
                if line_end < 0:
                    break
                line = _CHUNK.fullmatch(data, position, line_end)
                if line is None:
                    raise h11.RemoteProtocolError("a chunk without a size")
                self._left = int(line[1], 16)
                position = line_end + 2
                number += 1
                if not self._left:
                    self._over = True
                    break
            part = data[position : position + self._left]
            parts.append(part)
            position += len(part)
            self._left -= len(part)
            if self._left or position + 2 > len(data):
                break
            if not data.startswith(b"\r\n", position):
                raise h11.RemoteProtocolError("a chunk is longer than its size")
            self._left = None
            position += 2
        buf.maybe_extract_at_most(position)
        joined = b"".join(parts)
        if not self._room.take(max(0, number - len(joined) // CHUNK_BYTES)):
            self.refusal = f"too many chunks of less than {CHUNK_BYTES} bytes"
            raise h11.RemoteProtocolError(self.refusal)
        if joined:
            return h11.Data(data=joined)
        if self._over and buf.maybe_extract_lines() is not None:
            return h11.EndOfMessage()
        return None


class _Peer(Http1Connection):
    """One side of the exchanges. What it sends is bounded, whoever it is."""

    def __init__(self, context: Context, report: Report) -> None:
        super().__init__(context)  # type: ignore[call-arg]
        self._report = report

    def _handle_event(self, event: events.Event) -> layer.CommandGenerator[None]:
        yield from super()._handle_event(event)
        if len(self.buf) > HEADER_LIMIT and self.state != self.done:
            reason = f"more than {HEADER_LIMIT} bytes of headers, or behind a message"
            yield from self._refuse(431, reason)

    def read_body(self, event: events.Event) -> layer.CommandGenerator[None]:
        """Read a body, and report one that breaks the protocol."""
        if type(self.body_reader) is ChunkedReader:
            self.body_reader = Chunks()
        for command in super().read_body(event):
            if _is_error(command) and not isinstance(event, events.ConnectionClosed):
                refusal = getattr(self.body_reader, "refusal", "")
                self._tell(refusal or "the body breaks HTTP/1.1")
                self.state = self.done
            yield command

    def _refuse(self, status: int, reason: str) -> layer.CommandGenerator[None]:
        """Refuse what this side sent. `status` is for a client that has no reply yet."""
        raise NotImplementedError

    def _tell(self, reason: str) -> None:
        self._report(self.context, self.request, reason)


def _is_error(command: commands.Command) -> bool:
    errors = (RequestProtocolError, ResponseProtocolError)
    return isinstance(command, ReceiveHttp) and isinstance(command.event, errors)


class _HostSide(_Peer, Http1Client):
    """The side of a host: it gets requests, and sends replies."""

    _interim = 0
    """Number of interim replies to the request."""

    def read_headers(self, event: events.ConnectionEvent) -> layer.CommandGenerator[None]:
        """Read a reply up to its body, and refuse one that is malformed. Interim ones are
        dropped."""
        for command in super().read_headers(event):
            received = command.event if isinstance(command, ReceiveHttp) else None
            if isinstance(received, ResponseHeaders):
                _, mistake = _mistake(received.response)
                status = received.response.status_code
                is_interim = status < 200 and status != 101
                self._interim = self._interim + 1 if is_interim else 0
                if self._interim > INTERIM_COUNT:
                    mistake = f"more than {INTERIM_COUNT} interim replies"
                if mistake:
                    return (yield from self._refuse(502, mistake))
                if is_interim:
                    self.response = None
                    more = events.DataReceived(self.conn, b"")
                    return (yield from self.read_headers(more))
            elif (
                _is_error(command)
                and self.state == self.read_headers
                and not isinstance(event, events.ConnectionClosed)
            ):
                return (yield from self._refuse(502, "not an HTTP/1.1 reply"))
            if not isinstance(command, commands.Log):  # its lines quote what the host sent
                yield command

    def mark_done(
        self,
        *,
        request: bool = False,
        response: bool = False,
    ) -> layer.CommandGenerator[None]:
        """Note that a message is complete.

        A reply may be complete before its request: then wait, so that later bytes are not read as a
        second reply.
        """
        yield from super().mark_done(request=request, response=response)
        if self.response_done and not self.request_done:
            self.state = self.wait

    def _refuse(self, status: int, reason: str) -> layer.CommandGenerator[None]:
        self._tell(reason)
        self.state = self.done
        yield commands.CloseConnection(self.conn)
        if self.stream_id is not None:
            error = ResponseProtocolError(self.stream_id, reason, ResponseProtocolError.code)
            yield ReceiveHttp(error)


class _ClientSide(_Peer, Http1Server):
    """The side of a client: it sends requests, and gets replies."""

    def read_headers(self, event: events.ConnectionEvent) -> layer.CommandGenerator[None]:
        """Read a request up to its body, and refuse one that is malformed."""
        for command in super().read_headers(event):
            if isinstance(command, commands.SendData):
                # mitmproxy's answer to bytes that it cannot parse
                return (yield from self._refuse(400, "not an HTTP/1.1 request"))
            if isinstance(command, ReceiveHttp) and isinstance(command.event, RequestHeaders):
                status, mistake = _mistake(command.event.request)
                if mistake:
                    return (yield from self._refuse(status, mistake))
            if not isinstance(command, commands.Log):  # its lines quote what the client sent
                yield command
        if self.state != self.read_headers:
            return
        begun = bytes(self.buf).lstrip(b"\r\n")
        if begun and isinstance(event, events.ConnectionClosed):
            self._tell("the connection ended within the headers")
        elif begun and not _TOKEN.match(begun):
            yield from self._refuse(400, "not an HTTP/1.1 request")

    def send(self, event: HttpEvent) -> layer.CommandGenerator[None]:
        """Send a part of a response, and report an error of the client that mitmproxy answers by
        itself."""
        if isinstance(event, ResponseProtocolError) and not self.response:
            # a number in mitmproxy 11, an enumeration in mitmproxy 12
            status = getattr(event.code, "http_status_code", lambda: event.code)()
            if status is not None and status < 500 and status != _SILENT:
                self._tell(event.message)
        yield from super().send(event)

    def _refuse(self, status: int, reason: str) -> layer.CommandGenerator[None]:
        self._tell(reason)
        if not self.response:
            error = {"message": reason, "type": "invalid_request_error", "code": status}
            headers = {"content-type": "application/json", "connection": "close"}
            response = http.Response.make(status, json.dumps({"error": error}), headers)
            yield commands.SendData(self.conn, http1.assemble_response(response))
        yield commands.CloseConnection(self.conn)
        if self.state != self.wait:
            self.state = self.done


def _mistake(message: http.Request | http.Response) -> tuple[int, str]:
    """Return the status and the reason for which a message is refused; for a good one, no
    reason."""
    names = [name for name, _ in message.headers.fields]
    texts = [value for _, value in message.headers.fields]
    if message.http_version not in ("HTTP/1.0", "HTTP/1.1"):
        return 505, f"{message.http_version} is not served"
    if len(names) > HEADER_COUNT:
        return 431, f"{len(names)} headers, the limit is {HEADER_COUNT}"
    if sum(map(len, names + texts)) > HEADER_LIMIT:
        return 431, f"more than {HEADER_LIMIT} bytes of headers"
    if isinstance(message, http.Request):
        names.append(message.data.method)
        texts.append(message.data.path)
    else:
        texts.append(message.data.reason)
    if not all(map(_TOKEN.fullmatch, names)):
        return 400, "a method or the name of a header has a character that is not allowed"
    if any(map(_BROKEN.search, texts)):
        return 400, "a path or the value of a header has a line break or a NUL"
    if isinstance(message, http.Request) and _is_odd_connect(message):
        return 400, "a CONNECT with a body"
    try:
        validate_headers(message)
    except ValueError as error:
        return 400, str(error)
    return 0, ""


def _is_odd_connect(request: http.Request) -> bool:
    if request.data.method.upper() != b"CONNECT":
        return False
    return (
        request.data.method != b"CONNECT"
        or request.headers.get("content-length", "0") != "0"
        or "transfer-encoding" in request.headers
    )
