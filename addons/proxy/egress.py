"""Addon: egress filter. Denies by default: only the endpoint and the hosts of `rolltap_allow` can be reached."""

import asyncio
import fnmatch
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from mitmproxy import connection, ctx, exceptions, flow, http, tls
from mitmproxy.net.check import is_valid_host
from mitmproxy.net.http.url import parse_authority
from mitmproxy.net.tls import starts_like_tls_record
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import NextLayer
from mitmproxy.proxy.layers import ClientTLSLayer, ServerTLSLayer
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from rolltap.addons.dialects.routes import advice, looks_like_model_call, not_served
from rolltap.addons.proxy.capture import CAPTURED, event_of
from rolltap.addons.proxy.layers import BoundedClientTLS, FirstBytes, Http, is_open
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)

Decision = Literal["served", "allowed", "refused"]
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

    `address` is one that the host has. One that is not public needs a pattern of its own; `localhost` stands for the
    addresses of this machine.
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


def other_name(request: http.Request, sni: str | None) -> str:
    """Return the name that a request or its TLS connection gives to its host, if that is another one, or "".

    Such a request could reach another site than the host which was allowed: servers choose a site by these names.
    """
    if sni and one_name(sni) != one_name(request.host):
        return sni
    for authority in [*request.headers.get_all("host"), request.authority]:
        try:
            host, port = parse_authority(authority, check=True) if authority else (request.host, None)
        except ValueError:
            return authority
        if one_name(host) != one_name(request.host) or port not in (None, request.port):
            return authority
    return ""


_checked: ContextVar[tuple[tuple[str, int], list[Any]] | None] = ContextVar("_checked", default=None)
"""The host and port to which this task opens a connection, and their addresses that may be used."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Describes the last request on a client's connection, if it was let through."""

    target: tuple[str, int]
    session_id: str | None
    served: bool
    """True for a request to the endpoint."""


class Egress:
    """Refuses requests and connections that are neither for the endpoint nor for an allowed host.

    A refused request gets 404, with the error body of the model API that it seems to belong to, or `{}`. The tested
    harnesses accept a 404 to telemetry, settings and update checks; after a dropped connection some retry for 20 s. A
    request that looks like a model call is recorded as `uncaptured`, also when its host is allowed. A request that
    names another host than the one it would reach gets 421.

    `server_connect` opens a connection only for the request that was let through last on the client's connection. This
    also stops what no hook for requests sees: other protocols, and requests that no addon answered because a hook
    raised. It looks the host up: mitmproxy connects only to the addresses that were checked. The certificate of a host
    is verified against the name that was allowed.

    Must come after `Capture`, which marks the model calls. `record` writes an event; `session_of` returns the session
    of a tunnel.
    """

    def __init__(self, record: Callable[[Event], None], session_of: Callable[[connection.Client], str | None]) -> None:
        self._record = record
        self._session_of = session_of
        self._patterns: list[Pattern] = []
        self._let_through: MutableMapping[connection.Client, _Asked] = WeakKeyDictionary()

    def load(self, _: object) -> None:
        """Make mitmproxy answer CONNECT and TLS without connecting to the host first."""
        ctx.options.update(connection_strategy="lazy", upstream_cert=False, rawtcp=False)

    def configure(self, updated: set[str]) -> None:
        """Read the patterns. A wrong one is refused, and none is used."""
        if "rolltap_allow" not in updated:
            return
        self._patterns = []
        try:
            self._patterns = [Pattern.parse(text) for text in ctx.options.rolltap_allow]
        except ValueError as error:
            if ctx.master.addons.get("proxyserver").is_running:
                raise exceptions.OptionsError(f"rolltap_allow: {error}") from error
            logger.error("rolltap_allow: %s", error)  # see `Recorder.configure`

    def running(self) -> None:
        """Let mitmproxy get the addresses that were checked: a name that is looked up twice may have two answers.

        With Python 3.12, mitmproxy lets tasks run before what started them has ended. One that is cancelled meanwhile
        leaves its socket open.
        """
        loop = asyncio.get_running_loop()
        loop.set_task_factory(None)
        look_up = loop.getaddrinfo

        async def getaddrinfo(host: Any, port: Any, **how: Any) -> list[Any]:
            target, addresses = _checked.get() or (None, [])
            return addresses if target == (host, port) else await look_up(host, port, **how)

        loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign]

    def is_named(self, host: str, port: int) -> bool:
        """Return True when an option is this very host, not only a pattern that matches it."""
        return any(pattern.names(host, port) for pattern in self._patterns)

    def next_layer(self, nextlayer: NextLayer) -> None:
        """Choose what a connection speaks: HTTP, or TLS to us and then HTTP. mitmproxy does not choose after that."""
        context, data = nextlayer.context, nextlayer.data_client()
        in_tunnel = context.server.address is not None
        if is_open(data):
            nextlayer.layer = FirstBytes(context)
        elif not starts_like_tls_record(data) or isinstance(context.layers[-1], ClientTLSLayer):
            mode = HTTPMode.transparent if in_tunnel else HTTPMode.regular
            nextlayer.layer = Http(context, mode, self._report, self._is_served)
        elif in_tunnel:
            nextlayer.layer = ServerTLSLayer(context)
            nextlayer.layer.child_layer = BoundedClientTLS(context)
        else:
            nextlayer.layer = BoundedClientTLS(context)

    def tls_clienthello(self, data: tls.ClientHelloData) -> None:
        """Forget a server name that is none: mitmproxy cannot make a certificate for it."""
        client = data.context.client
        if client.sni is not None and not is_valid_host(client.sni):
            self._refused(client, f"SNI {client.sni!r}", _host(data.context.server))
            client.sni = None

    def tls_failed_client(self, data: tls.TlsData) -> None:
        """Record a client that began with TLS and did not go on with it, or does not trust our certificate."""
        self._refused(data.context.client, f"TLS failed: {data.conn.error}", _host(data.context.server))

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Answer a refused request before its body is read, or let it through as it arrives."""
        self._let_through.pop(flow.client_conn, None)
        request = flow.request
        if flow.response is not None or flow.error is not None:
            return
        # decided by the host that mitmproxy connects to: the harness can put anything into the Host header
        decision: Decision = "allowed" if is_allowed(self._patterns, request.host, request.port) else "refused"
        if flow.metadata.get(CAPTURED):
            decision = "served"
        if decision == "refused":
            flow.response = http.Response.make(404, b"{}", {"content-type": "application/json"})
            flow.response.content = not_served(request.method, request.path, request.headers)
        if decision != "served":
            self._tell(flow, decision)
        if decision == "allowed" and (other := other_name(request, flow.client_conn.sni)):
            flow.response = http.Response.make(421, b"{}", {"content-type": "application/json"})
            self._record(event_of(flow, "refused", f"the request names another host: {other}"))
        if flow.response is None:
            _keep_to_http(request)
            request.stream = True
            target, session_id = (request.host, request.port), flow.metadata.get(SESSION)
            self._let_through[flow.client_conn] = _Asked(target, session_id, decision == "served")

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Forward a reply as it arrives. Close a connection that would change to another protocol."""
        assert flow.response is not None
        if flow.response.status_code == 101:
            protocol = flow.response.headers.get("upgrade", "no protocol")
            self._record(event_of(flow, "refused", f"a change to {protocol}"))
            flow.kill()
        else:
            flow.response.stream = True

    async def server_connect(self, data: ServerConnectionHookData) -> None:
        """Refuse a connection that is not allowed, before it is opened: nobody learns which ports of a host are open.

        The refusal is set first, so that it stays when this hook raises.
        """
        client, server = data.client, data.server
        error, server.error = server.error, "the recorder does not let sessions connect to this host"
        assert server.address is not None
        (host, port, *_), asked = server.address, self._let_through.get(client)
        if server.transport_protocol != "tcp" or asked is None or asked.target != (host, port):
            self._refused(client, "a connection for a request that no addon answered", host)
            return
        if error is None and not asked.served:
            try:
                found: list[Any] = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError, asyncio.CancelledError) as failure:
                # as mitmproxy does: a connection that raises here would be counted for ever
                server.error = str(failure) or "connection cancelled"
                return
            usable = [each for each in found if may_be_used(self._patterns, host, each[4][0], port)]
            if not usable:
                address = found[0][4][0]
                why = f"the host has the address {address}, which is not public: allow {address}:{port}"
                self._refused(client, why, host)
                return
            _checked.set(((host, port), usable))
        server.error, server.sni = error, one_name(host)

    def tcp_start(self, flow: flow.Flow) -> None:
        """Close a connection that speaks no HTTP. `next_layer` lets none begin, unless it raised."""
        flow.kill()
        self._refused(flow.client_conn, f"{flow.type}, not HTTP", _host(flow.server_conn))

    udp_start = dns_request = tcp_start

    def _is_served(self, client: connection.Client) -> bool:
        asked = self._let_through.get(client)
        return asked is not None and asked.served

    def _report(self, context: Context, request: http.Request | None, reason: str) -> None:
        host = _host(context.server)  # of a tunnel, or of the host that broke a rule
        if request:
            path = request.path.partition("?")[0]
            self._refused(context.client, reason, host or request.host, request.method, path)
        else:
            port = f" (port {context.server.address[1]})" if context.server.address else ""
            self._refused(context.client, reason + port, host)

    def _refused(self, client: connection.Client, why: str, host: str = "", method: str = "", path: str = "") -> None:
        asked = self._let_through.get(client)
        session_id = self._session_of(client) or (asked.session_id if asked else None)
        self._record(Event(kind="refused", session_id=session_id, host=host, method=method, path=path, detail=why))

    def _tell(self, flow: http.HTTPFlow, decision: Decision) -> None:
        method, target = flow.request.method, flow.request.path
        if decision == "refused" and (wanted := advice(method, target)):
            self._record(event_of(flow, "uncaptured", f"refused: {wanted}"))
        elif looks_like_model_call(method, target):
            self._record(event_of(flow, "uncaptured", "refused" if decision == "refused" else "let through"))
        elif decision == "refused":
            self._record(event_of(flow, "refused", ""))


def _host(server: connection.Server) -> str:
    return server.address[0] if server.address else ""


def _keep_to_http(request: http.Request) -> None:
    """Remove what asks for other protocols: a proxy may ignore `Upgrade` (RFC 9110, 7.8)."""
    request.headers.pop("http2-settings", None)
    if request.headers.pop("upgrade", ""):
        request.headers.pop("connection", None)
