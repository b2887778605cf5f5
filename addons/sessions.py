"""Addon: authenticates connections. Maps proxy credentials to sessions.

Proxy credentials of a session: its id as the user name, an HMAC of the id as the password.

They are checked without a registry of sessions. With a secret, a session cannot compute another session's password.

The recorder's secret: how a process gets it, and how it keeps it from the other processes of its user.
"""

import base64
import ctypes
import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable, MutableMapping
from pathlib import Path
from weakref import WeakKeyDictionary

from mitmproxy import connection, ctx, http

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Event


def password(secret: str, session_id: str) -> str:
    """Return the proxy password of a session: the hexadecimal HMAC-SHA256 of its id under the recorder's secret."""
    return hmac.new(secret.encode(), session_id.encode(), hashlib.sha256).hexdigest()


def valid(secret: str, session_id: str, given: str) -> bool:
    """Return True when `given` is the session's password. With an empty secret every password is accepted.

    Empty and unprintable session ids, and blanks at an end, are refused: the id becomes the value of a header.
    """
    if not session_id or not session_id.isprintable() or session_id != session_id.strip():
        return False
    return not secret or hmac.compare_digest(password(secret, session_id).encode(), given.encode())


def parse_basic(header: str) -> tuple[str, str] | None:
    """Return the user name and password of a `Basic` (Proxy-)Authorization header, or None for any other value."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, _, given = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return None
    return user, given


_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_PR_SET_DUMPABLE = 4
"""See prctl(2)."""


def read_secret(path: str | Path) -> str:
    """Return the secret that a file or pipe holds, without surrounding whitespace.

    `/dev/fd/NUMBER` is an open descriptor of this process; it is closed. Raises `InputError` when nothing can be read,
    and for a file that other users can read.
    """
    given = _DESCRIPTOR.fullmatch(str(path))
    try:
        # a socket cannot be opened by its path, and a descriptor that is closed cannot be read a second time
        with open(int(given[1]) if given else Path(path).expanduser(), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
                mode = stat.filemode(status.st_mode)
                raise InputError(f"other users may read the secret in {path} ({mode}): chmod 600 {path}")
            secret = file.read().decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the secret in {path}: {error}") from error
    if not secret:
        raise InputError(f"{path} is empty: write a secret to it")
    return secret


def hide_process() -> None:
    """Hide the memory, environment and descriptors of this process from the other processes of its user, except root.

    They cannot trace it either, and it dumps no core (`PR_SET_DUMPABLE` of prctl(2)). Programs that it starts are not
    hidden.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


logger = logging.getLogger(__name__)

SESSION = "rolltap_session"
"""Key of `flow.metadata`: the session id of an authenticated flow."""

_HELP = (
    "The rolltap recorder requires proxy credentials: HTTPS_PROXY=http://SESSION:PASSWORD@HOST:PORT\n"
    "SESSION is a non-empty, printable session id of your choice, without blanks at its ends. PASSWORD is the "
    "hexadecimal HMAC-SHA256 of SESSION\nwith the secret in rolltap_secret_file as key; if that option is not set, any "
    "PASSWORD is accepted.\n"
)


class Sessions:
    """Answers 407 to requests without valid credentials and sets `flow.metadata[SESSION]` of all others.

    Credentials are checked once per tunnel, or per request without a tunnel, and removed from the request. Nothing else
    in a request identifies its session. `record` writes an event for wrong credentials.
    """

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record
        self._authenticated: MutableMapping[connection.Client, str] = WeakKeyDictionary()
        self._secret_file = ""
        self._secret: str | None = ""
        """Empty: any password is accepted. None: the secret could not be read, no password is accepted."""

    def configure(self, updated: set[str]) -> None:
        """Read the secret. A recorder with a secret is hidden from the other processes of its user."""
        path = ctx.options.rolltap_secret_file
        if path == self._secret_file:
            return  # a pipe can be read once
        self._secret_file, self._secret = path, None
        hide_process()
        try:
            self._secret = read_secret(path) if path else ""
        except InputError as error:
            logger.error("rolltap_secret_file: %s", error)  # see `Capture.configure`

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
        if credentials is not None and self._secret is not None and valid(self._secret, *credentials):
            return credentials[0]
        flow.response = http.Response.make(
            407, _HELP, {"proxy-authenticate": 'Basic realm="rolltap"', "content-type": "text/plain"}
        )
        # clients send a first request without credentials to get the challenge: record only wrong ones
        if credentials is not None:
            request, detail = flow.request, f"wrong credentials of {credentials[0]!r}"
            self._record(Event(kind="unauthorised", host=request.host, method=request.method, detail=detail))
        return None
