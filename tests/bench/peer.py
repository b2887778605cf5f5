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

_BLOCK = bytes(1 << 16)
_HEAD = struct.Struct("!QQ")
"""Request: how many bytes come with it, and how many are to come back."""


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := self.request.recv(_HEAD.size, socket.MSG_WAITALL):
            given, asked = _HEAD.unpack(head)
            _receive(self.request, given)
            _send(self.request, asked)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64


def _send(connection, size):
    for start in range(0, size, len(_BLOCK)):
        connection.sendall(_BLOCK[: size - start])


def _receive(connection, size):
    while size:
        # all of a message at once
        flags = socket.MSG_WAITALL if size <= len(_BLOCK) else 0
        part = connection.recv(min(size, len(_BLOCK)), flags)
        if not part:
            raise SystemExit("the connection was closed")
        size -= len(part)


def ask(address, round_trips, connections, megabytes):
    """Return seconds of each round trip and of each new connection with one, and bytes a second of
    both directions."""
    size = megabytes * 1_000_000
    with _connect(address) as connection:
        _trip(connection)
        trips = [_timed(_trip, connection) for _ in range(round_trips)]
        down = _timed(_trip, connection, 0, size)
        up = _timed(_trip, connection, size, 1)
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
        _trip(connection)


def _trip(connection, given=1024, asked=1024):
    first = min(given, len(_BLOCK))
    connection.sendall(_HEAD.pack(given, asked) + _BLOCK[:first])
    _send(connection, given - first)
    _receive(connection, asked)


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
