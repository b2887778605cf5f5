"""A TCP relay in front of a service that loses answers and breaks connections when a test says
so."""

import asyncio
from contextlib import asynccontextmanager, suppress


class Relay:
    """Connections to `url` go to `port` of this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.lost = 0
        """Number of the next connections that break when the service answers."""
        self.is_mute = False
        """True to accept connections and never answer."""
        self.connections = 0
        self._opened = asyncio.Condition()

    async def reached(self, connections: int) -> None:
        """Return when so many connections have been made."""
        async with self._opened:
            await self._opened.wait_for(lambda: self.connections >= connections)

    def cut(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._opened:
            self.connections += 1
            self._opened.notify_all()
        if self.is_mute:
            self._writers.add(writer)
            await reader.read()  # until the client gives up
            writer.close()
            return
        lost, self.lost = self.lost > 0, max(0, self.lost - 1)
        answers, asks = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, asks}
        self._writers |= both

        async def pass_on(source, target) -> None:
            with suppress(ConnectionError):
                while data := await source.read(65536):
                    if lost and source is answers:
                        break
                    target.write(data)
                    await target.drain()
            for each in both:
                each.transport.abort()

        await asyncio.gather(pass_on(reader, asks), pass_on(answers, writer))
        self._writers -= both


@asynccontextmanager
async def relay(port: int):
    """Yield a relay to a port of this machine."""
    passing = Relay(port)
    server = await asyncio.start_server(passing.serve, "127.0.0.1")
    passing.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield passing
        passing.cut()
