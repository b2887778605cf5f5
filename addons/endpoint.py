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

from rolltap.addons.calls import Call, Event, VersionSpan, find_violation, utc_now
from rolltap.addons.continuity import Conversations, Prompt
from rolltap.addons.deltas import TextDeltas
from rolltap.addons.dialects import chat
from rolltap.addons.dialects.model_call import DialectError, ModelCall, Reply, Usage
from rolltap.addons.engine import NEUTRAL_SAMPLING, Engine, EngineError
from rolltap.addons.policy import PolicyFile
from rolltap.addons.rendering import Rendering
from rolltap.addons.store import RunWriter

logger = logging.getLogger(__name__)

SECRET_HEADER = "x-rolltap-secret"
SESSION_HEADER = "x-rolltap-session"
HOST_HEADER = "x-rolltap-host"

KEEP_ALIVE_SECONDS = 15.0
"""Harnesses give up after 60 s of silence at the earliest (Gemini CLI)."""
COALESCE_SECONDS = 0.1
"""Deltas leave at most this often: every chunk costs the proxy 30 to 90 microseconds."""
BODY_LIMIT = 256 * 1024 * 1024


class Generation:
    """What the engine has sampled for one call so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.weight_versions: list[VersionSpan] = []
        self.finish_reason: str | None = None
        self.cached_tokens: int | None = None
        self.accepted = asyncio.Event()
        self.updated = asyncio.Event()


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
            return _error(DialectError(str(error), status=error.status, code="engine_unavailable"))
        return web.Response(
            body=chat.encode_models([self.engine.model], int(time.time())), content_type="application/json"
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session_id = request.headers[SESSION_HEADER]
        host = request.headers.get(HOST_HEADER, "")
        try:
            model_call = chat.decode(await request.read())
            call, prompt = await self._begin(session_id, host, request.path, model_call)
        except (DialectError, EngineError) as error:
            self._reject(session_id, host, request.path, str(error))
            return _error(_as_dialect_error(error))
        except OSError as error:
            return _error(_unrecorded(error))
        exchange = Exchange(self, call, prompt, model_call)
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
            tools=json.dumps(model_call.tools, ensure_ascii=False) if prompt.tools_changed else None,
        )
        self.writer.add_event(Event("call_started", session_id, host, "POST", path, call.call_id))
        return call, prompt

    def _reject(self, session_id: str, host: str, path: str, why: str) -> None:
        logger.warning("session %s: %s%s: %s", session_id, host, path, why)
        try:
            self.writer.add_event(Event("rejected", session_id, host, "POST", path, why))
        except OSError as error:
            logger.error("cannot write to %s: %s", self.writer.run, error)

    async def generate(self, call: Call, generation: Generation) -> None:
        """Sample the call's completion into `generation`. Raises `EngineError`."""
        policy = self._policy.read()
        sampling = json.loads(call.sampling)
        sampling.pop("asked")
        async for chunk in self.engine.generate(call.prompt_ids, sampling, policy.model, generation.accepted):
            if chunk.token_ids and call.first_token_at is None:
                call.first_token_at = utc_now()
            generation.token_ids += chunk.token_ids
            generation.logprobs += chunk.logprobs
            generation.finish_reason = chunk.finish_reason or generation.finish_reason
            generation.cached_tokens = (
                chunk.cached_tokens if chunk.cached_tokens is not None else generation.cached_tokens
            )
            if chunk.weight_versions is not None:
                generation.weight_versions = chunk.weight_versions
            generation.updated.set()
        if policy.model is not None:
            # vLLM counts weight versions of the base model only: an adapter's version is the name it was asked by
            generation.weight_versions = [VersionSpan(policy.version, 0, len(generation.token_ids))]
        if generation.finish_reason not in ("stop", "length"):
            raise EngineError(f"the engine ended the generation with {generation.finish_reason!r}")

    def commit(self, call: Call, generation: Generation, reply: Reply | None, prompt: Prompt) -> None:
        """Write the call. From here on it is in the dataset and later calls may continue it. Raises `OSError`."""
        call.completion_ids = generation.token_ids
        call.logprobs = generation.logprobs
        call.weight_versions = generation.weight_versions
        call.finish_reason = generation.finish_reason
        call.cached_tokens = generation.cached_tokens
        call.finished_at = utc_now()
        if call.status == "completed":
            call.violation = find_violation(call.completion_ids, call.logprobs, call.weight_versions)
            if call.violation:
                logger.warning("call %s will not be trained on: %s", call.call_id, call.violation)
        message = reply.to_message() if reply else None
        call.reply = json.dumps(message, ensure_ascii=False) if message else None
        self.writer.add_call(call)
        if message:
            self._conversations[call.session_id].add(call.call_id, prompt, call.completion_ids, message)


class Exchange:
    """One request and its reply."""

    def __init__(self, endpoint: Endpoint, call: Call, prompt: Prompt, model_call: ModelCall) -> None:
        self.endpoint = endpoint
        self.call = call
        self.prompt = prompt
        self.model_call = model_call
        self.generation = Generation()
        self.reply_id = f"chatcmpl-{call.call_id}"
        self.created = int(time.time())

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer with one body. When it takes long, its whitespace begins before its contents."""
        task = asyncio.create_task(self._complete())
        response: web.StreamResponse | None = None
        try:
            while not (await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS))[0]:
                if response is None:
                    response = web.StreamResponse(headers={"content-type": "application/json"})
                    await response.prepare(request)
                await response.write(b" ")
        except (asyncio.CancelledError, ConnectionError):
            await self._abort(task)
            raise
        status, body = task.result()
        if response is None:
            return web.Response(body=body, status=status, content_type="application/json")
        await response.write(body)
        return response

    async def _complete(self) -> tuple[int, bytes]:
        """Status and body of the reply."""
        try:
            await self.endpoint.generate(self.call, self.generation)
            reply = self._parse()
            self.endpoint.commit(self.call, self.generation, reply, self.prompt)
        except (EngineError, OSError) as error:
            told = self._fail(error)
            return told.status, chat.encode_error(told)
        return 200, chat.encode_reply(self.reply_id, self.model_call.model, self.created, reply, self._usage())

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Answer with server-sent events: text as it is sampled, tool calls and the end once all is on disk."""
        encoder = chat.StreamEncoder(
            self.reply_id, self.model_call.model, self.created, include_usage=self.model_call.include_usage
        )
        task = asyncio.create_task(self.endpoint.generate(self.call, self.generation))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        try:
            accepted = asyncio.create_task(self.generation.accepted.wait())
            await asyncio.wait({task, accepted}, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            accepted.cancel()
            if task.done() and task.exception() is not None:
                return _error(self._fail(_raised(task)))
            await response.prepare(request)
            await response.write(encoder.start())
            deltas = TextDeltas()
            while not task.done():
                if self.generation.updated.is_set():
                    self.generation.updated.clear()
                    started = time.perf_counter()
                    text = encoder.delta(*deltas.feed(self._parse(partial=True)))
                    # a long reply takes longer to parse each time: spend at most a twentieth of the time on it
                    pause = max(COALESCE_SECONDS, 20 * (time.perf_counter() - started))
                    if text:
                        await response.write(text)
                    await asyncio.wait({task}, timeout=pause)
                else:
                    updated = asyncio.create_task(self.generation.updated.wait())
                    done, _ = await asyncio.wait(
                        {task, updated}, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    updated.cancel()
                    if not done:
                        await response.write(encoder.keep_alive())
            await response.write(self._last_events(task, encoder, deltas))
        except (asyncio.CancelledError, ConnectionError):
            await self._abort(task)
            raise
        return response

    def _last_events(self, task: "asyncio.Task[None]", encoder: chat.StreamEncoder, deltas: TextDeltas) -> bytes:
        if task.exception() is not None:
            return encoder.error(self._fail(_raised(task)))
        reply = self._parse()
        text = encoder.delta(*deltas.finish(reply))
        try:
            self.endpoint.commit(self.call, self.generation, reply, self.prompt)
        except OSError as error:
            return encoder.error(self._fail(error))
        return text + encoder.finish(reply.tool_calls, reply.finish_reason, self._usage())

    def _parse(self, *, partial: bool = False) -> Reply:
        reply = self.endpoint.rendering.parse(
            self.call.prompt_ids, self.generation.token_ids, self.model_call.tools, partial=partial
        )
        if self.generation.finish_reason == "length":
            reply.finish_reason = "length"
        elif reply.tool_calls:
            reply.finish_reason = "tool_calls"
        return reply

    def _usage(self) -> Usage:
        cached = self.generation.cached_tokens or 0
        return Usage(len(self.call.prompt_ids), len(self.generation.token_ids), cached)

    def _fail(self, error: Exception) -> DialectError:
        """Record the call as failed with what was sampled, and say what the harness should be told."""
        self.call.status = "aborted" if self.generation.finish_reason == "abort" else "failed"
        self.call.error = str(error)
        logger.warning("session %s: call %s failed: %s", self.call.session_id, self.call.call_id, error)
        self._record_end()
        return _as_dialect_error(error) if isinstance(error, EngineError) else _unrecorded(error)

    async def _abort(self, task: "asyncio.Task[Any]") -> None:
        """The harness hung up: stop the generation and record what it had sampled."""
        if self.call.finished_at is not None:
            return  # it hung up after the commit
        task.cancel()
        await asyncio.wait({task})
        self.call.status = "aborted"
        self.call.error = "the harness closed the connection"
        self._record_end()

    def _record_end(self) -> None:
        try:
            self.endpoint.commit(self.call, self.generation, None, self.prompt)
        except OSError as error:
            logger.error("cannot write call %s to %s: %s", self.call.call_id, self.endpoint.writer.run, error)


def _raised(task: "asyncio.Task[Any]") -> Exception:
    error = task.exception()
    if isinstance(error, EngineError):
        return error
    assert error is not None
    raise error


def _as_dialect_error(error: Exception) -> DialectError:
    if isinstance(error, DialectError):
        return error
    status = error.status if isinstance(error, EngineError) else 500
    return DialectError(str(error), status=status, code="engine_error")


def _unrecorded(error: Exception) -> DialectError:
    return DialectError(f"the recorder cannot write this call: {error}", status=500, code="not_recorded")


def _error(error: DialectError) -> web.Response:
    return web.Response(body=chat.encode_error(error), status=error.status, content_type="application/json")
