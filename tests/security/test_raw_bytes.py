"""Any bytes at the proxy: CONNECT targets, headers, chunks, upgrades, garbage. Its sockets are
watched."""

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.deep import examples
from tests.recorder_process import CHAT, HELLO
from tests.security.raw import call, credentials, listening, over_tls, plain, recording, tunnel

WATCH = """
import os, sys

def watch(event, arguments, file=os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.gethostbyname"):
        address = arguments[1] if event in ("socket.connect", "socket.sendto") else arguments[:2]
        os.write(file, f"{event} {address[0]} {address[1]}\\n".encode("utf-8", "backslashreplace"))

sys.addaudithook(watch)
"""
"""A script that writes each address which the process looks up or connects to, as Python passes it
to the system."""


@pytest.fixture(scope="module")
def outside():
    """Yield an allowed host and one that is not. The allowed one answers with a change of
    protocol."""
    switched = (
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade:"
        b" websocket\r\n\r\n\x81\x03abc"
    )
    with (
        listening("127.0.0.3", answer=switched) as allowed,
        listening("127.0.0.4", allowed.port) as other,
    ):
        yield allowed, other


@pytest.fixture(scope="module")
def recorder(tmp_path_factory, tokenizer, tokenizer_folder, outside):
    folder = tmp_path_factory.mktemp("raw")
    script, watched = folder / "watch.py", folder / "watched"
    script.write_text(WATCH)
    more = {"env": {"WATCHED": str(watched)}, "scripts": ["-s", script]}
    with recording(
        folder, tokenizer, tokenizer_folder, "rolltap_allow=127.0.0.3:*", **more
    ) as recorder:
        yield recorder
        engine = recorder.engine_url.removeprefix("http://").replace(":", " ")
        assert recorder.stop() == 0
    log = recorder.log()
    assert "Traceback" not in log
    assert "crashed" not in log
    assert outside[1].connections == []
    lines = {line.partition(" ")[2] for line in watched.read_text().splitlines()}
    endpoint = {line for line in lines if line.startswith("127.0.0.1 ")} - {engine}
    allowed = {line for line in lines if line.startswith("127.0.0.3 ")}  # at each of its ports
    assert lines <= {engine, *endpoint, *allowed}
    assert len(endpoint) <= 2  # the endpoint; the proxy's own address, if it is looked up to listen


HOSTS = """127.0.0.3
127.0.0.4
evil.example
[::1]
[::ffff:127.0.0.4]
127.0.0.3.
é
127.0.0.4#127.0.0.3
127.0.0.3@127.0.0.4
2130706436
0x7f.0.0.4

*
\x00
a b""".splitlines()
PORTS = [":0", ":53", ":443", ":65536", ":-1", ":٣"]


def targets(port):
    """Return texts that name a host and a port."""
    hosts = st.sampled_from([*HOSTS, "x" * 70])
    ends = st.sampled_from([*PORTS, "", f":{port}", f":{port}:{port}"])
    return st.builds(lambda host, end: (host + end).encode(), hosts, ends)


LINES = b"""Transfer-Encoding: chunked
Transfer-Encoding: gzip, chunked
Transfer-Encoding: \xff
Content-Length: 5
Content-Length: -1
Content-Length: 99999999999999999999
Content-Length: 5, 5
Content-Encoding: zstd
Expect: 100-continue
Connection: close
Connection: upgrade
Upgrade: h2c
Upgrade: websocket
Sec-WebSocket-Version: 13
Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==
Sec-WebSocket-Extensions: permessage-deflate
HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA
Trailer: x
x-rolltap-route: end
Cookie: \x1b[2J
A: \xff\x00\xfe
 folded
No colon
: no name
Sp ace: x""".split(b"\n")
BODIES = [
    b"hello",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"5\r\nhello\r\n0\r\nx: y\r\n\r\n",
    b"FFFFFFFFFFFFFFFF\r\nx",
    b"-5\r\nhello\r\n",
    b"5;x=\xff\r\nhello\r\n0\r\n\r\n",
    b"\x81\x85\x00\x00\x00\x00hello",
    b"\x01\xff\x00\x00\x00\x00\x7f\xff\xff\xff\x00\x00\x00\x00",
    b"\x16\x03\x01\x00\xff\x01",
    b"\x16\x03\x01\x00\x04\x01\x00\x00\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"",
]


METHODS = [b"GET", b"POST", b"CONNECT", b"connect", b"HEAD", b"OPTIONS", b"G\xff", b"", b"PRI"]
PATHS = [b"/", b"/v1/chat/completions", b"/v1/responses", b"/\xff?\x1b", b"*", b"//", b"/../"]
VERSIONS = [b"HTTP/1.1"] * 4 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"", b"http/1.1"]


@st.composite
def heads(draw, port):
    """Return a request up to its body."""

    def one_of(*choices):
        return draw(st.sampled_from(choices))

    path = one_of(*PATHS)
    form = one_of(b"%b", b"http://%b" + path, b"https://%b" + path, b"ftp://%b/", path + b"%.0b")
    target = form % draw(targets(port))
    lines = [b"%b %b %b" % (one_of(*METHODS), target, one_of(*VERSIONS))]
    lines.append(b"Host: " + draw(targets(port)))
    lines += draw(st.lists(st.sampled_from(LINES), max_size=4))
    if draw(st.booleans()):
        lines.append(credentials().strip())
    end = one_of(b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r")
    return end.join([*lines, b"", b""])


def conversations(port):
    """Return what a client sends: pieces that each begin or continue a request."""
    pieces = st.one_of(
        heads(port), st.sampled_from(BODIES), st.binary(max_size=50), st.just(call())
    )
    return st.lists(pieces, min_size=1, max_size=4)


def talk(connection, pieces):
    """Send `pieces` and read until the other side closes the connection, or is silent."""
    connection.settimeout(0.5)
    with connection, suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SETTINGS = examples(120, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(data=st.data())
def test_no_bytes_crash_the_proxy_or_reach_another_host(recorder, outside, data):
    pieces = data.draw(conversations(outside[0].port))
    talk(plain(recorder), pieces)


@SETTINGS
@given(data=st.data(), port=st.sampled_from(["", "53", "443"]))
def test_no_bytes_in_a_tunnel_do(recorder, outside, data, port):
    host = data.draw(st.sampled_from(["127.0.0.3", "127.0.0.4", "evil.example"]))
    pieces = data.draw(conversations(outside[0].port))
    if port == "53" and host == "127.0.0.3":
        host = "127.0.0.4"  # nothing listens there
    talk(tunnel(recorder, f"{host}:{port or outside[0].port}"), pieces)


@SETTINGS
@given(data=st.data())
def test_no_bytes_over_tls_do(recorder, outside, data):
    host = data.draw(st.sampled_from(["127.0.0.4", "evil.example"]))
    name = data.draw(
        st.sampled_from(["127.0.0.3", "evil.example", "x" * 63, "x_y", "*.example", "-"])
    )
    pieces = data.draw(conversations(outside[0].port))
    talk(over_tls(tunnel(recorder, f"{host}:{outside[0].port}"), recorder, name), pieces)


@pytest.mark.parametrize(
    "sent",
    [
        call().replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nX")
        + b"0\r\nA: trailer\r\n\r\n",
        b"POST http://a.example/ HTTP/1.1\r\n" + CHUNKED + b"1\r\nx\r\n0\r\nA: trailer\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nContent-Length: 5\r\n" + credentials() + b"\r\nhello",
        b"CONNECT a.example:443 HTTP/1.1\r\n" + credentials() + CHUNKED + b"1\r\nx\r\n0\r\n\r\n",
        b"connect http://a.example/ HTTP/1.1\r\n" + credentials() + b"\r\n",
    ],
)
def test_bytes_that_crashed_it_are_refused(recorder, sent):
    before = len(recorder.rows("events"))
    talk(plain(recorder), [sent])
    assert {event["kind"] for event in recorder.rows("events")[before:]} <= {"refused", "rejected"}


def test_no_socket_of_the_process_has_another_end(recorder, outside):
    with recorder.client() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
        folder = Path("/proc", str(recorder.process.pid))
        links = [os.readlink(link) for link in (folder / "fd").iterdir() if link.is_symlink()]
        inodes = {
            link.removeprefix("socket:[").rstrip("]")
            for link in links
            if link.startswith("socket:")
        }
        rows = [line.split() for line in (folder / "net" / "tcp").read_text().splitlines()[1:]]
        ends = {row[2].split(":")[0] for row in rows if row[9] in inodes and row[3] == "01"}
    assert ends <= {"0100007F", "0300007F"}  # 127.0.0.1 and 127.0.0.3
