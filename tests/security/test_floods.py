"""An agent sends many tiny pieces, each of which costs the recorder more than its bytes."""

import json
import os
import socket
import struct
from pathlib import Path

import pytest

from rolltap.addons.endpoint.server import Expected
from tests.recorder_process import HELLO
from tests.security.raw import address, ask, call, credentials, plain, read, read_head, tunnel, upgrade

MEGABYTE = 1 << 20
CHUNKED = call().partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
RECORD = b"\x16\x03\x01\x00\x01"


OPTIONS = ["rolltap_websocket=true"]


def send(connection, data):
    """Send `data`, and return True unless the other side closed the connection before the end."""
    try:
        connection.sendall(data)
        return not read(connection)
    except ConnectionError:
        return False


@pytest.mark.parametrize("in_tunnel", [False, True], ids=["proxy", "tunnel"])
def test_a_first_byte_that_looks_like_tls_does_not_lead_past_the_bounds(recorder, news, in_tunnel):
    with tunnel(recorder, "api.openai.com:53") if in_tunnel else plain(recorder) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"\x16")
        # the second byte is sent when the first one was read
        while unread(recorder, connection):
            pass
        connection.sendall(b"a / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read(connection).startswith(b"HTTP/1.1 400")
    assert [detail for _, detail in news()] == ["not an HTTP/1.1 request"]


def unread(recorder, connection):
    """Return the number of bytes that the recorder has not read from a connection."""
    host, port = connection.getsockname()
    peer = f"{struct.unpack('<I', socket.inet_aton(host))[0]:08X}:{port:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[2] == peer)


@pytest.mark.parametrize("in_tunnel", [False, True], ids=["proxy", "tunnel"])
def test_a_client_hello_is_bounded(recorder, news, in_tunnel):
    hello = b"".join(RECORD + bytes([byte]) for byte in b"\x01\xff\xff\xff") + (RECORD + b"\0") * (MEGABYTE // 6)
    with tunnel(recorder, "a.example:443") if in_tunnel else plain(recorder) as connection:
        send(connection, hello)
    ((_, detail),) = news()
    assert "a ClientHello over 16384 bytes or 32 pieces" in detail


def in_chunks_of_one_byte(**fields):
    text = json.dumps({**HELLO, **fields}).encode()
    return CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"


def test_only_few_chunks_of_one_byte_are_a_body(recorder, news):
    assert ask(recorder, in_chunks_of_one_byte()).startswith(b"HTTP/1.1 200")
    assert ask(recorder, in_chunks_of_one_byte(metadata={"long": "x" * 100_000}), read) == b""
    assert [detail for _, detail in news()] == ["chunks of less than 64 bytes"]


@pytest.mark.parametrize(
    "frame", [b"\x89\x80mask", b"\x8a\x80mask", b"\x00\x81mask0"], ids=["ping", "pong", "fragment"]
)
def test_websocket_frames_without_end_close_the_connection(recorder, news, frame):
    with plain(recorder) as connection:
        connection.sendall(upgrade("api.openai.com/v1/responses"))
        assert read_head(connection).startswith(b"HTTP/1.1 101")
        assert not send(connection, b"\x01\x81mask0" + frame * 200_000) or read(connection) == b""
    assert [detail for _, detail in news()] == ["too many WebSocket frames"]


@pytest.mark.parametrize("line", [b"A: b\rC: d", b"A: b\0", b"A: b\r\n folded"], ids=["CR", "NUL", "folded"])
def test_a_value_with_a_line_break_or_a_nul_is_refused(recorder, news, line):
    head = b"GET http://a.example/ HTTP/1.1\r\n" + line + b"\r\n" + credentials() + b"\r\n"
    assert ask(recorder, head).startswith(b"HTTP/1.1 400")
    assert [detail for _, detail in news()] == ["a path or the value of a header has a line break or a NUL"]


def test_the_endpoint_talks_to_nobody_but_the_proxy(recorder):
    folder = Path("/proc", str(recorder.process.pid), "fd")
    sockets = {os.readlink(link) for link in folder.iterdir() if link.is_symlink()}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    (port,) = {int(local.split(":")[1], 16) for local in own} - {address(recorder)[1]}
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        assert read(connection) == b""


def test_a_port_that_the_proxy_chooses_is_free():
    socket.create_server(Expected().choose()).close()
