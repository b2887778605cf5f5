"""Addon: whose connection this is. Proxy credentials to session."""

import logging
import os
from collections.abc import Callable, MutableMapping
from weakref import WeakKeyDictionary

from mitmproxy import connection, ctx, http
from mitmproxy.addonmanager import Loader

from rolltap.addons.credentials import parse_basic, valid
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)

SESSION = "rolltap_session"
"""Key of `flow.metadata` that holds the session id of an authenticated flow."""

_HELP = (
    "The rolltap recorder wants proxy credentials: HTTPS_PROXY=http://SESSION:TOKEN@HOST:PORT\n"
    "SESSION names the rollout. TOKEN is the HMAC-SHA256 of SESSION under rolltap_secret, or anything without one.\n"
)


class Sessions:
    """Answers 407 to connections without valid credentials and names the session of all others.

    The credentials are a capability for one session: they are checked once a tunnel, stripped from the request, and
    nothing else identifies a session. `record` takes the events of refused credentials.
    """

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record
        self._authenticated: MutableMapping[connection.Client, str] = WeakKeyDictionary()

    def load(self, loader: Loader) -> None:
        """Declare the option."""
        text = (
            "Secret behind the sessions' proxy passwords (HMAC-SHA256 of the session id). Required unless the proxy "
            "listens on loopback, where any password is taken without one. The environment variable ROLLTAP_SECRET "
            "gives it without showing it to other processes."
        )
        loader.add_option("rolltap_secret", str, os.environ.get("ROLLTAP_SECRET", ""), text)

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Authenticate a tunnel."""
        session_id = self._authenticate(flow)
        if session_id is not None:
            self._authenticated[flow.client_conn] = session_id

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Name the session of a request in a tunnel, or authenticate one without a tunnel."""
        session_id = self._authenticated.get(flow.client_conn) or self._authenticate(flow)
        if session_id is not None:
            flow.metadata[SESSION] = session_id
        # some clients send the credentials again in the tunnel
        flow.request.headers.pop("proxy-authorization", None)

    def _authenticate(self, flow: http.HTTPFlow) -> str | None:
        credentials = parse_basic(flow.request.headers.pop("proxy-authorization", ""))
        if credentials is not None and valid(ctx.options.rolltap_secret, *credentials):
            return credentials[0]
        flow.response = http.Response.make(
            407, _HELP, {"proxy-authenticate": 'Basic realm="rolltap"', "content-type": "text/plain"}
        )
        # no credentials at all is how clients ask for the challenge; only wrong ones are worth a line
        if credentials is not None:
            logger.warning("refused the proxy credentials of %r", credentials[0])
            self._record(
                Event(
                    kind="unauthorised", session_id=None, host=flow.request.host, method=writable(flow.request.method)
                )
            )
        return None


def writable(text: str) -> str:
    """`text` from the wire with escapes for the bytes that are not UTF-8, which mitmproxy turns into surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()
