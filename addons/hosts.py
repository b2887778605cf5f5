"""Hosts that sessions may reach, as options and tasks write them.

Nothing here needs mitmproxy: the trainer reads the patterns of tasks without it.
"""

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

WEB_PORTS = ("80", "443")
"""Ports of an option that names none."""
_HOST_AND_PORT = re.compile(r"(\[[^\]]*:[^\]]*\]|[^:]*):([^:]*)")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_OF_NETWORKS = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48")))
"""Addresses that stand for those of IPv4 in a way that a network chooses (RFC 4291, 2765, 8215)."""
_IN_NO_HOST = re.compile(r"[/@\s]")
"""Characters of a URL, a range of addresses or a list, which no host has."""


class Pattern(NamedTuple):
    """A pattern of `fnmatch` for a host, and its port: a number, or `*` for all."""

    host: str
    port: str

    def has_port(self, port: int) -> bool:
        """Return True when the pattern is for this port."""
        return self.port in ("*", str(port))


def read_patterns(text: str) -> list[Pattern]:
    """Return the patterns of an option.

    Options are `pypi.org`, `*.example.org:8443`, `127.0.0.1:*`, `::1` or `[::1]:80`. Raises
    `ValueError` when the port is neither `*` nor a number up to 65535, or the host is empty or part
    of a URL.
    """
    host = text.strip()
    if _IN_NO_HOST.search(host):
        fix = "give HOST or HOST:PORT, without a scheme, a user or a path"
        raise ValueError(f"{text!r} is no host: {fix}")
    ports: tuple[str, ...] = WEB_PORTS
    match = _HOST_AND_PORT.fullmatch(host)
    if match is not None:
        host = match[1]
        ports = (match[2],)
    for port in ports:
        is_number = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
        if port != "*" and not is_number:
            raise ValueError(f"{text!r} has the port {port!r}: give a number up to 65535, or *")
    if not host:
        raise ValueError(f"{text!r} has no host: give HOST or HOST:PORT")
    return [Pattern(normalize_host(host), port) for port in ports]


@lru_cache(maxsize=1024)
def read_all_patterns(texts: tuple[str, ...]) -> frozenset[Pattern]:
    """Return the patterns of several texts. Raises `ValueError` as `read_patterns`."""
    patterns: set[Pattern] = set()
    for text in texts:
        patterns.update(read_patterns(text))
    return frozenset(patterns)


def is_named(patterns: Collection[Pattern], host: str, port: int) -> bool:
    """Return True when a pattern is this very host, without a wildcard."""
    name = normalize_host(host)
    return any(pattern.host == name and pattern.has_port(port) for pattern in patterns)


def is_permitted_address(
    patterns: Collection[Pattern],
    host: str,
    address: str,
    port: int,
) -> bool:
    """Return True unless an allowed host turned out to be on this machine or in a private network.

    `address` is one that the host has. One that is not public needs a pattern of its own;
    `localhost` stands for the addresses of this machine.
    """
    found = _address(address.partition("%")[0])
    if found is None:
        return False
    real = _in_ipv4(found) or found
    if real.is_global and not any(real in network for network in _OF_NETWORKS):
        return True
    names = [str(real), address]
    if real.is_loopback and normalize_host(host) == "localhost":
        names.append("localhost")
    return any(is_named(patterns, name, port) for name in names)


def normalize_host(host: str) -> str:
    """Return a host in the form in which hosts are compared.

    It is in lower case, without a final dot. The brackets of an address such as `[::1]` are
    removed; those of a pattern such as `[ab].example.org` stay.
    """
    name = host.lower().removesuffix(".")
    if name.startswith("[") and name.endswith("]") and _address(name[1:-1]) is not None:
        return name[1:-1]
    return name


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _in_ipv4(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which an IPv6 one leads; None for one that leads to none."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
