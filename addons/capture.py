"""Addon: redirects model calls to the endpoint."""

import asyncio
import logging

from mitmproxy import ctx, exceptions, http
from mitmproxy.addonmanager import Loader

from rolltap.addons.dialects.routes import Route, find_route
from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.open_run import RUN_OPTIONS, add_options, open_run
from rolltap.addons.sessions import SESSION, writable
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)

CAPTURED = "rolltap_captured"
"""Key of `flow.metadata`: True for a request that was redirected to the endpoint."""

CONTROL_HOST = "session.rolltap"
"""Virtual host of the recorder. A session's requests to it come through the proxy with the session's credentials."""
END_PATH = "/end"
"""A `POST` to this path ends the session: running calls are recorded as aborted, commits are synced unless
`rolltap_fsync` is `never`, and later calls are refused."""

_CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie")


class Capture:
    """Redirects model calls to the endpoint. Owns the endpoint and the writer of the run folder."""

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        """None until a run is open."""
        self._starting: asyncio.Task[None] | None = None

    def load(self, loader: Loader) -> None:
        """Declare the options."""
        add_options(loader)
        text = (
            "Accept WebSocket connections of the Responses API. When false they get 426, and Codex falls back to HTTP "
            "immediately."
        )
        loader.add_option("rolltap_websocket", bool, False, text)
        # over HTTP/2 mitmproxy opens a connection per call and allows five at a time
        ctx.options.update(http2=False)
        try:
            # mitmproxy does this after `load`; an error there would leave it running without these addons
            ctx.options.process_deferred()
        except exceptions.OptionsError as error:
            logger.error("%s", error)

    def configure(self, updated: set[str]) -> None:
        """Check the options and open the run folder."""
        if not updated & RUN_OPTIONS:
            return
        if self.endpoint is not None:
            raise exceptions.OptionsError(
                f"{', '.join(sorted(updated & RUN_OPTIONS))} cannot change while a run is recorded: restart mitmdump"
            )
        try:
            self.endpoint = open_run(ctx.options)
        except exceptions.OptionsError as error:
            # raised while the script is loaded, the error would get a traceback; a logged error also stops mitmdump
            logger.error("%s", error)

    def running(self) -> None:
        """Start the endpoint. Its socket has been listening since `configure`, so that early requests queue."""
        if self.endpoint is not None:
            self._starting = asyncio.get_running_loop().create_task(self.endpoint.start())

    async def done(self) -> None:
        """Abort running calls and close the run folder."""
        if self.endpoint is None:
            return
        if self._starting is not None:
            await self._starting
            await self.endpoint.close()
        await asyncio.to_thread(self.endpoint.writer.close)

    def request(self, flow: http.HTTPFlow) -> None:
        """Redirect a model call to the endpoint, without the harness's API key."""
        if flow.response is not None or self.endpoint is None:
            return
        method, path, headers = flow.request.method, flow.request.path, flow.request.headers
        if flow.request.host == CONTROL_HOST:
            if (method, path) == ("POST", END_PATH):
                self._redirect(flow, None)
            return
        route = find_route(method, path, headers)
        if route is None:
            return
        if route.service == "websocket" and not ctx.options.rolltap_websocket:
            # 426 makes Codex fall back immediately; after other statuses it retries for seconds
            flow.response = http.Response.make(426, b"{}", {"content-type": "application/json"})
            return
        try:
            flow.request.decode()  # Codex compresses its bodies with zstd
        except ValueError as error:
            refusal = DialectError(f"The request body cannot be decompressed: {error}")
            body = route.dialect.encode_error(refusal)
            flow.response = http.Response.make(refusal.status, body, {"content-type": "application/json"})
            path = writable(path.partition("?")[0])
            return self.record(
                Event(
                    kind="rejected",
                    session_id=flow.metadata[SESSION],
                    host=flow.request.host,
                    method="POST",
                    path=path,
                    detail=str(refusal),
                )
            )
        self._redirect(flow, route)

    def _redirect(self, flow: http.HTTPFlow, route: Route | None) -> None:
        assert self.endpoint is not None
        headers = flow.request.headers
        for name in [n for n in headers if n.lower() in _CREDENTIALS or n.lower().startswith("x-rolltap-")]:
            del headers[name]
        headers.update(self.endpoint.headers(flow.metadata[SESSION], flow.request.host, route))
        flow.request.scheme, flow.request.host, flow.request.port = "http", "127.0.0.1", self.endpoint.port
        flow.metadata[CAPTURED] = True

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Stream the endpoint's replies: forward each chunk without buffering the body."""
        if flow.metadata.get(CAPTURED) and flow.response is not None:
            flow.response.stream = True

    def websocket_message(self, flow: http.HTTPFlow) -> None:
        """Drop all but the newest message. mitmproxy would keep every message for the life of the connection."""
        if flow.metadata.get(CAPTURED) and flow.websocket is not None:
            del flow.websocket.messages[:-1]

    def record(self, event: Event) -> None:
        """Write an event to the run, if one is open. Logs an `OSError` instead of raising it."""
        if self.endpoint is not None:
            self.endpoint.writer.note(event)

    def is_endpoint(self, host: str, port: int) -> bool:
        """Return True for the endpoint's own address."""
        return self.endpoint is not None and (host, port) == ("127.0.0.1", self.endpoint.port)
