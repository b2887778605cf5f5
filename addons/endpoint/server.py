"""HTTP server of the model APIs, on loopback, in the event loop of mitmdump.

mitmproxy can stream only what an upstream sends, so `Capture` redirects model calls here. It passes
the session id and the host in headers, with a per-process secret that authenticates them.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial

from aiohttp import web

from rolltap.addons.concurrency import Workers
from rolltap.addons.dialects.call import DialectError, ReplyContext, ServedModel
from rolltap.addons.dialects.dialect import Dialect, StreamEncoder
from rolltap.addons.dialects.routes import find_route
from rolltap.addons.endpoint.body import BODY_LIMIT, Bodies, KeptTexts
from rolltap.addons.endpoint.budget import prompt_window
from rolltap.addons.endpoint.generation import UNANSWERED_SECONDS, Generation
from rolltap.addons.endpoint.recovery import Recovery
from rolltap.addons.endpoint.refusals import Refusals, as_dialect_error, event_kind
from rolltap.addons.endpoint.request import (
    END_PATH,
    HOST_HEADER,
    SECRET_HEADER,
    SESSION_HEADER,
    ClientRequest,
)
from rolltap.addons.endpoint.rerun import served_model
from rolltap.addons.endpoint.session import Session
from rolltap.addons.engine.client import Engine
from rolltap.addons.engine.own_model import OwnModel
from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.errors import EngineError, InputError, RunError
from rolltap.addons.options import RecorderOptions
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.metadata import RUN_FILE, add_engine
from rolltap.addons.store.rewards import GivenReward, give_reward
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

Write = Callable[[bytes], Awaitable[None]]

HEADER_BYTES = 512 * 1024
"""Maximum bytes of a request line, and of a header."""
BACKLOG = 1024
"""Number of connections that may wait to be accepted."""
ACCEPTED = 20
"""Number of connections that are accepted before the first one is looked at."""
IDLE_SECONDS = 300.0
"""Seconds after which the state of a session that asks nothing is dropped. To read it again
takes milliseconds."""
DESCRIBE_SECONDS = 5.0
"""Longest that the end of the recorder waits for an engine that was asked what it is."""
KNOWN_OPTIONS = 4096
"""Number of sessions whose options are kept. To read a file takes some 50 µs."""
KEEP_ALIVE_SECONDS = 15.0
"""Seconds of silence after which a keep-alive is sent. The shortest idle timeout known is 60 s
(Gemini CLI)."""
COALESCE_SECONDS = 0.1
"""Minimum seconds between two chunks of deltas. A chunk costs the proxy 30 to 90 microseconds."""


class Endpoint:
    """An aiohttp application that answers model calls.

    `warnings` are texts for the user about model and engines. Raises `RunError` and `OSError` when
    the recorded session of a rerun cannot be read.
    """

    def __init__(
        self,
        rendering: Rendering,
        writer: RunWriter,
        options: RecorderOptions,
        *,
        engine_key: str | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.rendering = rendering
        self.writer = writer
        self.options = options
        self.warnings = warnings
        self.refusals = Refusals(writer.note)
        self.sessions: dict[str, Session] = {}
        """Session id -> state, of the sessions that asked lately. The others are in the run."""
        self.engines: EnginePool
        self._engine_key = engine_key
        self._secret = secrets.token_urlsafe(32)
        self._recorded: ServedModel | None = None
        """The model of a rerun, which asks no engine."""
        if options.rerun is not None:
            self._recorded = served_model(options.rerun, options.engine[0], rendering.digests)
        self._recovery: Recovery | None = None
        self._read_options = lru_cache(KNOWN_OPTIONS)(partial(SessionOptions.read, writer.run))
        self._described: dict[str, asyncio.Task[None]] = {}
        # bound and listening from here on, so that requests queue before `start`
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]

    async def start(self) -> None:
        """Start to serve; returns when requests are accepted."""
        self.engines = EnginePool(
            self.options.engine,
            self._engine_key,
            OwnModel.of(self.rendering.model, self.rendering.tokenizer),
            patience=self.options.patience,
            routing=self.options.routing,
        )
        self._bodies = Bodies()
        self._workers = Workers()
        self._recovery = recovery = Recovery(self.writer, self.rendering)
        self._new_session = partial(
            Session,
            options=self.options,
            engines=self.engines,
            published=PolicyFile(self.writer.run),
            rendering=self.rendering,
            writer=self.writer,
            recovery=recovery,
            workers=self._workers,
            texts=KeptTexts(),
            refusals=self.refusals,
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
        await web.SockSite(self._runner, self._socket, backlog=ACCEPTED).start()
        self._socket.listen(BACKLOG)
        self._forgetting = asyncio.create_task(self._forget())

    async def close(self) -> None:
        """Stop serving. Running calls are recorded as aborted."""
        self._abort()
        await self._runner.cleanup()
        self._abort()  # calls whose prompt was being made
        self.refusals.close()
        if self._described:  # `rolltap rerun` needs what the engine of a short session served
            await asyncio.wait(self._described.values(), timeout=DESCRIBE_SECONDS)
        tasks = [self._forgetting, *self._described.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.engines.close()
        self._workers.close()
        self._bodies.close()

    def _abort(self) -> None:
        for session in self.sessions.values():
            session.abort("the recorder was stopped")

    def forget_idle(self, seconds: float) -> None:
        """Drop the state of sessions that run nothing and have asked nothing for so many
        seconds."""
        now = asyncio.get_running_loop().time()
        for session_id, session in list(self.sessions.items()):
            if now - session.used_at >= seconds and session.idle:
                session.forget_bodies()
                del self.sessions[session_id]

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            self.forget_idle(IDLE_SECONDS)

    def headers(self, session_id: str, host: str) -> dict[str, str]:
        """Return the headers of a redirected request: secret, session and host."""
        return {SECRET_HEADER: self._secret, SESSION_HEADER: session_id, HOST_HEADER: host}

    def options_of(self, session_id: str) -> SessionOptions:
        """Return the options of a session, which are read once: they come before its first request.

        A session that has ended, or whose options cannot be read, may reach no host.
        """
        try:
            options = self._read_options(session_id)
        except (OSError, RunError) as error:
            logger.error("session %s may reach no host: %s", session_id, error)
            return SessionOptions(allow=())
        if self._recovery is not None and self._recovery.has_ended(session_id):
            return options.model_copy(update={"allow": ()})
        return options

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not _is_equal(request.headers.get(SECRET_HEADER, ""), self._secret):
            why = "this port takes requests only from the rolltap recorder's proxy"
            refusal = web.Response(status=403, text=why)
            refusal.force_close()
            return refusal
        route = find_route(request.method, request.raw_path, request.headers)
        if route is None:
            if (request.method, request.raw_path) == ("POST", END_PATH):
                return await self._end(request, ClientRequest.of(request))
            return web.Response(status=404)
        asked = ClientRequest.of(request, route.prefix)
        dialect = route.dialect
        now = int(time.time())
        try:
            if route.service == "models":
                served = await self._engine(asked)
                most = prompt_window(self.options, served.context_window)
                models = [ServedModel(served.name, most)]
                return _json(dialect.encode_models(asked.target, models, now))
            async with self._bodies.read(request, asked.session_id) as body:
                session = self._session(asked)
                decoded = await session.decode(dialect, body, asked)
                if route.service == "count_tokens":
                    num_tokens = await session.count_tokens(decoded)
                    return _json(dialect.encode_token_count(num_tokens))
                window = (await self._engine(asked)).context_window
                # an idle session may be dropped while its request waits for an engine
                session = self._session(asked)
                generation = await session.begin(decoded, asked, window)
        except Exception as error:
            return error_response(dialect, self._reject(asked, error))
        model_call = decoded.model_call
        num_prompt = generation.usage.prompt
        context = ReplyContext(generation.call_id, now, asked.target, model_call, num_prompt)
        answer = stream if model_call.stream else respond
        try:
            return await answer(generation, dialect, context, request)
        finally:
            session.drop_unheard()

    async def _end(self, request: web.Request, asked: ClientRequest) -> web.Response:
        """End a session: abort its calls, refuse later ones, sync as `rolltap_fsync` says.

        A body has its reward. A request whose body is refused changes nothing, and is recorded. The
        first reward counts: one that the session cannot have is refused with status 409 after the
        session has ended.
        """
        try:
            given = await self._reward(request, asked)
        except DialectError as error:
            self.refusals.record(asked.event("refused", f"a body with a reward: {error}"))
            return web.Response(status=error.status, text=str(error))
        self.refusals.end(asked.session_id)
        try:
            await self._session(asked).end()
            if given is not None:
                await asyncio.to_thread(give_reward, self.writer, asked.session_id, given)
            await asyncio.to_thread(self.writer.end_session)
        except InputError as error:
            return web.Response(status=409, text=str(error))
        except (RunError, OSError) as error:
            logger.error("cannot write to %s: %s", self.writer.run, error)
            why = f"the session has ended, but its calls may not be on disk: {error}"
            return web.Response(status=500, text=why)
        return web.Response()

    async def _reward(self, request: web.Request, asked: ClientRequest) -> GivenReward | None:
        async with self._bodies.read(request, asked.session_id) as body:
            if not body:
                return None
            if not self.options.accept_rewards:
                advice = "start it with rolltap_accept_rewards, or use `rolltap reward`"
                raise DialectError(f"this recorder accepts no rewards: {advice}", status=403)
            try:
                return GivenReward.parse(body, END_PATH)
            except InputError as error:
                raise DialectError(str(error)) from None

    def _session(self, request: ClientRequest) -> Session:
        session = self.sessions.get(request.session_id)
        if session is None:
            session = self._new_session(session_id=request.session_id)
            self.sessions[request.session_id] = session
        session.touch()
        return session

    async def _engine(self, request: ClientRequest) -> ServedModel:
        """Return the model of a session's engine, once the engine is ready.

        The engine is described in `run.json`. A harness that gives up after more than
        `UNANSWERED_SECONDS` has an event `fault`. Raises `EngineError`.
        """
        if self._recorded is not None:
            return self._recorded
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            engine, served = await self.engines.ready(request.session_id)
        except asyncio.CancelledError:
            waited = clock() - started
            if waited > UNANSWERED_SECONDS:
                why = f"the harness gave up: no engine was ready for its call after {waited:.0f} s"
                self._reject(request, EngineError(why))
            raise
        if engine.url not in self._described:
            self._described[engine.url] = asyncio.create_task(self._describe(engine))
        return ServedModel(served.model, served.max_model_len)

    async def _describe(self, engine: Engine) -> None:
        try:
            described = await engine.describe()
            await asyncio.to_thread(add_engine, self.writer.run, engine.url, described)
        except (EngineError, RunError, OSError) as error:
            what = f"the description of the engine at {engine.url}"
            logger.warning("%s is not in %s: %s", what, RUN_FILE, error)

    def _reject(self, request: ClientRequest, error: Exception) -> DialectError:
        """Record a request that no generation answers. Return the error as the harness gets it."""
        answer = as_dialect_error(error, begun=False)
        self.refusals.record(request.event(event_kind(error), str(error) or repr(error)))
        return answer


async def respond(
    generation: Generation,
    dialect: Dialect,
    context: ReplyContext,
    request: web.Request,
) -> web.StreamResponse:
    """Answer with one JSON body.

    After `KEEP_ALIVE_SECONDS` the headers are sent with status 200, followed by spaces as
    keep-alives. A later error then breaks the connection: SDKs retry after that, and would take
    an error with status 200 for an answer.
    """
    headers = _reply_headers(generation, "application/json")
    response: web.StreamResponse | None = None
    with generation.listening():
        while not await generation.finished(KEEP_ALIVE_SECONDS):
            if response is None:
                response = web.StreamResponse(headers=headers)
                await response.prepare(request)
            await response.write(b" ")
        if generation.reply is None:
            assert generation.error is not None
            if response is None:
                response = error_response(dialect, generation.error)
                response.headers.update(headers)
            elif request.transport is not None:
                request.transport.abort()
            return response
        body = dialect.encode_reply(context, generation.reply, generation.usage)
        if response is None:
            response = web.Response(body=body, headers=headers)
            await response.prepare(request)
        else:
            await response.write(body)
        await response.write_eof()
    return response


async def stream(
    generation: Generation,
    dialect: Dialect,
    context: ReplyContext,
    request: web.Request,
) -> web.StreamResponse:
    """Answer with a stream of events. Errors are events too: the status is 200."""
    encoder = dialect.stream_encoder(context)
    response = web.StreamResponse(headers=_reply_headers(generation, encoder.content_type))
    with generation.listening():
        await response.prepare(request)
        await send_events(generation, encoder, response.write)
        await response.write_eof()
    return response


async def send_events(generation: Generation, encoder: StreamEncoder, write: Write) -> None:
    """Write the events of a growing reply. A request that joins late gets all events from the
    first one on."""
    await write(encoder.start())
    num_sent = 0
    while True:
        pieces = generation.pieces[num_sent:]
        num_sent += len(pieces)
        if pieces:
            reasoning = "".join(piece[0] for piece in pieces)
            content = "".join(piece[1] for piece in pieces)
            await write(encoder.delta(reasoning, content))
        if generation.reply is not None:
            return await write(encoder.finish(generation.reply, generation.usage))
        if generation.error is not None:
            return await write(encoder.error(generation.error))
        if pieces:
            await generation.finished(COALESCE_SECONDS)
        # text of a tool call is no piece: without a keep-alive the client would hear nothing of a
        # long one
        if not await generation.changed(num_sent, KEEP_ALIVE_SECONDS):
            await write(encoder.keep_alive())


def _reply_headers(generation: Generation, content_type: str) -> dict[str, str]:
    """Return the reply's headers. The call id is the request id, under the names of OpenAI's and
    Anthropic's SDKs."""
    return {
        "content-type": content_type,
        "cache-control": "no-cache",
        "x-request-id": generation.call_id,
        "request-id": generation.call_id,
    }


def error_response(dialect: Dialect, error: DialectError) -> web.Response:
    """Return the HTTP response for an error, in the format of its API."""
    headers = {"content-type": "application/json"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return web.Response(body=dialect.encode_error(error), status=error.status, headers=headers)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _is_equal(given: str, secret: str) -> bool:
    """Compare in constant time. A header may have any bytes."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())
