"""The part of a harness's request that its session records and judges."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a session, without its body.

    `host`, `method` and `path` are recorded, so they are printable and cut.
    """

    session_id: str
    host: str
    """The host that the harness asked."""
    method: str
    path: str
    target: str
    """Path and query."""
    headers: Mapping[str, str]
    """Looked up without case."""
