"""Raw connections to the proxy of a recorder, and servers that must never see one."""

import base64
import json
import socket
import ssl
import threading
from contextlib import contextmanager, suppress

from tests.recorder_process import HELLO, Recorder
from tests.scripted_engine import Say, ScriptedEngine


@contextmanager
def recording(folder, tokenizer, tokenizer_folder, *extra, **how):
    """Yield a recorder that several tests share. Its engine says `Hi.` to everything."""
    with ScriptedEngine(tokenizer) as engine:
        engine.otherwise = lambda body: Say("Hi.")
        recorder = Recorder(folder, engine.url, tokenizer_folder, *extra, **how)
        recorder.engine_url = engine.url
        yield recorder
        if recorder.process.poll() is None:
            recorder.stop()


class News:
    """The events of a recorder since this object was made."""

    def __init__(self, recorder):
        self._recorder = recorder
        self._before = len(recorder.rows("events"))

    def __call__(self, kind="refused", session=None):
        """Return session and detail of each new event of `kind`, of one session or of all."""
        rows = self._recorder.rows("events")[self._before :]
        found = [(row["session_id"], row["detail"]) for row in rows if row["kind"] == kind]
        return [event for event in found if session in (None, event[0])]


def address(recorder):
    host, port = recorder.address.split(":")
    return host, int(port)


def credentials(user="s1", password="x"):
    given = base64.b64encode(f"{user}:{password}".encode())
    return b"Proxy-Authorization: Basic " + given + b"\r\n"


def request(target, *, host=None, more=b""):
    """Return the bytes of a request for a path, or, without a tunnel, for an address."""
    host = host or target.removeprefix("http://").partition("/")[0]
    head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    return head.encode() + more + b"\r\n"


def plain(recorder):
    """Return a connection to the proxy. A read of it fails after a minute without data."""
    return socket.create_connection(address(recorder), timeout=60)


def read(connection):
    """Return all that arrives until the other side closes the connection, or resets it."""
    received = b""
    with suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def read_head(connection):
    """Return a reply up to the end of its headers, or all that came before the end of the
    connection."""
    received = b""
    with suppress(ConnectionError):
        while not received.endswith(b"\r\n\r\n") and (byte := connection.recv(1)):
            received += byte
    return received


def ask(recorder, sent, read=read_head, *, tunnel_to=None):
    """Return what is read after bytes on a connection of their own, or in a tunnel."""
    with tunnel(recorder, tunnel_to) if tunnel_to else plain(recorder) as connection:
        connection.sendall(sent)
        return read(connection)


def tunnel(recorder, authority, more=b"", user="s1"):
    """Return a connection in which CONNECT has succeeded."""
    connection = plain(recorder)
    head = f"CONNECT {authority} HTTP/1.1\r\n".encode() + credentials(user)
    connection.sendall(head + b"\r\n" + more)
    head = read_head(connection)
    assert head.startswith(b"HTTP/1.1 200"), head
    return connection


def over_tls(connection, recorder, sni, alpn=("http/1.1",)):
    """Return a connection of TLS that was made through `connection`. The name in the certificate is
    not compared."""
    context = ssl.create_default_context(cafile=recorder.confdir / "mitmproxy-ca-cert.pem")
    context.check_hostname = False
    context.set_alpn_protocols(list(alpn))
    return context.wrap_socket(connection, server_hostname=sni)


HEAD = b"POST http://api.openai.com/v1/chat/completions HTTP/1.1\r\nHost: api.openai.com\r\n"


def call(text="Hello", user="s1", **fields):
    """Return the bytes of a model call without a tunnel."""
    body = json.dumps({**HELLO, "messages": [{"role": "user", "content": text}], **fields}).encode()
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return HEAD + credentials(user) + length + body


def upgrade(url):
    """Return the bytes that ask for a WebSocket."""
    head = f"GET http://{url} HTTP/1.1\r\nHost: {url.partition('/')[0]}\r\n".encode()
    head += b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    return head + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" + credentials() + b"\r\n"


@contextmanager
def listening(host="127.0.0.1", port=0, answer=b"", certificate=None):
    """Yield a server that answers each connection with `answer`, after the first bytes, and keeps
    what it received."""
    server = Server(host, port, answer, certificate)
    yield server
    server.close()


class Server:
    """A server on a loopback address. `connections` has what each connection sent."""

    def __init__(self, host, port, answer, certificate):
        self._socket = socket.create_server((host, port))
        self.host = host
        self.port = self._socket.getsockname()[1]
        self.name = f"{host}:{self.port}"
        self.answer = answer
        self.connections = []
        self._tls = None
        if certificate:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(certificate)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection):
        position = len(self.connections)
        self.connections.append(b"")
        with suppress(OSError), self._secured(connection) as connection:
            while data := connection.recv(65536):
                if not self.connections[position]:
                    connection.sendall(self.answer)
                self.connections[position] += data

    def _secured(self, connection):
        return self._tls.wrap_socket(connection, server_side=True) if self._tls else connection

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)  # or who waits for a connection would go on
        self._socket.close()
