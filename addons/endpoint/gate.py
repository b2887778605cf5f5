"""The gate of the endpoint's port: it lets in only connections that the proxy has opened.

Every process of this machine can connect to a port on loopback. The proxy chooses its own port for each connection
before it connects, so the endpoint knows whom to expect, and closes all others before they can send a byte.
"""

import asyncio
import socket
from collections.abc import Callable


class Expected:
    """The local ports of the proxy's connections to the endpoint."""

    def __init__(self) -> None:
        self._ports: set[int] = set()

    def choose(self) -> tuple[str, int]:
        """Return a free local address for a connection that is about to be opened, and expect it.

        Raises `OSError` when none is free. If another process takes the port first, connecting fails.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address: tuple[str, int] = free.getsockname()
        self._ports.add(address[1])
        return address

    def forget(self, port: int) -> None:
        """Expect a connection no longer: it has been closed, or could not be opened."""
        self._ports.discard(port)

    def __contains__(self, port: object) -> bool:
        return port in self._ports


class Gate(asyncio.Protocol):
    """Hands an expected connection to the protocol that `make` returns, and closes any other."""

    def __init__(self, expected: Expected, make: Callable[[], asyncio.Protocol]) -> None:
        self._expected, self._make = expected, make

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Look at the other end of a new connection."""
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        if peer is None or peer[1] not in self._expected:
            transport.abort()
            return
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
