"""The HTTP interface of a service: FastAPI's routes, the token, limits, and errors as JSON.

An error is `{"error": MESSAGE}`; the message names the field and the fix. Every route needs the
token, but /health and the pages of the interface: /docs and /openapi.json. /view/?token=TOKEN shows
the run in the browser. The token is asked for at a request's headers, before its body is read.
"""

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rolltap.addons.errors import EngineError, InputError, RolltapError
from rolltap.addons.store.records import json_text
from rolltap.trainer.names import some
from rolltap.trainer.runs.exports.messages import session_conversations
from rolltap.trainer.service.groups import Groups, QueueFullError
from rolltap.trainer.service.metrics import Metrics
from rolltap.trainer.service.recording import Health
from rolltap.trainer.service.requests import GroupRequest, GroupView, PolicyRequest
from rolltap.trainer.service.tasks import ConflictError, NotRecordedError
from rolltap.trainer.tasks.task import JUDGE_KINDS
from rolltap.trainer.toml import describe_faults
from rolltap.trainer.traces.build import Strategy
from rolltap.trainer.traces.reader import iter_sessions
from rolltap.trainer.traces.sessions import TraceOptions, load_batch
from rolltap.trainer.viewer.app import make_app as make_view
from rolltap.trainer.viewer.reader import RunReader

BODY_BYTES = 4 * 1024 * 1024
"""Largest body of a request."""
WAIT_SECONDS = 60.0
"""Longest time for which a request may wait for the end of a group."""
BODY_SECONDS = 60.0
"""Longest time that a body may take."""
_OPEN = ("/health", "/docs", "/openapi.json")
"""Paths that need no token."""
MOST_TOKENS = 200_000
"""Most sampled tokens of a group whose traces or messages are returned. Larger ones are read from
the run folder."""
_EVENTS = "text/event-stream"
_STATUS = {
    NotRecordedError: 404,
    ConflictError: 409,
    QueueFullError: 429,
    InputError: 422,
    EngineError: 502,
    OSError: 507,
    RolltapError: 500,
}


def make_app(groups: Groups, token: str) -> FastAPI:
    """Return the application of loaded groups, for clients that have the token."""
    app = FastAPI(
        title="rolltap",
        description=__doc__ or "",
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Door, token=token)
    for kind, status in _STATUS.items():
        app.add_exception_handler(kind, _as_json(status))
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(400, _refused)  # of a body that is no text
    app.add_exception_handler(RequestValidationError, _invalid)
    metrics = Metrics(groups)
    # for /docs: `Door` refuses
    secured: dict[str, Any] = {"dependencies": [Depends(HTTPBearer(auto_error=False))]}
    asking: asyncio.Task[Health] | None = None

    def require(name: str) -> None:
        """Raise `HTTPException` for a group that is not there."""
        if name not in groups.book.accepted:
            what = f"there is no group {name[:100]!r} in {groups.path}"
            raise HTTPException(404, f"{what}: submit it first")

    def small(name: str) -> tuple[Path, list[str]]:
        """Return the run folder and the sessions of a group, for JSON.

        Raises `HTTPException` for one that has not ended or is too large.
        """
        require(name)
        view = groups.view(name)
        if view.sampled is None:
            what = f"the group {name!r} has not ended"
            raise HTTPException(409, f"{what}: wait for its event 'ended'")
        if view.sampled > MOST_TOKENS:
            what = f"the group {name!r} has {view.sampled} sampled tokens"
            raise HTTPException(413, f"{what}: read the run {view.run}")
        return Path(view.run), [session.session_id for session in view.sessions]

    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether sessions can run, and else why not; `warnings` is what else is wrong."""
        nonlocal asking
        if asking is None or asking.done():  # anybody may ask: the engines are asked once for all
            asking = asyncio.create_task(asyncio.to_thread(groups.recorded.health))
        found = await asyncio.shield(asking)
        status = 200
        if found.problems:
            status = 503
        return JSONResponse({"ok": status == 200, **asdict(found)}, status)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """List the routes. Nothing is loaded from elsewhere."""
        return HTMLResponse(_listed(app), headers={"content-security-policy": "default-src 'none'"})

    @app.get("/service", **secured)
    async def service() -> dict[str, Any]:
        """Return what the service runs sessions with, and the digests of its tasks."""
        worker = groups.worker
        return {
            "run": str(groups.path.absolute()),
            "id": groups.journal.name,
            "harness": worker.harness.name,
            "model": worker.recorder.model,
            "engine": worker.recorder.engine,
            "runtime": worker.runtime.name,
            "options": worker.config.options(),
            "tasks": {name: groups.digests[name] for name in groups.tasks},
            "policy": asdict(groups.policy()),
        }

    @app.post("/groups", status_code=201, **secured)
    async def submit(request: GroupRequest, response: Response) -> GroupView:
        """Accept a group of sessions. Status 200 for a request that was accepted before."""
        view, new = await groups.submit(request)
        if not new:
            response.status_code = 200
        return view

    @app.get("/groups/{name}", **secured)
    async def group(name: str, wait: float = Query(0.0, ge=0.0, le=WAIT_SECONDS)) -> GroupView:
        """Return a group and its sessions that have ended.

        With `wait`, when it has ended or after these seconds.
        """
        require(name)
        return await groups.wait(name, wait)

    @app.delete("/groups/{name}", **secured)
    async def cancel(name: str) -> GroupView:
        """Cancel a group. Sessions that run are stopped; one that has ended stays as it is."""
        require(name)
        return await groups.cancel(name)

    @app.delete("/groups/{name}/sessions/{session}", **secured)
    async def cancel_session(name: str, session: str) -> GroupView:
        """Cancel one session of a group, and its retries. One that has ended stays as it is."""
        require(name)
        try:
            return await groups.cancel_session(name, session)
        except KeyError:
            what = f"the group {name!r} has no session {session[:100]!r}"
            known = some(groups.view(name).session_ids)
            raise HTTPException(404, f"{what}: its sessions are {known}") from None

    @app.get("/groups/{name}/traces", **secured)
    async def traces(name: str, strategy: Strategy = "prefix_merging") -> Response:
        """Return the traces of a small group that has ended, and the ledger of its tokens."""
        run, sessions = small(name)
        batch = await asyncio.to_thread(load_batch, run, sessions, TraceOptions(strategy))
        answer = {
            "traces": [asdict(trace) for trace in batch.traces],
            "ledger": asdict(batch.ledger),
        }
        return Response(json_text(answer), media_type="application/json")

    @app.get("/groups/{name}/messages", **secured)
    async def messages(name: str) -> Response:
        """Return the conversations of a small group that has ended.

        They are those of the export `messages`.
        """
        run, sessions = small(name)
        text = await asyncio.to_thread(_conversations, run, sessions)
        return Response(text, media_type="application/json")

    @app.get("/events", **secured)
    async def events(
        after: str | None = None,
        last_event_id: str | None = Header(None),
    ) -> StreamingResponse:
        """Stream the events after a cursor, which is the id of an event, and those to come."""
        place = groups.journal.place(last_event_id or after)
        return StreamingResponse(groups.journal.follow(place), media_type=_EVENTS)

    @app.get("/policy", **secured)
    async def policy() -> dict[str, Any]:
        """Return the weights that sessions begin with."""
        return asdict(groups.policy())

    @app.post("/policy", **secured)
    async def publish(request: PolicyRequest) -> dict[str, Any]:
        """Name the weights that the engines have now.

        Sessions begin with them, and tokens are named by them.
        """
        return asdict(await groups.publish(request))

    @app.get("/metrics", **secured)
    async def metrics_text() -> Response:
        """Return the metrics in Prometheus's format."""
        return Response(await metrics.text(), media_type="text/plain; version=0.0.4")

    app.mount("/view", make_view(RunReader(groups.path), token))
    return app


def _conversations(run: Path, sessions: Sequence[str]) -> str:
    lines = []
    for recorded in iter_sessions(run, sessions):
        lines += session_conversations(recorded)[0]
    return json_text(lines)


def _listed(app: FastAPI) -> str:
    """Return a page with the routes."""
    lines = []
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            methods = "/".join(sorted(route.methods or ()))
            name = f"{methods} {escape(route.path)}"
            lines.append(f"<dt><code>{name}</code><dd>{escape(route.description)}")
    title = "<!doctype html><title>rolltap</title><h1>rolltap service</h1>"
    about = "<p>The fields of bodies and answers are in <a href='openapi.json'>openapi.json</a>."
    return f"{title}{about}<dl>{''.join(lines)}</dl>"


def _error(
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    text = message.encode(errors="backslashreplace").decode()
    return JSONResponse({"error": text}, status, headers)


def _as_json(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def answer(_: Request, error: Exception) -> JSONResponse:
        return _error(status, str(error))

    return answer


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AnyHTTPException)
    return _error(error.status_code, str(error.detail))


def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults: list[Mapping[str, Any]] = []
    for fault in error.errors():
        faults.append({**fault, "loc": fault["loc"][1:]})
    return _error(422, describe_faults(faults, {"judge": JUDGE_KINDS}))


class Door:
    """ASGI middleware: refuses a request without the token at its headers, and a body that is too
    large or too slow.

    The connection of a refused request is closed, so that no more of its body is read.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        path = scope["path"]
        is_page = path == "/view" or path.startswith("/view/")  # which has a guard of its own
        try:
            if not is_page and path not in _OPEN:
                self._require_token(Headers(scope=scope).get("authorization"))
                if scope["method"] == "POST":
                    receive = await _whole_body(receive)
        except HTTPException as error:
            refusal = _error(error.status_code, error.detail, {"connection": "close"})
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _require_token(self, header: str | None) -> None:
        scheme, _, given = (header or "").partition(" ")
        given = given.strip()
        is_right = hmac.compare_digest(given.encode(), self._token.encode())
        if is_right and scheme.lower() == "bearer":
            return
        what = "missing"
        if given:
            what = "wrong"
        fix = "send the header 'Authorization: Bearer TOKEN' with what the service's token file has"
        raise HTTPException(401, f"the token is {what}: {fix}")


async def _whole_body(receive: Receive) -> Receive:
    """Read a body. Return what gives it again. Raises `HTTPException`."""
    size = 0
    chunks: list[Message] = []
    is_whole = False
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while not is_whole:
                message = await receive()
                chunks.append(message)
                size += len(message.get("body", b""))
                is_whole = size > BODY_BYTES or not message.get("more_body", False)
    except TimeoutError:
        what = f"the body was not complete after {BODY_SECONDS:g} s"
        raise HTTPException(408, f"{what}: send it again") from None
    if size > BODY_BYTES:
        what = f"the body has more than {BODY_BYTES:,} bytes"
        raise HTTPException(413, f"{what}: load large tasks with --tasks, and send their ids")

    async def next_message() -> Message:
        if chunks:
            return chunks.pop(0)
        return await receive()

    return next_message
