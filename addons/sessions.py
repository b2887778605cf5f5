"""Addon: authenticates connections. Maps proxy credentials to sessions."""

import os
from collections.abc import Callable, MutableMapping
from weakref import WeakKeyDictionary

from mitmproxy import connection, ctx, http
from mitmproxy.addonmanager import Loader

from rolltap.addons.credentials import parse_basic, valid
from rolltap.addons.store.records import Event

SESSION = "rolltap_session"
"""Key of `flow.metadata`: the session id of an authenticated flow."""

_HELP = (
    "The rolltap recorder requires proxy credentials: HTTPS_PROXY=http://SESSION:PASSWORD@HOST:PORT\n"
    "SESSION is a non-empty, printable session id of your choice. PASSWORD is the hexadecimal HMAC-SHA256 of SESSION "
    "with the key rolltap_secret;\nif rolltap_secret is not set, any PASSWORD is accepted.\n"
)


class Sessions:
    """Answers 407 to requests without valid credentials and sets `flow.metadata[SESSION]` of all others.

    Credentials are checked once per tunnel, or per request without a tunnel, and removed from the request. Nothing else
    in a request identifies its session. `record` writes an event for wrong credentials.
    """

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record
        self._authenticated: MutableMapping[connection.Client, str] = WeakKeyDictionary()

    def load(self, loader: Loader) -> None:
        """Declare the option."""
        text = (
            "Key of the sessions' proxy passwords: a password is the hexadecimal HMAC-SHA256 of the session id. "
            "Required unless the proxy listens on loopback. If empty, any password is accepted. The default is the "
            "environment variable ROLLTAP_SECRET, which does not appear in process listings."
        )
        loader.add_option("rolltap_secret", str, os.environ.get("ROLLTAP_SECRET", ""), text)

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Authenticate a tunnel."""
        session_id = self._authenticate(flow)
        if session_id is not None:
            self._authenticated[flow.client_conn] = session_id

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Set the session of a request from its tunnel, or authenticate a request without a tunnel."""
        session_id = self.session_of(flow.client_conn) or self._authenticate(flow)
        if session_id is not None:
            flow.metadata[SESSION] = session_id
        # some clients repeat the credentials inside the tunnel
        flow.request.headers.pop("proxy-authorization", None)

    def session_of(self, client: connection.Client) -> str | None:
        """Return the session of a tunnel's connection, or None."""
        return self._authenticated.get(client)

    def _authenticate(self, flow: http.HTTPFlow) -> str | None:
        credentials = parse_basic(flow.request.headers.pop("proxy-authorization", ""))
        if credentials is not None and valid(ctx.options.rolltap_secret, *credentials):
            return credentials[0]
        flow.response = http.Response.make(
            407, _HELP, {"proxy-authenticate": 'Basic realm="rolltap"', "content-type": "text/plain"}
        )
        # clients send a first request without credentials to get the challenge: record only wrong ones
        if credentials is not None:
            request, detail = flow.request, f"wrong credentials of {credentials[0]!r}"
            self._record(Event(kind="unauthorised", host=request.host, method=request.method, detail=detail))
        return None
