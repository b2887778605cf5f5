"""An agent, or a server of its own, sends many tiny pieces, each of which costs the recorder more
than its bytes."""

import json
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deep import cases
from tests.recorder_process import HELLO
from tests.security.raw import (
    HEAD,
    address,
    ask,
    credentials,
    listening,
    plain,
    read,
    read_head,
    request,
    tunnel,
)

MEGABYTE = 1 << 20
CHUNKED = HEAD + credentials() + b"Transfer-Encoding: chunked\r\n\r\n"
OPTIONS = ["rolltap_allow=127.0.0.3:*"]


@pytest.fixture(params=["proxy", "tunnel"])
def connection(request, recorder):
    """Yield a connection to the proxy, or a tunnel to nobody."""
    opened = plain(recorder) if request.param == "proxy" else tunnel(recorder, "a.example:53")
    with opened:
        yield opened


def test_a_first_byte_that_looks_like_tls_does_not_lead_past_the_bounds(recorder, news, connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"\x16")
    # the second byte is sent when the first one was read
    while unread(connection):
        pass
    connection.sendall(b"a / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read(connection) == b""
    ((_, detail),) = news()
    assert detail.startswith("TLS failed: ")


def unread(connection):
    """Return the number of bytes that the recorder has not read from a connection."""
    host, port = connection.getsockname()
    peer = f"{struct.unpack('<I', socket.inet_aton(host))[0]:08X}:{port:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[2] == peer)


def test_a_client_hello_is_bounded(recorder, news, connection):
    record = b"\x16\x03\x01\x00\x01"
    hello = b"".join(record + bytes([byte]) for byte in b"\x01\xff\xff\xff")
    with suppress(ConnectionError):  # it is closed before the end
        connection.sendall(hello + (record + b"\0") * (MEGABYTE // 6))
    read(connection)
    ((_, detail),) = news()
    assert "a ClientHello over 16384 bytes or 32 pieces" in detail


def test_a_line_of_a_chunk_is_read_in_linear_time(recorder, news):
    assert not ask(recorder, CHUNKED + b"1;" + b" " * 60_000 + b"\n\r\nx\r\n", read)
    assert [detail for _, detail in news()] == ["the body breaks HTTP/1.1"]


def in_chunks_of_one_byte(**fields):
    text = json.dumps({**HELLO, **fields}).encode()
    return CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"


def test_only_few_chunks_of_one_byte_are_a_body(recorder, news):
    assert ask(recorder, in_chunks_of_one_byte()).startswith(b"HTTP/1.1 200")
    assert ask(recorder, in_chunks_of_one_byte(metadata={"long": "x" * 100_000}), read) == b""
    assert [detail for _, detail in news()] == ["too many chunks of less than 16 bytes"]


BREAK = "a path or the value of a header has a line break or a NUL"


@pytest.mark.parametrize(
    "line", [b"A: b\rC: d", b"A: b\0", b"A: b\r\n folded"], ids=["CR", "NUL", "folded"]
)
def test_a_value_with_a_line_break_or_a_nul_is_refused(recorder, news, line):
    sent = request("http://a.example/", more=line + b"\r\n" + credentials())
    assert ask(recorder, sent).startswith(b"HTTP/1.1 400")
    assert [detail for _, detail in news()] == [BREAK]


def test_the_endpoint_talks_to_nobody_but_the_proxy(recorder):
    folder = Path("/proc", str(recorder.process.pid), "fd")
    sockets = {os.readlink(link) for link in folder.iterdir() if link.is_symlink()}
    ports = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
            ports.add(int(row[1].partition(":")[2], 16))
    (port,) = ports - {address(recorder)[1]}
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(CHUNKED + b"1\r\nx\r\n0\r\n\r\n")
        assert read(connection).startswith(b"HTTP/1.1 403")


OK = b"HTTP/1.1 200 OK\r\n"
IN_CHUNKS = OK + b"Transfer-Encoding: chunked\r\n\r\n"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
HEADERS = "more than 65536 bytes of headers, or behind a message"
CUT_OFF = {
    "chunks": (IN_CHUNKS + b"1\r\nx\r\n" * (MEGABYTE // 2), "too many chunks of less than 16"),
    "a chunk line": (IN_CHUNKS + b"1;" + b" " * 60_000 + b"\n\r\nx\r\n", "the body breaks HTTP"),
    "a chunk line without end": (IN_CHUNKS + b"1;" + b" " * MEGABYTE, HEADERS),
    "trailers": (IN_CHUNKS + b"0\r\n" + b"a: b\r\n" * MEGABYTE, HEADERS),
    "a change of protocol": (SWITCHED + b"\r\n" + b"\x89\0" * MEGABYTE, "a change to websocket"),
}
REFUSED = {
    "header lines": (OK + b"a: b\r\n" * MEGABYTE, HEADERS),
    "headers": (OK + b"a: b\r\n" * 200 + b"\r\n", "200 headers, the limit is 100"),
    "a header without end": (OK + b"a: " + b"b" * MEGABYTE, HEADERS),
    "interim replies": (b"HTTP/1.1 103 Early\r\n\r\n" * MEGABYTE, "more than 100 interim replies"),
    "another protocol": (b"SSH-2.0-OpenSSH_9.0\r\n\r\n", "not an HTTP/1.1 reply"),
    "another version": (b"HTTP/2.0 200 OK\r\n\r\n", "HTTP/2.0 is not served"),
    "two lengths": (IN_CHUNKS[:-2] + b"Content-Length: 1\r\n\r\n", "message with both"),
    "a value with a NUL": (OK + b"a: \0\r\n\r\n", BREAK),
}


@pytest.mark.parametrize("kind", [*cases(REFUSED), *cases(CUT_OFF, 0, 4)])
def test_a_flood_of_an_allowed_host_costs_that_exchange(recorder, news, kind):
    answer, why = {**CUT_OFF, **REFUSED}[kind]
    with listening("127.0.0.3", answer=answer) as outside:
        reply = ask(recorder, request(f"http://{outside.name}/", more=credentials()), read)
    if kind in CUT_OFF:
        assert len(reply) < 21 * MEGABYTE
    else:
        assert reply.startswith(b"HTTP/1.1 502")
    ((session_id, detail),) = news()
    assert session_id == "s1"
    assert detail.startswith(why)
    assert recorder.rows("events")[-1]["host"] == "127.0.0.3"


EVENT = b"data: 0123456789ab\n\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
ORDINARY = {
    "short events": (
        IN_CHUNKS + (b"14\r\n" + EVENT + b"\r\n") * 100_000 + b"0\r\n\r\n",
        EVENT,
    ),
    "interim": (INTERIM + OK + b"Content-Length: 1\r\n\r\na", b"a"),
    "trailers": (IN_CHUNKS + b"1\r\na\r\n0\r\nDigest: x\r\n\r\n", b"1\r\na\r\n0\r\n\r\n"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", b"a"),
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_reply_of_an_allowed_host_arrives(recorder, news, kind):
    answer, end = ORDINARY[kind]
    with listening("127.0.0.3", answer=answer) as outside:
        reply = ask(recorder, request(f"http://{outside.name}/", more=credentials()), read)
    status, _, reply = reply.partition(b"\r\n")
    assert b" 200 " in status
    assert end in reply
    assert news() == []


def test_a_reply_that_comes_before_the_end_of_its_request_is_one_reply(recorder, news):
    twice = (OK + b"Content-Length: 1\r\n\r\na") * 2
    with listening("127.0.0.3", answer=twice) as outside, plain(recorder) as connection:
        head = request(f"http://{outside.name}/", more=credentials()).replace(b"GET", b"POST")
        head = head.replace(b"Connection: close", b"Transfer-Encoding: chunked")
        connection.sendall(head + b"1\r\nx\r\n")
        assert read_head(connection).startswith(b"HTTP/1.1 200")
        assert connection.recv(10) == b"a"
        connection.sendall(b"0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert read(connection) == b""
    assert news() == []
