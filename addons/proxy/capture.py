"""Addon: redirects model calls to the endpoint. Refusals of the proxy are in the words of the
request's API."""

import string
from collections.abc import Callable
from urllib.parse import quote

from mitmproxy import ctx, http

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError
from rolltap.addons.endpoint.refusals import event_kind
from rolltap.addons.endpoint.request import END_PATH
from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.proxy.sessions import SESSION
from rolltap.addons.recorder import Recorder
from rolltap.addons.store.records import WEBSOCKET, Event, EventKind
from rolltap.addons.store.rows import printable

CAPTURED = "rolltap_captured"
"""Key of `flow.metadata`: True for a request that was redirected to the endpoint."""

CONTROL_HOST = "session.rolltap"
"""Virtual host of the recorder. A session's requests to it come through the proxy with the
session's credentials."""

_CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie")
_PATH_CHARACTERS = string.punctuation
"""Characters of a path that stay as they are, besides letters and digits."""


class Capture:
    """Redirects model calls to the recorder's endpoint.

    `is_allowed` is true for a session, and a host and a port that it may reach. Such a host keeps
    its paths that have a prefix before the path of a model API: it may be an application of another
    kind.
    """

    def __init__(self, recorder: Recorder, is_allowed: Callable[[str, str, int], bool]) -> None:
        self._recorder = recorder
        self._is_allowed = is_allowed

    def load(self, _: object) -> None:
        """Set mitmproxy's own options."""
        # over HTTP/2 mitmproxy opens a connection per call and allows five at a time
        ctx.options.update(http2=False)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        """Redirect a model call to the endpoint, without the harness's API key. Its body follows as
        it arrives."""
        endpoint = self._recorder.endpoint
        request = flow.request
        if flow.response is not None or flow.error is not None or endpoint is None:
            return
        if request.host == CONTROL_HOST:
            if ends_session(request):
                _redirect(flow, endpoint)
            return
        session_id = flow.metadata[SESSION]
        if not endpoint.options_of(session_id).model_calls:
            return
        if request.headers.get("upgrade", "").lower() == "websocket":
            # 426 makes Codex fall back to HTTP immediately; after other statuses it retries for
            # seconds
            flow.response = json_response(426)
            event = event_of(flow, "refused", WEBSOCKET)
            name = routes.api_not_served(request.path)
            if name:
                event = event_of(flow, "uncaptured", f"refused: {name}")
            self._recorder.record(event)
            return
        # the endpoint finds the route again, in the path that it gets
        route = routes.find_route(request.method, _quoted(request.path), request.headers)
        if route is None:
            return
        if not route.prefix or not self._is_allowed(session_id, request.host, request.port):
            _redirect(flow, endpoint)


def _redirect(flow: http.HTTPFlow, endpoint: Endpoint) -> None:
    request = flow.request
    fields = endpoint.headers(flow.metadata[SESSION], printable(request.host))
    headers = http.Headers([(name.encode(), value.encode()) for name, value in fields.items()])
    for name, value in request.headers.items(multi=True):
        lower = name.lower()
        if lower not in _CREDENTIALS and not lower.startswith("x-rolltap-"):
            if not value.isprintable():
                value = printable(value, None)
            headers.add(name, value)
    request.headers = headers
    request.path = _quoted(request.path)
    request.scheme = "http"
    request.host = "127.0.0.1"
    request.port = endpoint.port
    flow.metadata[CAPTURED] = True


def _quoted(path: str) -> str:
    return quote(path.encode("utf-8", "surrogateescape"), safe=_PATH_CHARACTERS)


def ends_session(request: http.Request) -> bool:
    """Return True for the request that ends a session, which no limit refuses: it frees what the
    session holds."""
    return (request.host, request.method, request.path) == (CONTROL_HOST, "POST", END_PATH)


def refuse(flow: http.HTTPFlow, error: DialectError) -> Event:
    """Answer a request with an error in the words of its API. Return the event to record."""
    request = flow.request
    body = b"{}"
    route = routes.find_route(request.method, request.path, request.headers)
    if route is not None:
        body = route.dialect.encode_error(error)
    flow.response = json_response(error.status, body)
    flow.response.headers["retry-after"] = str(error.retry_after)
    return event_of(flow, event_kind(error), str(error))


def json_response(status: int, body: bytes = b"{}") -> http.Response:
    return http.Response.make(status, body, {"content-type": "application/json"})


def event_of(flow: http.HTTPFlow, kind: EventKind, detail: str) -> Event:
    """Return an event about a request, without its query."""
    request = flow.request
    return Event(
        kind=kind,
        session_id=flow.metadata.get(SESSION),
        host=request.host,
        method=request.method,
        path=request.path.partition("?")[0],
        detail=detail,
    )
