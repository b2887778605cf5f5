"""The recorder's secret: how a process gets and hides it, and the credentials that it gives a
session.

A session's proxy credentials are its id and an HMAC of the id: no registry is needed, and no
session can compute those of another. Nothing here needs mitmproxy: `rolltap env` prints credentials
without it.
"""

import base64
import ctypes
import hashlib
import hmac
import os
import re
import stat
from pathlib import Path

from rolltap.addons.errors import InputError


def password(secret: str, session_id: str) -> str:
    """Return the proxy password of a session: the hexadecimal HMAC-SHA256 of its id under the
    recorder's secret."""
    return hmac.new(secret.encode(), session_id.encode(), hashlib.sha256).hexdigest()


def valid(secret: str, session_id: str, given: str) -> bool:
    """Return True for the password of a session, any one without a secret. An id that no header can
    hold has none."""
    if not session_id or not session_id.isprintable() or session_id != session_id.strip():
        return False
    return not secret or hmac.compare_digest(password(secret, session_id).encode(), given.encode())


def parse_basic(header: str) -> tuple[str, str] | None:
    """Return the user name and password of a `Basic` (Proxy-)Authorization header, or None for any
    other value."""
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

    `/dev/fd/NUMBER` is an open descriptor of this process; it is closed. Raises `InputError` when
    nothing can be read, and for a file that other users can read.
    """
    given = _DESCRIPTOR.fullmatch(str(path))
    try:
        # a socket cannot be opened by its path, and a descriptor that is closed cannot be read a
        # second time
        with open(int(given[1]) if given else Path(path).expanduser(), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
                mode = stat.filemode(status.st_mode)
                why = f"other users may read the secret in {path} ({mode})"
                raise InputError(f"{why}: chmod 600 {path}")
            secret = file.read().decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the secret in {path}: {error}") from error
    if not secret:
        raise InputError(f"{path} is empty: write a secret to it")
    return secret


def hide_process() -> None:
    """Hide memory, environment and descriptors of this process from the others of its user, except
    root (see prctl(2)).

    They cannot trace it either, and it dumps no core. Programs that it starts are not hidden.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
