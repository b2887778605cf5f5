"""The part of a harness's request that its session records and judges."""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from rolltap.addons.store.text import printable

SECRET_HEADER = "x-rolltap-secret"
SESSION_HEADER = "x-rolltap-session"
HOST_HEADER = "x-rolltap-host"
ROUTE_HEADER = "x-rolltap-route"
PREFIX_HEADER = "x-rolltap-prefix"
END = "end"
"""Value of `ROUTE_HEADER` for a request that ends its session."""


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
    """The path that the harness asked."""
    target: str
    """Path and query without the prefix of the route."""
    headers: Mapping[str, str]
    """Looked up without case."""


def asked_path(request: web.Request) -> str:
    """Return the path that the harness asked, prefix and all."""
    return printable(request.headers.get(PREFIX_HEADER, "") + request.path)


def client_request(request: web.Request) -> ClientRequest:
    """Return a request without its body."""
    headers = request.headers
    return ClientRequest(
        session_id=headers[SESSION_HEADER],
        host=printable(headers[HOST_HEADER]),
        method=printable(request.method),
        path=asked_path(request),
        target=request.raw_path,
        headers=headers,
    )
