import asyncio
import socket
from functools import partial

from rolltap.addons.endpoint.server import Expected, Gate


class Hello(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")


async def test_only_an_expected_connection_is_let_in():
    expected = Expected()
    server = await asyncio.get_running_loop().create_server(partial(Gate, expected, Hello), "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()

        async def received(local=None):
            reader, writer = await asyncio.open_connection(*address, local_addr=local)
            try:
                return await reader.read(5)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        chosen = expected.choose()
        assert await received(chosen) == b"hello"
        assert await received() == b""
        expected.forget(chosen[1])
        assert chosen[1] not in expected
        assert await received(expected.choose()) == b"hello"


def test_a_chosen_port_is_free():
    with socket.create_server(Expected().choose()):
        pass
