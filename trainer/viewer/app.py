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
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_FOLLOW_SECONDS, _ALIVE_SECONDS = 0.5, 15.0


def make_app(reader: RunReader, token: str, hosts: Collection[str] = ()) -> FastAPI:
    """Return the application of a reader. It begins to read with the first request, and closes
    nothing.

    `hosts` are names that a request may have as its host, beside addresses and the names of this
    machine.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token, hosts=hosts)
    for kind, status in {
        UnknownError: 404,
        InputError: 422,
        RolltapError: 500,
        OSError: 500,
    }.items():
        app.add_exception_handler(kind, lambda _, error, status=status: _error(status, str(error)))
    app.add_exception_handler(
        Exception, lambda _, error: _error(500, f"this cannot be shown: {error!r}")
    )
    page = page_files()

    @app.get("/")
    @app.get("/page/{name:path}")
    def file(name: str = "index.html") -> Response:
        return (
            FileResponse(page[name])
            if name in page
            else _error(404, f"the page has no file {name[:200]!r}")
        )

    @app.get("/api/follow")
    async def follow() -> StreamingResponse:
        reader.start()
        return StreamingResponse(_changes(reader), media_type="text/event-stream")

    @app.get("/api/{_:path}")
    def api(request: Request) -> Response:
        # an id may have an encoded slash, which the decoded path does not tell from another
        path = (
            bytes(request.scope["raw_path"])
            .decode("latin-1")
            .partition("?")[0]
            .partition("/api/")[2]
        )
        query = f"?{request.url.query}" if request.url.query else ""
        with reader.asked():
            reader.start()
            return Response(
                json_text(answer(reader, f"api/{path}{query}")), media_type="application/json"
            )

    return app


async def _changes(reader: RunReader) -> AsyncIterator[str]:
    seen, told = -1, 0.0
    while True:
        now = reader.version
        if now != seen:
            # the first event tells only how much was read
            changed = reader.changes(seen) if told else []
            overview = await asyncio.to_thread(reader.overview)
            yield (
                "event: changed\ndata:"
                f" {json_text({'sessions': changed, 'read': overview.progress})}\n\n"
            )
            seen, told = now, time.monotonic()
        elif time.monotonic() - told >= _ALIVE_SECONDS:
            yield ":\n\n"
            told = time.monotonic()
        await asyncio.sleep(_FOLLOW_SECONDS)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


class Guard:
    """ASGI middleware: refuses other hosts and requests without the token, and adds headers to all
    responses."""

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str]) -> None:
        self._app, self._tokens = app, (token, reading_token(token))
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(
                    {**_HEADERS, "content-security-policy": POLICY}
                )
            await send(message)

        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not self._is_ours(request.headers.get("host", "")):
            return _error(
                403, "this host name is not this machine's: use the address, or name it with --host"
            )
        cookie = f"rolltap_{(request.scope.get('server') or ('', 0))[1]}"
        root = request.scope.get("root_path", "")
        is_page = request.scope["path"].removeprefix(root) in ("", "/")
        if is_page and self._is_token(request.query_params.get("token", "")):
            response = RedirectResponse(f"{root}/", 303)
            response.set_cookie(
                cookie, self._tokens[-1], path=f"{root}/", httponly=True, samesite="strict"
            )
            return response
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if self._is_token(request.cookies.get(cookie, "")) or (
            scheme.lower() == "bearer" and self._is_token(bearer)
        ):
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


def link(host: str, port: int, token: str) -> str:
    """Return the URL that opens the page."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={quote(token)}"
