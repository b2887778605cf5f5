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
from pathlib import Path
from typing import Any

from aiohttp import web

from rolltap.addons.calls import Call, Event
from rolltap.addons.continuity import Conversations, Prompt
from rolltap.addons.dialects import chat
from rolltap.addons.dialects.model_call import DialectError, ModelCall
from rolltap.addons.engine import NEUTRAL_SAMPLING, Engine, EngineError
from rolltap.addons.exchange import Exchange, Parts, as_dialect_error, error_response
from rolltap.addons.policy import PolicyFile
from rolltap.addons.rendering import Rendering
from rolltap.addons.store import RunWriter

logger = logging.getLogger(__name__)

SECRET_HEADER = "x-rolltap-secret"
SESSION_HEADER = "x-rolltap-session"
HOST_HEADER = "x-rolltap-host"

BODY_LIMIT = 256 * 1024 * 1024


class Endpoint:
    """An aiohttp application that answers model calls. `start` binds it; `close` ends it with all its calls."""

    def __init__(
        self, rendering: Rendering, engine_url: str, writer: RunWriter, run: Path, sampling: dict[str, Any]
    ) -> None:
        self.secret = secrets.token_urlsafe(32)
        self.rendering = rendering
        self.writer = writer
        self.sampling = {**NEUTRAL_SAMPLING, **sampling}
        self._engine_url = engine_url
        self._policy = PolicyFile(run)
        self._conversations: defaultdict[str, Conversations] = defaultdict(lambda: Conversations(rendering))
        self._running: set[asyncio.Task[Any]] = set()
        # bound at once, so that requests queue here even before the server runs
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self.engine: Engine

    async def start(self) -> None:
        """Serve until `close`."""
        self.engine = Engine(self._engine_url)
        self._parts = Parts(self.engine, self._policy, self.rendering, self.writer)
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[self._authorize])
        for path in chat.PATHS:
            app.router.add_post(path, self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def close(self) -> None:
        """Stop serving. Running calls are recorded as aborted."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._runner.cleanup()
        await self.engine.close()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get(SECRET_HEADER, ""), self.secret):
            return web.Response(status=403, text="this port belongs to the rolltap recorder in front of it")
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        try:
            await self.engine.max_model_len()
        except EngineError as error:
            return error_response(DialectError(str(error), status=error.status, code="engine_unavailable"))
        return web.Response(
            body=chat.encode_models([self.engine.model], int(time.time())), content_type="application/json"
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session_id = request.headers[SESSION_HEADER]
        host = request.headers.get(HOST_HEADER, "")
        try:
            model_call = chat.decode(await request.read())
            call, prompt = await self._begin(session_id, host, request.path, model_call)
        except Exception as error:
            self._reject(session_id, host, request.path, str(error) or repr(error))
            return error_response(as_dialect_error(error))
        exchange = Exchange(self._parts, self._conversations[session_id], call, prompt, model_call)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await (exchange.stream(request) if model_call.stream else exchange.respond(request))
        finally:
            self._running.discard(task)

    async def _begin(self, session_id: str, host: str, path: str, model_call: ModelCall) -> tuple[Call, Prompt]:
        """The call's prompt and its intent, on disk before the engine is asked."""
        context = await self.engine.max_model_len()
        prompt = self._conversations[session_id].prompt(model_call.messages, model_call.tools)
        room = context - len(prompt.ids)
        if room < 1:
            raise DialectError(
                f"This model's maximum context length is {context} tokens. However, your messages resulted in "
                f"{len(prompt.ids)} tokens. Please reduce the length of the messages.",
                code="context_length_exceeded",
            )
        sampling = {
            **self.sampling,
            "max_tokens": min(model_call.max_tokens or room, room, self.sampling.get("max_tokens", room)),
            "stop_token_ids": self.rendering.stop_token_ids(),
        }
        call = Call(
            session_id=session_id,
            call_id=uuid.uuid4().hex,
            prompt_ids=prompt.ids,
            parent_id=prompt.parent.call_id if prompt.parent else None,
            prefix_length=prompt.prefix_length,
            kind=prompt.kind,
            kind_reason=prompt.reason,
            dialect=chat.NAME,
            host=host,
            path=path,
            model=model_call.model,
            stream=model_call.stream,
            sampling=json.dumps({**sampling, "asked": model_call.asked}),
            messages=json.dumps(prompt.new_messages, ensure_ascii=False),
            tools=json.dumps(model_call.tools, ensure_ascii=False) if prompt.parent is None else None,
        )
        self.writer.add_event(Event("call_started", session_id, host, "POST", path, call.call_id))
        return call, prompt

    def _reject(self, session_id: str, host: str, path: str, why: str) -> None:
        logger.warning("session %s: %s%s: %s", session_id, host, path, why)
        try:
            self.writer.add_event(Event("rejected", session_id, host, "POST", path, why))
        except OSError as error:
            logger.error("cannot write to %s: %s", self.writer.run, error)
