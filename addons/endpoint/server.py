"""HTTP server of the model APIs, on loopback, in the event loop of mitmdump.

mitmproxy can stream only what an upstream sends, so `Capture` redirects model calls here. It passes the session id, the
host and the route in headers, together with a per-process secret that authenticates them. The server decodes the body,
starts or joins a generation through `SessionState`, and sends the reply.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.model_call import DialectError, ModelCall, ReplyContext, ServedModel
from rolltap.addons.dialects.routes import ROUTES, Route
from rolltap.addons.endpoint.body import BODY_LIMIT, Bodies, Expected, Gate
from rolltap.addons.endpoint.budget import UNBOUNDED, Budgets
from rolltap.addons.endpoint.errors import Refusals, as_dialect_error, event_kind
from rolltap.addons.endpoint.exchange import error_response, respond, respond_stored, stream
from rolltap.addons.endpoint.generation import UNANSWERED_SECONDS
from rolltap.addons.endpoint.recovery import Recovery
from rolltap.addons.endpoint.request import (
    END,
    HOST_HEADER,
    PREFIX_HEADER,
    ROUTE_HEADER,
    SECRET_HEADER,
    SESSION_HEADER,
    asked_path,
    client_request,
)
from rolltap.addons.endpoint.services import Services
from rolltap.addons.endpoint.session import AnyCall, SessionState, end_session
from rolltap.addons.endpoint.stored import Archive
from rolltap.addons.endpoint.websocket import serve_socket
from rolltap.addons.engine.client import Engine
from rolltap.addons.engine.lookup import OwnModel
from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.errors import EngineError, RunError
from rolltap.addons.offload import Workers
from rolltap.addons.options import NEUTRAL_SAMPLING, Images
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.metadata import RUN_FILE, add_engine
from rolltap.addons.store.records import Event
from rolltap.addons.store.rows import printable
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

HEADER_BYTES = 512 * 1024
"""Maximum bytes of a request line, and of a header."""
BACKLOG = 1024
"""Number of connections that may wait to be accepted."""
ACCEPTED = 20
"""Number of connections that are accepted before the first one is looked at."""
IDLE_SECONDS = 300.0
"""Seconds after which the state of a session that asks nothing is dropped. To read it again takes milliseconds."""


class Endpoint:
    """An aiohttp application that answers model calls. `start` begins to serve, `close` stops and aborts running calls.

    `sampling` overrides entries of `NEUTRAL_SAMPLING`. `patience` is in seconds, see `Services`. `engine_key` is sent
    to the engines. With `keep_adapter` a session keeps its adapter, see `SessionPolicy`. `budgets` are those of each
    session. With `accept_rewards` the request that ends a session may have its reward. `images` are hidden or
    refused.
    """

    def __init__(
        self,
        rendering: Rendering,
        engine_urls: Sequence[str],
        writer: RunWriter,
        sampling: Mapping[str, Any],
        *,
        patience: float,
        engine_key: str | None = None,
        keep_adapter: bool = True,
        budgets: Budgets = UNBOUNDED,
        accept_rewards: bool = False,
        images: Images = "hide",
        warnings: Sequence[str] = (),
    ) -> None:
        self.rendering = rendering
        self.writer = writer
        self.warnings = warnings
        """Sentences for the user about the engines' models."""
        self.refusals = Refusals(writer.note)
        self.sampling = {**NEUTRAL_SAMPLING, **sampling}
        self.sessions: dict[str, SessionState] = {}
        """Session id -> state, of the sessions that asked lately. The others are in the run."""
        self._secret = secrets.token_urlsafe(32)
        self._engine_urls, self._engine_key = engine_urls, engine_key
        self._patience, self._keep_adapter, self._budgets, self._images = patience, keep_adapter, budgets, images
        self._accept_rewards = accept_rewards
        self._described: dict[str, asyncio.Task[None]] = {}
        # bound and listening from here on, so that requests queue before `start`
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self.engines: EnginePool
        self.expected: Expected | None = None
        """The connections that are let in. None lets in all."""

    async def start(self) -> None:
        """Start to serve; returns when requests are accepted."""
        self.engines = EnginePool(
            self._engine_urls, self._engine_key, OwnModel.of(self.rendering.model, self.rendering.encode)
        )
        self._bodies = Bodies()
        workers, recovery = Workers(), Recovery(self.writer, self.rendering)
        self._services = Services(
            *(self.engines, PolicyFile(self.writer.run), self.rendering, self.writer, recovery),
            *(Archive(self.writer.run), workers, self._patience, self.refusals),
            *(self._keep_adapter, self._budgets, self._images),
        )
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_route("*", "/{target:.*}", self._serve)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            auto_decompress=False,
            # the proxy bounds headers, and escapes make them longer
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
        )
        try:
            await asyncio.to_thread(recovery.load)
        except (OSError, RunError) as error:
            # the first request of each session tries again, and its error is the answer
            logger.error("cannot read %s: %s", self.writer.run, error)
        await self._runner.setup()
        await self._listen()
        self._forgetting = asyncio.create_task(self._forget())

    async def _listen(self) -> None:
        make = self._runner.server
        assert make is not None
        gate = make if self.expected is None else partial(Gate, self.expected, make)
        self._server = await asyncio.get_running_loop().create_server(gate, sock=self._socket, backlog=ACCEPTED)
        self._socket.listen(BACKLOG)

    async def close(self) -> None:
        """Stop serving. Running calls are recorded as aborted."""
        self._server.close()
        for session in self.sessions.values():
            session.abort("the recorder was stopped")
        self._forgetting.cancel()
        await self._runner.cleanup()
        for session in self.sessions.values():
            session.abort("the recorder was stopped")  # of requests whose prompt was being made
        self.refusals.close()
        for task in self._described.values():
            task.cancel()
        await asyncio.gather(*self._described.values(), return_exceptions=True)
        await self.engines.close()
        self._services.workers.close()
        self._bodies.close()

    def running(self, session_id: str) -> int:
        """Return the number of generations of a session that run, listened to or not."""
        session = self.sessions.get(session_id)
        return 0 if session is None else sum(not generation.done for generation in session.generations)

    def forget_idle(self, seconds: float) -> None:
        """Drop the state of sessions that run nothing and have asked nothing for so many seconds."""
        now = asyncio.get_running_loop().time()
        for session_id, session in list(self.sessions.items()):
            session.settle()
            if session.idle and now - session.used_at >= seconds:
                del self.sessions[session_id]

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            self.forget_idle(IDLE_SECONDS)

    def headers(self, session_id: str, host: str, route: Route | None) -> dict[str, str]:
        """Return the headers of a redirected request: secret, session, host and route. None ends the session."""
        service, prefix = (END, "") if route is None else (str(route), printable(route.prefix))
        asked = {HOST_HEADER: host, ROUTE_HEADER: service, PREFIX_HEADER: prefix}
        return {SECRET_HEADER: self._secret, SESSION_HEADER: session_id, **asked}

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get(SECRET_HEADER, ""), self._secret):
            return web.Response(status=403, text="this port takes requests only from the rolltap recorder's proxy")
        if request.headers[ROUTE_HEADER] == END:
            how = self._bodies, self._session(request), self.writer, self.refusals
            return await end_session(request, *how, accept_rewards=self._accept_rewards)
        route = ROUTES[request.headers[ROUTE_HEADER]]
        dialect = route.dialect
        if route.service == "websocket":
            share = partial(self._bodies.room.share, request.headers[SESSION_HEADER])
            return await serve_socket(request, self._begin, self._reject, self._services.workers, share)
        try:
            asked = client_request(request)
            match route.service:
                case "models":
                    engine, window = await self._engine(request)
                    models = [ServedModel(engine.model, self._budgets.window(window))]
                    return _json(dialect.encode_models(request.raw_path, models, int(time.time())))
                case "count_tokens":
                    async with self._bodies.read(request, asked.session_id) as body:
                        num_tokens = await self._session(request).count_tokens(dialect, body, asked)
                    return _json(dialect.encode_token_count(num_tokens))
                case "stored":
                    return await respond_stored(self._session(request), dialect, asked, request, self._bodies)
                case "generate":
                    async with self._bodies.read(request, request.headers[SESSION_HEADER]) as body:
                        generation, model_call = await self._begin(dialect, body, request)
        except Exception as error:
            return error_response(dialect, self._reject(request, error))
        prompt_tokens = generation.usage.prompt
        context = ReplyContext(generation.call_id, int(time.time()), request.raw_path, model_call, prompt_tokens)
        answer = stream if model_call.stream else respond
        try:
            return await answer(generation, dialect, context, request)
        finally:
            if (session := self.sessions.get(request.headers[SESSION_HEADER])) is not None:
                session.settle()

    def _session(self, request: web.Request) -> SessionState:
        session_id = request.headers[SESSION_HEADER]
        if session_id not in self.sessions:
            self.sessions[session_id] = SessionState(session_id, self._services, self.sampling)
        return self.sessions[session_id]

    async def _begin(self, dialect: Dialect, body: bytes, request: web.Request) -> tuple[AnyCall, ModelCall]:
        """Start or join the generation of a request. Raises `EngineError`, and the errors of `SessionState.begin`.

        A harness that gives up after it waited more than `UNANSWERED_SECONDS` for an engine has an event `fault`. Time
        in which the request waited for others of its session does not count.
        """

        async def context_window() -> int:
            clock = asyncio.get_running_loop().time
            started = clock()
            try:
                _, window = await self._engine(request)
            except asyncio.CancelledError:
                if (waited := clock() - started) > UNANSWERED_SECONDS:
                    why = f"the harness gave up: no engine was ready for its call after {waited:.0f} s"
                    self._reject(request, EngineError(why))
                raise
            return window

        return await self._session(request).begin(dialect, body, client_request(request), context_window)

    async def _engine(self, request: web.Request) -> tuple[Engine, int]:
        """Return the engine of the session and its context window in tokens.

        Raises `EngineError`, see `EnginePool.ready`. The first use of an engine starts a task that writes its
        description to `run.json`.
        """
        engine, window = await self.engines.ready(request.headers[SESSION_HEADER], self._patience)
        if engine.url not in self._described:
            self._described[engine.url] = asyncio.create_task(self._describe(engine))
        return engine, window

    async def _describe(self, engine: Engine) -> None:
        try:
            await asyncio.to_thread(add_engine, self.writer.run, engine.url, await engine.describe())
        except (EngineError, RunError, OSError) as error:
            logger.warning("the description of the engine at %s is not in %s: %s", engine.url, RUN_FILE, error)

    def _reject(self, request: web.Request, error: Exception) -> DialectError:
        """Record a request that no generation answers. Return the error as the harness receives it."""
        answer = as_dialect_error(error, begun=False)
        self.refusals.record(
            Event(
                kind=event_kind(error),
                session_id=request.headers[SESSION_HEADER],
                host=request.headers[HOST_HEADER],
                method=request.method,
                path=asked_path(request),
                detail=str(error) or repr(error),
            )
        )
        return answer


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
