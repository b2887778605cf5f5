"""A session's proxy credentials: its id as the user name, an HMAC of it as the password.

The recorder needs no registry of sessions, and one session cannot write into another.
"""

import base64
import hashlib
import hmac


def token(secret: str, session_id: str) -> str:
    """The proxy password of a session: HMAC-SHA256 of its id under the recorder's secret, in hex."""
    return hmac.new(secret.encode(), session_id.encode(), hashlib.sha256).hexdigest()


def valid(secret: str, session_id: str, password: str) -> bool:
    """Whether `password` is the session's. Without a secret every password is.

    An empty session id never is, nor one with control characters: it is going to be the value of a header.
    """
    if not session_id or not session_id.isprintable():
        return False
    return not secret or hmac.compare_digest(token(secret, session_id).encode(), password.encode())


def parse_basic(header: str) -> tuple[str, str] | None:
    """User name and password of a `Basic` (Proxy-)Authorization header, or None."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return None
    return user, password
