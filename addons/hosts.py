"""Patterns of the hosts that sessions may reach: `HOST` or `HOST:PORT`."""

import fnmatch
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from mitmproxy.net.check import is_valid_host

WEB_PORTS = ("80", "443")
"""Ports of a pattern that names none."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of `fnmatch` for a host, and one for its port. An empty port stands for `WEB_PORTS`."""

    host: str
    port: str = ""

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Read a pattern such as `pypi.org`, `*.example.org:8443`, `127.0.0.1:*` or `[::1]:80`.

        Raises ValueError when the port is neither `*` nor a number up to 65535, or the host is empty.
        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or port.endswith("]") or (":" in host and _address(host[1:-1]) is None):
            host, colon, port = text.strip(), "", ""  # `::1` and `[::1]` have no port
        if colon and port != "*" and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"{text!r} has the port {port!r}: give a number up to 65535, or *")
        if not host:
            raise ValueError(f"{text!r} has no host: give HOST or HOST:PORT")
        return cls(one_name(host), port)

    def matches(self, host: str, port: int) -> bool:
        """Return True when sessions may ask for this host and port."""
        return self._has_port(port) and fnmatch.fnmatchcase(one_name(host), self.host)

    def names(self, host: str, port: int) -> bool:
        """Return True when the pattern is this host, not only a pattern that matches it."""
        return self._has_port(port) and self.host == one_name(host)

    def _has_port(self, port: int) -> bool:
        return str(port) in WEB_PORTS if not self.port else self.port in ("*", str(port))


def one_name(host: str) -> str:
    """Return a host in the form in which names are compared: lower case, without a final dot, an address unbracketed.

    The brackets of `[::1]` are removed; those of a pattern such as `[ab].example.org` stay.
    """
    name = host.lower().removesuffix(".")
    return name[1:-1] if name.startswith("[") and name.endswith("]") and _address(name[1:-1]) else name


def is_allowed(patterns: Iterable[Pattern], host: str, port: int) -> bool:
    """Return True when a pattern matches a valid host and its port."""
    name = one_name(host)
    return name.isascii() and is_valid_host(name) and any(pattern.matches(name, port) for pattern in patterns)


def may_be_used(patterns: Iterable[Pattern], host: str, address: str, port: int) -> bool:
    """Return True unless an allowed host turned out to be on this machine or in a private network.

    `address` is the one that the connection reached. One that is not public needs a pattern of its own; `localhost`
    stands for the addresses of this machine.
    """
    found = _address(address.partition("%")[0])
    if found is None:
        return False
    real = getattr(found, "ipv4_mapped", None) or found
    here = real.is_loopback and one_name(host) == "localhost"
    return real.is_global or any(
        pattern.names(str(real), port) or pattern.names(address, port) or (here and pattern.names("localhost", port))
        for pattern in patterns
    )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
