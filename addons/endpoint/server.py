"""The model APIs, served on loopback inside mitmdump's own event loop.

mitmproxy can only stream what an upstream sends, so `capture` redirects model calls here. A call is decoded, rendered
or continued to prompt token ids, sampled by the engine, encoded as it comes, and committed to the store before its
last event leaves. Only the addon in the same process knows the secret that every request must carry.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from rolltap.addons.dialects.dialect import Dialect, Operation
from rolltap.addons.dialects.routes import find_route, is_websocket
from rolltap.addons.dialects.types import ContextOverflow, Head, ModelCall, ServedModel
from rolltap.addons.endpoint.exchange import error_response, respond, stream
from rolltap.addons.endpoint.generation import Generation, Parts, as_dialect_error
from rolltap.addons.endpoint.retries import find_retried, worth_remembering
from rolltap.addons.endpoint.roles import find_role
from rolltap.addons.endpoint.websocket import serve_socket
from rolltap.addons.engine.client import Engine, EngineError
from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.engine.pool import Engines
from rolltap.addons.engine.sampling import NEUTRAL_SAMPLING
from rolltap.addons.prompts.continuity import Conversations
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.errors import RunError
from rolltap.addons.store.metadata import RUN_FILE, add_engine
from rolltap.addons.store.records import Call, Event, EventKind
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

SECRET_HEADER = "x-rolltap-secret"
SESSION_HEADER = "x-rolltap-session"
HOST_HEADER = "x-rolltap-host"

CONTROL_HOST = "session.rolltap"
"""What a session asks the recorder itself goes to this host, through the proxy like all else."""
END_PATH = "/end"
"""`POST` here ends the session: running calls are recorded as aborted, and its commits are brought to the disk."""

BODY_LIMIT = 256 * 1024 * 1024


@dataclass(slots=True)
class Memory:
    """What the endpoint knows of one session."""

    conversations: Conversations
    generations: list[Generation] = field(default_factory=list)
    """Those that run, and the newest that are done."""
    tools_seen: bool = False


class Endpoint:
    """An aiohttp application that answers model calls. `start` binds it; `close` ends it with all its calls.

    `patience` is in seconds, see `Parts`.
    """

    def __init__(
        self,
        rendering: Rendering,
        engine_urls: Sequence[str],
        writer: RunWriter,
        run: Path,
        sampling: dict[str, Any],
        *,
        patience: float,
    ) -> None:
        self.secret = secrets.token_urlsafe(32)
        self.rendering = rendering
        self.writer = writer
        self.sampling = {**NEUTRAL_SAMPLING, **sampling}
        self._engine_urls = engine_urls
        self._policy = PolicyFile(run)
        self._patience = patience
        self._run = run
        self._memories: defaultdict[str, Memory] = defaultdict(lambda: Memory(Conversations(rendering)))
        self._described: dict[str, asyncio.Task[None]] = {}
        # bound at once, so that requests queue here even before the server runs
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self.engines: Engines

    async def start(self) -> None:
        """Serve until `close`."""
        self.engines = Engines(self._engine_urls)
        self._parts = Parts(self.engines, self._policy, self.rendering, self.writer, self._patience)
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_route("*", "/{target:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def close(self) -> None:
        """Stop serving. Running calls are recorded as aborted."""
        for memory in self._memories.values():
            for generation in memory.generations:
                generation.abort("the recorder was stopped")
        await self._runner.cleanup()
        for task in self._described.values():
            task.cancel()
        await asyncio.gather(*self._described.values(), return_exceptions=True)
        await self.engines.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get(SECRET_HEADER, ""), self.secret):
            return web.Response(status=403, text="this port belongs to the rolltap recorder in front of it")
        if request.headers.get(HOST_HEADER) == CONTROL_HOST:
            return await self._end_session(request)
        if is_websocket(request.raw_path, request.headers):
            return await serve_socket(request, self.begin, self._reject)
        route = find_route(request.method, request.raw_path, request.headers)
        if route is None:
            return web.Response(status=404, text="not a model call")
        dialect = route.dialect
        try:
            if route.operation == "generate":
                model_call = dialect.decode(await request.read(), request.raw_path)
                generation = await self.begin(dialect, model_call, request)
            else:
                body = await self._look_up(dialect, route.operation, request)
        except Exception as error:
            self._reject(request, str(error) or repr(error))
            return error_response(dialect, as_dialect_error(error))
        if route.operation != "generate":
            return web.Response(body=body, content_type="application/json")
        head = Head(generation.call.call_id, int(time.time()), request.raw_path, model_call)
        answer = stream if model_call.stream else respond
        return await answer(generation, dialect, head, request)

    async def _look_up(self, dialect: Dialect, operation: Operation, request: web.Request) -> bytes:
        """The body of a reply that needs no sampling."""
        if operation == "models":
            engine, context = await self._engine(request.headers[SESSION_HEADER])
            served = [ServedModel(engine.model, context)]
            return dialect.encode_models(request.raw_path, served, int(time.time()))
        model_call = dialect.decode(await request.read(), request.raw_path)
        conversations = self._memories[request.headers[SESSION_HEADER]].conversations
        return dialect.encode_token_count(len(conversations.prompt(model_call.messages, model_call.tools).ids))

    async def begin(self, dialect: Dialect, model_call: ModelCall, request: web.Request) -> Generation:
        """The generation that answers a request: a new one, its intent on disk before the engine is asked, or the one
        that the request repeats.

        Raises `DialectError` and `EngineError` for what is refused before that, and `OSError` when nothing can be
        written.
        """
        session_id = request.headers[SESSION_HEADER]
        _, context = await self._engine(session_id)
        memory = self._memories[session_id]
        prompt = memory.conversations.prompt(model_call.messages, model_call.tools)
        room = context - len(prompt.ids)
        if room < 1:
            raise ContextOverflow(len(prompt.ids), context)
        host, path = request.headers.get(HOST_HEADER, ""), request.path
        generation = find_retried(memory.generations, dialect.NAME, model_call, prompt.ids, request.headers)
        if generation is not None:
            kind: EventKind = "replayed" if generation.done else "joined"
            self.writer.add_event(Event(kind, session_id, host, "POST", path, call_id=generation.call.call_id))
            return generation
        role = find_role(model_call, request.headers, tools_before=memory.tools_seen)
        memory.tools_seen = memory.tools_seen or bool(model_call.tools)
        call = Call(
            session_id=session_id,
            call_id=uuid.uuid4().hex,
            prompt_ids=prompt.ids,
            parent_id=prompt.parent.call_id if prompt.parent else None,
            prefix_length=prompt.prefix_length,
            kind=prompt.kind,
            kind_reason=prompt.reason,
            role=role.role,
            role_evidence=role.evidence,
            dialect=dialect.NAME,
            host=host,
            path=path,
            model=model_call.model,
            stream=model_call.stream,
            messages=json.dumps(prompt.new_messages, ensure_ascii=False),
            tools=json.dumps(model_call.tools, ensure_ascii=False) if prompt.parent is None else None,
        )
        self.writer.require_room()
        self.writer.add_event(Event("call_started", session_id, host, "POST", path, call_id=call.call_id))
        sampling = self._sampling_for(model_call, room)
        generation = Generation(self._parts, memory.conversations, call, prompt, model_call, sampling)
        memory.generations = [*worth_remembering(memory.generations), generation]
        return generation

    async def _engine(self, session_id: str) -> tuple[Engine, int]:
        """The engine of a session and its context window in tokens. The first time, `run.json` learns of it."""
        engine = self.engines.of(session_id)
        context = await engine.max_model_len()
        if engine.url not in self._described:
            self._described[engine.url] = asyncio.create_task(self._describe(engine))
        return engine, context

    async def _describe(self, engine: Engine) -> None:
        try:
            await asyncio.to_thread(add_engine, self._run, engine.url, await engine.describe())
        except (EngineError, RunError, OSError) as error:
            logger.warning("%s does not say what %s is: %s", RUN_FILE, engine.url, error)

    async def _end_session(self, request: web.Request) -> web.Response:
        """End the session that asks: nothing of it runs or is remembered afterwards, and it is on the disk."""
        memory = self._memories.pop(request.headers[SESSION_HEADER], None)
        for generation in memory.generations if memory else ():
            generation.abort("the session ended")
        try:
            await asyncio.to_thread(self.writer.end_session)
        except OSError as error:
            logger.error("cannot write to %s: %s", self.writer.run, error)
            return web.Response(status=500, text=f"the session is not on the disk: {error}")
        return web.Response()

    def _sampling_for(self, model_call: ModelCall, room: int) -> dict[str, Any]:
        """vLLM's sampling parameters: ours, and of the harness's wishes those that shape the reply."""
        sampling = {
            **self.sampling,
            "max_tokens": min(model_call.max_tokens or room, room, self.sampling.get("max_tokens", room)),
            "stop_token_ids": self.rendering.stop_token_ids(),
        }
        if model_call.stop:
            sampling["stop"] = model_call.stop
        if model_call.schema is not None:
            sampling["structured_outputs"] = {"json": model_call.schema} if model_call.schema else {"json_object": True}
        return sampling

    def _reject(self, request: web.Request, why: str) -> None:
        session_id, host = request.headers[SESSION_HEADER], request.headers.get(HOST_HEADER, "")
        logger.warning("session %s: %s%s: %s", session_id, host, request.path, why)
        try:
            self.writer.add_event(Event("rejected", session_id, host, request.method, request.path, why))
        except OSError as error:
            logger.error("cannot write to %s: %s", self.writer.run, error)
