"""Both ends of a connection through a relay, of Python's standard library alone.

`serve` prints its port and answers until it is killed. `ask HOST:PORT ROUND_TRIPS CONNECTIONS
MEGABYTES` prints what it measured as JSON.
"""

import json
import socket
import socketserver
import struct
import sys
import time

MESSAGE = b"x" * 1024
"""Payload of a round trip."""
_BLOCK = bytes(1 << 16)
_HEAD = struct.Struct("!cQ")
"""Request: `e` to get as many bytes back, `d` to download them, `u` to upload them, and their
number."""


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        connection = self.request
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := connection.recv(_HEAD.size, socket.MSG_WAITALL):
            kind, size = _HEAD.unpack(head)
            if kind == b"e":
                connection.sendall(_receive(connection, size))
            elif kind == b"d":
                _send(connection, size)
            else:
                _receive(connection, size)
                connection.sendall(b"k")


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64


def _send(connection, size):
    for start in range(0, size, len(_BLOCK)):
        connection.sendall(_BLOCK[: size - start])


def _receive(connection, size):
    """Receive `size` bytes. Return the last part of them, all of a message."""
    part = b""
    while size:
        part = connection.recv(
            min(size, len(_BLOCK)), socket.MSG_WAITALL if size <= len(_BLOCK) else 0
        )
        if not part:
            raise SystemExit("the connection was closed")
        size -= len(part)
    return part


def ask(address, round_trips, connections, megabytes):
    """Return seconds of each round trip and of each new connection with one, and bytes a second of
    both directions."""
    with _connect(address) as connection:
        _echo(connection)
        trips = [_timed(_echo, connection) for _ in range(round_trips)]
        size = megabytes * 1_000_000
        down = _timed(_download, connection, size)
        up = _timed(_upload, connection, size)
    opened = [_timed(_open, address) for _ in range(connections)]
    return {
        "round_trips": trips,
        "connections": opened,
        "download": size / down,
        "upload": size / up,
    }


def _connect(address):
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _open(address):
    with _connect(address) as connection:
        _echo(connection)


def _echo(connection):
    connection.sendall(_HEAD.pack(b"e", len(MESSAGE)) + MESSAGE)
    if _receive(connection, len(MESSAGE)) != MESSAGE:
        raise SystemExit("another message came back")


def _download(connection, size):
    connection.sendall(_HEAD.pack(b"d", size))
    _receive(connection, size)


def _upload(connection, size):
    connection.sendall(_HEAD.pack(b"u", size))
    _send(connection, size)
    _receive(connection, 1)


def _timed(function, *arguments):
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        with Server(("127.0.0.1", 0), Handler) as server:
            print(server.server_address[1], flush=True)
            server.serve_forever()
    else:
        print(json.dumps(ask(sys.argv[2], *map(int, sys.argv[3:]))))
