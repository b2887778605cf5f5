"""Answers of the proxy itself, in the words of the API that a request belongs to."""

from mitmproxy import http

from rolltap.addons.dialects.routes import ANY_PREFIX, find_route
from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint.failures import event_kind
from rolltap.addons.sessions import SESSION
from rolltap.addons.store.records import Event


def refuse(flow: http.HTTPFlow, error: DialectError, *, retry_after: int | None = None) -> Event:
    """Answer `flow` with `error`, and return the event to record.

    `retry_after` is in seconds; None leaves the header out, when the same request will not succeed later.
    """
    request = flow.request
    route = find_route(request.method, request.path, request.headers, ANY_PREFIX)
    headers = {"content-type": "application/json"}
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    flow.response = http.Response.make(error.status, route.dialect.encode_error(error) if route else b"{}", headers)
    return Event(
        kind=event_kind(error),
        session_id=flow.metadata.get(SESSION),
        host=request.host,
        method=request.method,
        path=request.path.partition("?")[0],
        detail=str(error),
    )
