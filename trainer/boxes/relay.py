"""The one way out of a box: a port on the box's own loopback that leads to the recorder."""

import asyncio
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Self

PORT = 3128
"""Port of a box's loopback that leads to the recorder."""
_SCRIPT = Path(__file__).with_name("inside") / "listener.py"
_READ_BYTES = 1 << 16
_CONNECTIONS = 128
"""Most connections of a box at a time. Further ones wait."""


class Relay:
    """A relay from 127.0.0.1:`port` in the network namespace of process `pid` to `proxy` (`HOST:PORT`) in that of this
    process. An async context manager: outside of its block there is no way out.

    The box needs no program for it: a short-lived process joins the namespace, opens the port, and hands the listening
    socket to this process. Bytes are passed on as they are, and so is the end of each direction.

    Entering raises `OSError` when the namespace cannot be joined or the port is taken.
    """

    def __init__(self, pid: int, proxy: str, port: int = PORT) -> None:
        self._pid, self._port = pid, port
        host, _, number = proxy.rpartition(":")
        self._proxy = (host.strip("[]"), int(number))
        self._connections: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_CONNECTIONS)

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.to_thread(listening_socket, self._pid, self._port)
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._accepting, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError:  # the client has gone, or this process has no descriptor left for a moment
                self._slots.release()
                await asyncio.sleep(0.05)
                continue
            connection = asyncio.create_task(self._connect(client))
            self._connections.add(connection)
            connection.add_done_callback(partial(self._connection_ended, client))

    def _connection_ended(self, client: socket.socket, connection: asyncio.Task[None]) -> None:
        client.close()
        self._connections.discard(connection)
        self._slots.release()

    async def _connect(self, client: socket.socket) -> None:
        with socket.socket(socket.AF_INET6 if ":" in self._proxy[0] else socket.AF_INET) as server:
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await asyncio.get_running_loop().sock_connect(server, self._proxy)
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(_pass_on(client, server))
                    directions.create_task(_pass_on(server, client))
            except* OSError:
                pass  # a connection that breaks is closed at both ends


async def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass on bytes until the source has no more, then tell the target. A broken connection ends both directions."""
    loop = asyncio.get_running_loop()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    while number := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(target, view[:number])
    target.shutdown(socket.SHUT_WR)


def listening_socket(pid: int, port: int) -> socket.socket:
    """Return a non-blocking socket that listens on 127.0.0.1:`port` in the network namespace of process `pid`.

    Raises `OSError`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, "-I", "-S", str(_SCRIPT), str(theirs.fileno()), str(pid), str(port)]
            process = subprocess.Popen(command, env={}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        message, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
        process.wait()
    if not descriptors:
        why = message.decode(errors="replace") or f"listener.py ended with status {process.returncode}"
        raise OSError(f"port {port} cannot be opened in the network namespace of process {pid}: {why}")
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    os.set_inheritable(listener.fileno(), False)
    return listener
