"""Addon: authenticates connections. The proxy's user is a session's id, its password an HMAC of the
id."""

import logging
from collections.abc import Callable, MutableMapping
from weakref import WeakKeyDictionary

from mitmproxy import connection, ctx, http

from rolltap.addons.errors import InputError
from rolltap.addons.secret import hide_process, parse_basic, read_secret, valid
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)

SESSION = "rolltap_session"
"""Key of `flow.metadata`: the session id of an authenticated flow, a CONNECT too."""

_HELP = """\
The rolltap recorder requires proxy credentials: HTTPS_PROXY=http://SESSION:PASSWORD@HOST:PORT
SESSION is a non-empty, printable session id of your choice, without blanks at its ends.
PASSWORD is the hexadecimal HMAC-SHA256 of SESSION with the secret in rolltap_secret_file as key.
If that option is not set, any PASSWORD is accepted.
"""


class Sessions:
    """Answers 407 to requests without valid credentials and sets `flow.metadata[SESSION]` of all
    others.

    Credentials are checked once per tunnel, or per request without a tunnel, and removed from the
    request. Nothing else in a request identifies its session. `record` writes an event for wrong
    credentials.
    """

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record
        self._authenticated: MutableMapping[connection.Client, str] = WeakKeyDictionary()
        self._secret_file = ""
        self._secret: str | None = ""
        """Empty: any password is accepted. None: the secret could not be read, no password is
        accepted."""

    def configure(self, updated: set[str]) -> None:
        """Read the secret. A recorder with a secret is hidden from the other processes of its
        user."""
        path = ctx.options.rolltap_secret_file
        if path == self._secret_file:
            return  # a pipe can be read once
        self._secret_file = path
        self._secret = None
        hide_process()
        try:
            self._secret = read_secret(path)
        except InputError as error:
            logger.error("rolltap_secret_file: %s", error)  # see `Recorder.configure`

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Authenticate a tunnel."""
        session_id = self._authenticate(flow)
        if session_id is not None:
            self._authenticated[flow.client_conn] = flow.metadata[SESSION] = session_id

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Set the session of a request from its tunnel, or authenticate a request without a
        tunnel."""
        session_id = self.session_of(flow.client_conn) or self._authenticate(flow)
        if session_id is not None:
            flow.metadata[SESSION] = session_id
        # some clients repeat the credentials inside the tunnel
        flow.request.headers.pop("proxy-authorization", None)

    def session_of(self, client: connection.Client) -> str | None:
        """Return the session of a tunnel's connection, or None."""
        return self._authenticated.get(client)

    def _authenticate(self, flow: http.HTTPFlow) -> str | None:
        request = flow.request
        credentials = parse_basic(request.headers.pop("proxy-authorization", ""))
        if credentials and self._secret is not None and valid(self._secret, *credentials):
            return credentials[0]
        headers = {"proxy-authenticate": 'Basic realm="rolltap"', "content-type": "text/plain"}
        flow.response = http.Response.make(407, _HELP, headers)
        # a client's first request has no credentials, to get the challenge: record only wrong ones
        if credentials is not None:
            self._record(
                Event(
                    kind="unauthorised",
                    host=request.host,
                    method=request.method,
                    detail=f"wrong credentials of {credentials[0]!r}",
                )
            )
        return None
