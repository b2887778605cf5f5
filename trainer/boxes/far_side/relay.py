"""The way from a box to the recorder, on a machine behind ssh.

Connections at the box's socket are passed on to the socket that ssh forwards.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CONNECTIONS = 128
"""Most connections of a box. The far side has two descriptors for each."""
_BACKLOG = 128
"""Connections of a box that wait until the far side accepts them."""
_CHUNK = 64 << 10


@contextmanager
def relayed(
    recorder: str, loop: asyncio.AbstractEventLoop, listener: socket.socket
) -> Iterator[None]:
    """Pass on the connections at a socket to the one at the path `recorder`: see `BoxSpec.accept`.
    The loop runs in another thread."""
    serving = asyncio.run_coroutine_threadsafe(_Relay(recorder).serve(listener.dup()), loop)
    try:
        yield
    finally:
        serving.cancel()


class _Relay:
    def __init__(self, recorder: str) -> None:
        self._recorder = recorder
        self._connections = 0

    async def serve(self, listener: socket.socket) -> None:
        # the boxes take turns: asyncio accepts as many in a row as its backlog has
        server = await asyncio.start_server(self._accept, sock=listener, backlog=1)
        listener.listen(_BACKLOG)
        async with server:
            await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS:
                await self._connect(reader, writer)
        finally:
            self._connections -= 1
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there_reader, there_writer = await asyncio.open_unix_connection(self._recorder)
            try:
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(_pass_on(reader, there_writer))
                    directions.create_task(_pass_on(there_reader, writer))
            except* OSError:
                pass  # a connection that breaks is closed at both ends
            finally:
                there_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()
