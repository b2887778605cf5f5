"""Addon: egress filter. Denies by default: only the endpoint and the hosts that the session's
options or else `rolltap_allow` name can be reached."""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

from mitmproxy import connection, ctx, exceptions, flow, http, tls
from mitmproxy.net.check import is_valid_host
from mitmproxy.net.http.url import parse_authority
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layer import NextLayer
from mitmproxy.proxy.layers import ClientTLSLayer, ServerTLSLayer
from mitmproxy.proxy.layers.http import HTTPMode
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from rolltap.addons.dialects import routes
from rolltap.addons.hosts import (
    Pattern,
    is_permitted_address,
    normalize_host,
    read_all_patterns,
)
from rolltap.addons.proxy.capture import CAPTURED, event_of, json_response
from rolltap.addons.proxy.layers import BoundedClientTLS, Http, begins_tls
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.store.records import Event
from rolltap.addons.store.session_options import SessionOptions

logger = logging.getLogger(__name__)


def is_allowed(patterns: Collection[Pattern], host: str, port: int) -> bool:
    """Return True when sessions may ask for this host and port."""
    name = normalize_host(host)
    if not name.isascii() or not is_valid_host(name):
        return False
    return any(pattern.has_port(port) and fnmatchcase(name, pattern.host) for pattern in patterns)


def conflicting_host(request: http.Request, sni: str | None) -> str:
    """Return another name that a request or its TLS connection gives to its host, or "".

    Such a request could reach another site than the host which was allowed: servers choose a site
    by these names.
    """
    if sni and normalize_host(sni) != normalize_host(request.host):
        return sni
    for authority in filter(None, [*request.headers.get_all("host"), request.authority]):
        try:
            host, port = parse_authority(authority, check=True)
        except ValueError:
            return authority
        if normalize_host(host) != normalize_host(request.host) or port not in (None, request.port):
            return authority
    return ""


_Checked = tuple[tuple[str, int], list[Any]]
_checked: ContextVar[_Checked | None] = ContextVar("_checked", default=None)
"""The host and port to which this task opens a connection, and their addresses that may be used."""


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The last request on a client's connection, which was let through."""

    target: tuple[str, int]
    session_id: str
    is_captured: bool
    patterns: Collection[Pattern] = ()
    """Patterns of the hosts that the session may reach."""


class Egress:
    """Refuses requests and connections that are neither for the endpoint nor for an allowed host.

    A refused request gets 404, with the error body of the model API that it seems to belong to, or
    `{}`. The tested harnesses accept a 404 to telemetry, settings and update checks; after a
    dropped connection some retry for 20 s. A request that looks like a model call is recorded as
    `uncaptured`, also when its host is allowed. A request that names another host than the one it
    would reach gets 421.

    `server_connect` opens a connection only for the request that was let through last on the
    client's connection. This also stops what no hook for requests sees: other protocols, and
    requests that no addon answered because a hook raised. It looks the host up: mitmproxy connects
    only to the addresses that were checked. The certificate of a host is verified against the name
    that was allowed.

    Must come after `Capture`, which marks the model calls. `record` writes an event; `session_of`
    returns the session of a tunnel, `options_of` the options of a session. Its list of hosts, if it
    has one, stands in place of `rolltap_allow`.
    """

    def __init__(
        self,
        record: Callable[[Event], None],
        session_of: Callable[[connection.Client], str | None],
        options_of: Callable[[str], SessionOptions],
    ) -> None:
        self._record = record
        self._session_of = session_of
        self._options_of = options_of
        self._patterns: frozenset[Pattern] = frozenset()
        self._admitted: MutableMapping[connection.Client, _Admitted] = WeakKeyDictionary()

    def load(self, _: object) -> None:
        """Make mitmproxy answer CONNECT and TLS without connecting to the host first."""
        ctx.options.update(connection_strategy="lazy", upstream_cert=False, rawtcp=False)

    def configure(self, updated: set[str]) -> None:
        """Read the patterns. A wrong one is refused, and none is used."""
        if "rolltap_allow" not in updated:
            return
        self._patterns = frozenset()
        try:
            self._patterns = read_all_patterns(tuple(ctx.options.rolltap_allow))
        except ValueError as error:
            if ctx.master.addons.get("proxyserver").is_running:
                raise exceptions.OptionsError(f"rolltap_allow: {error}") from error
            logger.error("rolltap_allow: %s", error)  # see `Recorder.configure`

    def running(self) -> None:
        """Let mitmproxy get the addresses that were checked: a name that is looked up twice may
        have two answers.

        With Python 3.12, mitmproxy lets tasks run before what started them has ended. One that is
        cancelled meanwhile leaves its socket open.
        """
        loop = asyncio.get_running_loop()
        loop.set_task_factory(None)
        look_up = loop.getaddrinfo

        async def getaddrinfo(host: Any, port: Any, **how: Any) -> list[Any]:
            checked = _checked.get()
            if checked is not None and checked[0] == (host, port):
                return checked[1]
            return await look_up(host, port, **how)

        loop.getaddrinfo = getaddrinfo  # type: ignore[method-assign]

    def allows(self, session_id: str, host: str, port: int) -> bool:
        """Return True when a session may reach this host and port."""
        return is_allowed(self._patterns_of(session_id), host, port)

    def _patterns_of(self, session_id: str) -> Collection[Pattern]:
        own = self._options_of(session_id).allow
        if own is None:
            return self._patterns
        return read_all_patterns(own)

    def next_layer(self, nextlayer: NextLayer) -> None:
        """Choose what a connection speaks: HTTP, or TLS to us and then HTTP. mitmproxy does not
        choose after that."""
        context = nextlayer.context
        in_tunnel = context.server.address is not None
        has_tls = isinstance(context.layers[-1], ClientTLSLayer)
        if has_tls or not begins_tls(nextlayer.data_client()):
            mode = HTTPMode.transparent if in_tunnel else HTTPMode.regular
            nextlayer.layer = Http(context, mode, self._report, self._is_captured)
        elif in_tunnel:
            nextlayer.layer = ServerTLSLayer(context)
            nextlayer.layer.child_layer = BoundedClientTLS(context)
        else:
            nextlayer.layer = BoundedClientTLS(context)

    def tls_clienthello(self, data: tls.ClientHelloData) -> None:
        """Forget a server name that is none: mitmproxy cannot make a certificate for it."""
        client = data.context.client
        if client.sni is not None and not is_valid_host(client.sni):
            self._refused(client, data.context.server, f"SNI {client.sni!r}")
            client.sni = None

    def tls_failed_client(self, data: tls.TlsData) -> None:
        """Record a client that began with TLS and did not go on with it, or does not trust our
        certificate."""
        self._refused(data.context.client, data.context.server, f"TLS failed: {data.conn.error}")

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Answer a refused request before its body is read, or let it through as it arrives."""
        self._admitted.pop(flow.client_conn, None)
        if flow.response is not None or flow.error is not None:
            return
        request = flow.request
        session_id = flow.metadata[SESSION]
        is_captured = flow.metadata.get(CAPTURED, False)
        patterns: Collection[Pattern] = ()
        if not is_captured:
            patterns = self._patterns_of(session_id)
            # by the host that mitmproxy connects to: a harness can put anything into the header
            # Host
            if is_allowed(patterns, request.host, request.port):
                self._check_allowed(flow)
            else:
                body = routes.not_served(request.method, request.path, request.headers)
                flow.response = json_response(404, body)
                self._record(self._refusal(flow))
        if flow.response is None:
            # a proxy may ignore `Upgrade` (RFC 9110, 7.8)
            request.headers.pop("http2-settings", None)
            if request.headers.pop("upgrade", ""):
                request.headers.pop("connection", None)
            request.stream = True
            self._admitted[flow.client_conn] = _Admitted(
                (request.host, request.port), session_id, is_captured, patterns
            )

    def _check_allowed(self, flow: http.HTTPFlow) -> None:
        request = flow.request
        if self._looks_like_model_call(flow):
            self._record(event_of(flow, "uncaptured", "let through"))
        other = conflicting_host(request, flow.client_conn.sni)
        if other:
            flow.response = json_response(421)
            self._record(event_of(flow, "refused", f"the request names another host: {other}"))

    def _looks_like_model_call(self, flow: http.HTTPFlow) -> bool:
        has_calls = self._options_of(flow.metadata[SESSION]).model_calls
        return has_calls and routes.looks_like_model_call(flow.request.method, flow.request.path)

    def _refusal(self, flow: http.HTTPFlow) -> Event:
        """Return the event of a request to a host that is not allowed."""
        has_calls = self._options_of(flow.metadata[SESSION]).model_calls
        wanted = routes.advice(flow.request.method, flow.request.path)
        if wanted and has_calls:
            return event_of(flow, "uncaptured", f"refused: {wanted}")
        if self._looks_like_model_call(flow):
            return event_of(flow, "uncaptured", "refused")
        return event_of(flow, "refused", "")

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Forward a reply as it arrives. Close a connection that would change to another
        protocol."""
        assert flow.response is not None
        if flow.response.status_code == 101:
            protocol = flow.response.headers.get("upgrade", "no protocol")
            self._record(event_of(flow, "refused", f"a change to {protocol}"))
            flow.kill()
        else:
            flow.response.stream = True

    async def server_connect(self, data: ServerConnectionHookData) -> None:
        """Refuse a connection that is not allowed, before it is opened: nobody learns which ports
        of a host are open.

        The refusal is set first, so that it stays when this hook raises.
        """
        client = data.client
        server = data.server
        error = server.error
        server.error = "the recorder does not let sessions connect to this host"
        assert server.address is not None
        host, port = server.address[:2]
        admitted = self._admitted.get(client)
        is_tcp = server.transport_protocol == "tcp"
        if not is_tcp or admitted is None or admitted.target != (host, port):
            self._refused(client, server, "a connection for a request that no addon answered")
            return
        if error is None and not admitted.is_captured:
            loop = asyncio.get_running_loop()
            try:
                found: list[Any] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError, asyncio.CancelledError) as failure:
                # as mitmproxy does: a connection that raises here would be counted for ever
                server.error = str(failure) or "connection cancelled"
                return
            usable = []
            for each in found:
                if is_permitted_address(admitted.patterns, host, each[4][0], port):
                    usable.append(each)
            if not usable:
                address = found[0][4][0]
                advice = f"which is not public: allow {address}:{port}"
                self._refused(client, server, f"the host has the address {address}, {advice}")
                return
            _checked.set(((host, port), usable))
            server.sni = normalize_host(host)
        server.error = error

    def tcp_start(self, flow: flow.Flow) -> None:
        """Close a connection that speaks no HTTP. `next_layer` lets none begin, unless it
        raised."""
        flow.kill()
        self._refused(flow.client_conn, flow.server_conn, f"{flow.type}, not HTTP")

    udp_start = dns_request = tcp_start

    def _is_captured(self, client: connection.Client) -> bool:
        admitted = self._admitted.get(client)
        return admitted is not None and admitted.is_captured

    def _report(self, context: Context, request: http.Request | None, reason: str) -> None:
        """Record a message that a layer refused: of a client, or of the host that it asked."""
        if request is None and context.server.address:
            reason += f" (port {context.server.address[1]})"
        self._refused(context.client, context.server, reason, request)

    def _refused(
        self,
        client: connection.Client,
        server: connection.Server,
        why: str,
        request: http.Request | None = None,
    ) -> None:
        event = Event(kind="refused", session_id=self._session_of(client), detail=why)
        admitted = self._admitted.get(client)
        if event.session_id is None and admitted is not None:
            event.session_id = admitted.session_id
        if request is not None:
            event.host = request.host
            event.method = request.method
            event.path = request.path.partition("?")[0]
        if server.address:
            event.host = server.address[0]
        self._record(event)
