"""mitmproxy's layers for the first bytes of a connection, with bounds."""

from mitmproxy.net.tls import starts_like_tls_record
from mitmproxy.proxy import layer
from mitmproxy.proxy.layer import NextLayer
from mitmproxy.proxy.layers import ClientTLSLayer

_HANDSHAKE = b"\x16"
"""First byte of a TLS record that begins a handshake. No request begins with it."""
_TELLING = 3
"""Number of bytes that tell TLS from HTTP."""
HELLO_BYTES = 16 * 1024
"""Maximum bytes before the end of a ClientHello. Those of browsers have less than 3 KiB."""
HELLO_READS = 32
"""Maximum number of reads up to the end of a ClientHello. mitmproxy parses all of it again at each."""


def is_open(data: bytes) -> bool:
    """Return True when `data`, the first bytes of a connection, do not yet tell TLS from HTTP."""
    return data[:1] == _HANDSHAKE and len(data) < _TELLING


def is_tls(data: bytes) -> bool:
    """Return True when `data` begin like TLS."""
    return starts_like_tls_record(data)


class FirstBytes(NextLayer):
    """Waits for the bytes that tell TLS from HTTP, and then asks the addons.

    While no addon names a layer, mitmproxy names one by itself, without our bounds: this is the layer until then.
    """

    def _ask(self) -> layer.CommandGenerator[None]:
        if not is_open(self.data_client()):  # type: ignore[no-untyped-call]
            yield from super()._ask()  # type: ignore[no-untyped-call]


class BoundedClientTLS(ClientTLSLayer):
    """TLS from a client. Ends a connection whose ClientHello is too long or comes in too many pieces."""

    _reads = 0

    def receive_handshake_data(self, data: bytes) -> layer.CommandGenerator[tuple[bool, str | None]]:
        """Take a part of the handshake. Return whether it is complete, and an error or None."""
        if not self.client_hello_parsed:
            self._reads += 1
            if len(self.recv_buffer) + len(data) > HELLO_BYTES or self._reads > HELLO_READS:
                return False, f"a ClientHello over {HELLO_BYTES} bytes or {HELLO_READS} pieces"
        return (yield from super().receive_handshake_data(data))

    def receive_data(self, data: bytes) -> layer.CommandGenerator[None]:
        """Take data after the handshake. Drop what still arrives after one that failed."""
        if self.tls is not None:
            yield from super().receive_data(data)
