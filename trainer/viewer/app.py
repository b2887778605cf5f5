"""The HTTP interface of the page: its files, the answers to its paths, and a stream of what
changed.

Every request needs the token as `Authorization: Bearer TOKEN`, or a token that reads this page and
nothing else: it is the cookie that the link with `?token=` sets, because a browser sends a cookie
to every port of its host.
"""

import asyncio
import hmac
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Collection
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolltap.addons.errors import InputError, RolltapError
from rolltap.addons.store.records import json_text
from rolltap.trainer.viewer.answers import answer, page_files
from rolltap.trainer.viewer.reader import RunReader, UnknownError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src"
    " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_FOLLOW_SECONDS = 0.5
"""Seconds between two looks for what changed."""
_ALIVE_SECONDS = 15.0
"""Seconds after which a stream without changes says that it is alive."""


def make_app(reader: RunReader, token: str, hosts: Collection[str] = ()) -> FastAPI:
    """Return the application of a reader. It begins to read with the first request, and closes
    nothing.

    `hosts` are names that a request may have as its host, beside addresses and the names of this
    machine.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token, hosts=hosts)
    for kind in (RolltapError, OSError, Exception):
        app.add_exception_handler(kind, _explain)
    page = page_files()

    @app.get("/")
    @app.get("/page/{name:path}")
    def file(name: str = "index.html") -> Response:
        if name in page:
            return FileResponse(page[name])
        return _error(404, f"the page has no file {name[:200]!r}")

    @app.get("/api/follow")
    async def follow() -> StreamingResponse:
        reader.start()
        return StreamingResponse(_changes(reader), media_type="text/event-stream")

    @app.get("/api/{_:path}")
    def api(request: Request) -> Response:
        # an id may have an encoded slash, which the decoded path does not tell from another
        raw: str = request.scope["raw_path"].decode("latin-1")
        path = raw.partition("?")[0].partition("/api/")[2]
        with reader.pause_reading():
            reader.start()
            values = answer(reader, f"api/{path}?{request.url.query}")
            return Response(json_text(values), media_type="application/json")

    return app


async def _changes(reader: RunReader) -> AsyncIterator[str]:
    seen = reader.version
    changed: list[str] = []  # the first event tells only how much was read
    while True:
        overview = await asyncio.to_thread(reader.overview)
        values = {"sessions": changed, "read": overview.progress}
        yield f"event: changed\ndata: {json_text(values)}\n\n"
        told = time.monotonic()
        await asyncio.sleep(_FOLLOW_SECONDS)
        while reader.version == seen:
            if time.monotonic() - told >= _ALIVE_SECONDS:
                yield ":\n\n"
                told = time.monotonic()
            await asyncio.sleep(_FOLLOW_SECONDS)
        version = reader.version
        changed = reader.changes(seen)
        seen = version


def _explain(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownError):
        return _error(404, str(error))
    if isinstance(error, InputError):
        return _error(422, str(error))
    if isinstance(error, RolltapError | OSError):
        return _error(500, str(error))
    return _error(500, f"this cannot be shown: {error!r}")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


class Guard:
    """ASGI middleware: refuses other hosts and requests without the token, and adds headers to all
    responses."""

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str]) -> None:
        self._app = app
        self._cookie_token = reading_token(token)
        self._tokens = (token, self._cookie_token)
        self._hosts = {"localhost", socket.gethostname().lower()}
        self._hosts.update(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answering = self._app
        if scope["type"] == "http":
            answering = self._refusal(Request(scope)) or self._app
        await answering(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a request that the application must not see, else None."""
        if not self._is_ours(request.headers.get("host", "")):
            return _error(
                403, "this host name is not this machine's: use the address, or name it with --host"
            )
        _, port = request.scope.get("server") or ("", 0)
        cookie = f"rolltap_{port}"
        root = request.scope.get("root_path", "")
        is_page = request.scope["path"].removeprefix(root) in ("", "/")
        if is_page and self._is_token(request.query_params.get("token", "")):
            response = RedirectResponse(f"{root}/", 303)
            response.set_cookie(
                cookie, self._cookie_token, path=f"{root}/", httponly=True, samesite="strict"
            )
            return response
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(cookie, "")):
            return None
        if scheme.lower() == "bearer" and self._is_token(bearer):
            return None
        return _error(
            401, "the token is missing or wrong: open the link that `rolltap view` printed"
        )

    def _is_token(self, given: str) -> bool:
        text = given.encode(errors="replace")
        return any(hmac.compare_digest(text, token.encode()) for token in self._tokens)

    def _is_ours(self, host: str) -> bool:
        """Return True for addresses and this machine's names: another name may be anybody's (DNS
        rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def reading_token(token: str) -> str:
    """Return the token that reads the page, by the token that may do more: the same at each
    start."""
    return hmac.new(token.encode(), b"rolltap page", "sha256").hexdigest()


def base_url(host: str, port: int) -> str:
    """Return the URL of a server at a name or an address, which may be of IPv6."""
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def link(host: str, port: int, token: str) -> str:
    """Return the URL that opens the page."""
    return f"{base_url(host, port)}/?token={quote(token)}"
