"""Proxy credentials of a session: its id as the user name, an HMAC of the id as the password.

They are checked without a registry of sessions. With a secret, a session cannot compute another session's password.
"""

import base64
import hashlib
import hmac


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
