"""An agent tries to reach a host that it may not reach, or to speak another protocol with one that
it may."""

import socket
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from mitmproxy.certs import CertStore

from tests.security.raw import (
    News,
    ask,
    call,
    credentials,
    listening,
    over_tls,
    read,
    read_head,
    request,
    tunnel,
    upgrade,
)

SECRET = b"the weights of tomorrow"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: "
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
OPTIONS = [
    "rolltap_allow=127.0.0.3:*",
    "rawtcp=true",
    "ssl_verify_upstream_trusted_ca={folder}/conf/mitmproxy-ca-cert.pem",
]


@pytest.fixture
def outside():
    """Yield an allowed host."""
    with listening("127.0.0.3", answer=OK) as outside:
        yield outside


@pytest.mark.parametrize("port", [53, 5353])
def test_a_dns_message_leaves_by_no_port(recorder, news, port):
    message = (
        b"\x00\x1c\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06secret\x00\x00\x01\x00\x01"
    )
    try:
        with listening("127.0.0.3", port, SECRET) as outside:
            assert SECRET not in ask(recorder, message, read, tunnel_to=outside.name)
            assert outside.connections == []
    except PermissionError:
        pytest.skip(f"this user may not listen on port {port}")
    assert news() == [("s1", f"not an HTTP/1.1 request (port {port})")]
    assert recorder.rows("events")[-1]["host"] == "127.0.0.3"


@pytest.mark.parametrize(
    "sent",
    [
        SECRET,
        SECRET + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        bytes(range(256)),
        b"\x16\x03\x01" + SECRET,
    ],
    ids=["bytes", "lines", "ssh", "binary", "nearly TLS"],
)
def test_what_is_not_http_leaves_by_no_tunnel(recorder, news, outside, sent):
    with tunnel(recorder, outside.name, sent) as connection:
        connection.shutdown(socket.SHUT_WR)
        read(connection)
    assert outside.connections == []
    assert len(news()) == 1


@pytest.mark.parametrize(
    "preface",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    ],
    ids=["preface", "version", "tunnel in a tunnel"],
)
def test_a_tunnel_carries_http_1_and_no_other_tunnel(recorder, news, outside, preface):
    with tunnel(recorder, outside.name, preface) as connection:
        assert read_head(connection).split()[1] in (b"505", b"400")
    assert outside.connections == []
    assert len(news()) == 1


def test_a_name_of_this_machine_is_not_reached_by_a_pattern_that_matches_it(start):
    """Nobody learns whether a port is open: it is not connected to."""
    recorder = start("rolltap_allow=*:*")
    news = News(recorder)
    for host in ("localhost", "127.0.0.1"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            name = f"{host}:{port}"
            opened = ask(recorder, request("/", host=name), read, tunnel_to=name)
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
        closed = ask(recorder, request("/", host=name), read, tunnel_to=name)
        assert opened.startswith(b"HTTP/1.1 502")
        assert opened == closed
        first, second = news()[-2:]
        assert first == second
        advice = f"which is not public: allow 127.0.0.1:{port}"
        assert advice in first[1].replace("::1", "127.0.0.1")
    assert len(news()) == 4


def test_a_connection_to_an_allowed_host_is_used_again(recorder):
    with socket.create_server(("127.0.0.3", 0)) as server:
        own = f"127.0.0.3:{server.getsockname()[1]}"
        with tunnel(recorder, own) as connection:
            upstream = None
            for _ in range(2):
                connection.sendall(f"GET / HTTP/1.1\r\nHost: {own}\r\n\r\n".encode())
                upstream = upstream or server.accept()[0]
                upstream.settimeout(120)
                assert read_head(upstream).startswith(b"GET / ")
                upstream.sendall(OK)
                assert read_head(connection).startswith(b"HTTP/1.1 200")
                assert connection.recv(2) == b"ok"
            upstream.close()


def test_a_name_with_several_addresses_is_reached_at_one_that_answers(start):
    recorder = start("rolltap_allow=localhost:*")
    with listening("127.0.0.1", answer=OK) as outside:
        own = f"localhost:{outside.port}"
        assert ask(recorder, request("/", host=own), read, tunnel_to=own).endswith(b"\r\n\r\nok")


def test_an_allowed_host_is_reached_by_its_own_name_only(recorder, news, outside):
    own = outside.name
    for host in (own, own.upper(), "127.0.0.3"):
        reply = ask(recorder, request("/", host=host), read, tunnel_to=own)
        assert reply.endswith(b"\r\n\r\nok")
    wrong = ["evil.example", "127.0.0.3:1", "127.0.0.3.evil.example", "@", "[::1"]
    wrong.append(f"{own}\r\nHost: evil.example")
    for host in wrong:
        head = ask(recorder, request("/", host=host), tunnel_to=own)
        assert head.split()[1] in (b"421", b"400"), (host, head)
    evil = request("http://evil.example/", host=own)
    assert ask(recorder, evil, tunnel_to=own).startswith(b"HTTP/1.1 421")
    evil = request(f"http://{own}/", host="evil.example", more=credentials())
    assert ask(recorder, evil).startswith(b"HTTP/1.1 421")
    assert len(outside.connections) == 3
    assert len(news()) == len(wrong) + 2


def test_the_name_in_tls_must_be_the_name_of_the_tunnel(recorder, news, outside):
    with over_tls(tunnel(recorder, outside.name), recorder, "evil.example") as connection:
        connection.sendall(request("/", host=outside.name))
        assert read_head(connection).startswith(b"HTTP/1.1 421")
    assert outside.connections == []
    assert news() == [("s1", "the request names another host: evil.example")]


@pytest.mark.parametrize(("owner", "status"), [("127.0.0.3", b"200"), ("127.0.0.4", b"502")])
def test_a_host_must_own_the_certificate_of_the_name_that_is_allowed(
    recorder, tmp_path, owner, status
):
    store = CertStore.from_store(recorder.confdir, "mitmproxy", 2048)
    made = store.get_cert(None, [x509.IPAddress(ip_address(owner))])
    key = made.privatekey.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificate = tmp_path / "server.pem"
    certificate.write_bytes(key + made.cert.to_pem())
    with (
        listening("127.0.0.3", answer=OK, certificate=certificate) as outside,
        over_tls(tunnel(recorder, outside.name), recorder, "127.0.0.3") as connection,
    ):
        connection.sendall(request("/", host=outside.name))
        assert read_head(connection).split()[1] == status


def test_a_model_call_needs_no_name(recorder):
    text = call().replace(b"http://api.openai.com/", b"/")
    text = text.replace(b"Host: api.openai.com", b"Host: other.example")
    with over_tls(tunnel(recorder, "api.openai.com:443"), recorder, "evil.example") as connection:
        connection.sendall(text)
        assert read_head(connection).startswith(b"HTTP/1.1 200")
    assert recorder.rows("events")[-1]["host"] == "api.openai.com"


@pytest.mark.parametrize("protocol", ["h2c", "TLS/1.0", "rolltap"])
def test_a_host_cannot_change_the_protocol(recorder, news, protocol):
    switched = SWITCHED + protocol.encode() + b"\r\n\r\n" + SECRET
    more = f"Upgrade: {protocol}\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n".encode()
    with listening("127.0.0.3", answer=switched) as outside:
        sent = request("/", host=outside.name, more=more) + SECRET
        assert SECRET not in ask(recorder, sent, read, tunnel_to=outside.name)
        (received,) = outside.connections
    for secret in (b"upgrade", b"http2-settings", SECRET):
        assert secret not in received.lower()
    assert news() == [("s1", f"a change to {protocol}")]


def test_http_2_is_not_agreed_on(recorder):
    connection = tunnel(recorder, "a.example:443")
    with over_tls(connection, recorder, "a.example", ["h2", "http/1.1"]) as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"


def test_a_websocket_is_opened_to_no_host(recorder, news):
    with listening("127.0.0.3", answer=SWITCHED + b"websocket\r\n\r\n\x81\x03abc") as outside:
        api = "api.openai.com/v1"
        for target in (f"{outside.name}/", f"{api}/responses", f"{api}/realtime"):
            assert ask(recorder, upgrade(target)).startswith(b"HTTP/1.1 426")
        assert outside.connections == []
    assert news() == [("s1", "a WebSocket, which is not served")] * 2
    [(session, detail)] = news("uncaptured")
    assert session == "s1"
    assert "Realtime" in detail
