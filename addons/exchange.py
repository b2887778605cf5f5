"""One model call and its reply: sampling, streaming, keep-alives, hang-ups, and the commit before the last event."""

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rolltap.addons.calls import Call, VersionSpan, find_violation, utc_now
from rolltap.addons.continuity import Conversations, Prompt
from rolltap.addons.deltas import TextDeltas
from rolltap.addons.dialects import chat
from rolltap.addons.dialects.model_call import DialectError, ModelCall, Reply, Usage
from rolltap.addons.engine import Engine, EngineError
from rolltap.addons.policy import PolicyFile
from rolltap.addons.rendering import Rendering
from rolltap.addons.store import RunWriter

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
"""Harnesses give up after 60 s of silence at the earliest (Gemini CLI)."""
COALESCE_SECONDS = 0.1
"""Deltas leave at most this often: every chunk costs the proxy 30 to 90 microseconds."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What calls are answered from and recorded to."""

    engine: Engine
    policy: PolicyFile
    rendering: Rendering
    writer: RunWriter


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


class Exchange:
    """One request and its reply."""

    def __init__(
        self, parts: Parts, conversations: Conversations, call: Call, prompt: Prompt, model_call: ModelCall
    ) -> None:
        self._parts = parts
        self._conversations = conversations
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
            self._abort(task)
            raise
        status, body = task.result()
        if response is None:
            return web.Response(body=body, status=status, content_type="application/json")
        await response.write(body)
        return response

    async def _complete(self) -> tuple[int, bytes]:
        """Status and body of the reply."""
        try:
            await self._generate()
            reply = self._parse()
            self._commit(reply)
        except Exception as error:  # whatever it is, the call is recorded and the harness is told
            told = self._fail(error)
            return told.status, chat.encode_error(told)
        return 200, chat.encode_reply(self.reply_id, self.model_call.model, self.created, reply, self._usage())

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Answer with server-sent events: text as it is sampled, tool calls and the end once all is on disk."""
        encoder = chat.StreamEncoder(
            self.reply_id, self.model_call.model, self.created, include_usage=self.model_call.include_usage
        )
        task = asyncio.create_task(self._generate())
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        try:
            accepted = asyncio.create_task(self.generation.accepted.wait())
            await asyncio.wait({task, accepted}, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            accepted.cancel()
            if task.done():
                task.result()
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
            self._abort(task)
            raise
        except Exception as error:
            task.cancel()
            told = self._fail(error)
            if not response.prepared:
                return error_response(told)
            await response.write(encoder.error(told))
        return response

    def _last_events(self, task: "asyncio.Task[None]", encoder: chat.StreamEncoder, deltas: TextDeltas) -> bytes:
        """The rest of the text, and the events that end the stream once the call is on disk."""
        task.result()
        reply = self._parse()
        text = encoder.delta(*deltas.finish(reply))
        self._commit(reply)
        return text + encoder.finish(reply.tool_calls, reply.finish_reason, self._usage())

    def _parse(self, *, partial: bool = False) -> Reply:
        reply = self._parts.rendering.parse(
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
        self.call.error = str(error) or repr(error)
        logger.warning("session %s: call %s failed: %s", self.call.session_id, self.call.call_id, self.call.error)
        self._record_end()
        return as_dialect_error(error)

    def _abort(self, task: "asyncio.Task[Any]") -> None:
        """The harness hung up: record what was sampled and stop the generation.

        Awaits nothing: a handler may be cancelled twice, and the record must not be lost to the second time.
        """
        if self.call.finished_at is None:  # else it hung up after the commit
            self.call.status = "aborted"
            self.call.error = "the harness closed the connection"
            self._record_end()
        task.cancel()

    def _record_end(self) -> None:
        try:
            self._commit(None)
        except OSError as error:
            logger.error("cannot write call %s to %s: %s", self.call.call_id, self._parts.writer.run, error)

    async def _generate(self) -> None:
        """Sample the call's completion. Raises `EngineError`."""
        call, generation = self.call, self.generation
        policy = self._parts.policy.read()
        sampling = json.loads(call.sampling)
        sampling.pop("asked")
        async for chunk in self._parts.engine.generate(call.prompt_ids, sampling, policy.model, generation.accepted):
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

    def _commit(self, reply: Reply | None) -> None:
        """Write the call. From here on it is in the dataset and later calls may continue it. Raises `OSError`."""
        call, generation = self.call, self.generation
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
        self._parts.writer.add_call(call)
        if message:
            self._conversations.add(call.call_id, self.prompt, call.completion_ids, message)


def as_dialect_error(error: Exception) -> DialectError:
    """What the harness is told of a failure."""
    if isinstance(error, DialectError):
        return error
    if isinstance(error, EngineError):
        return DialectError(str(error), status=error.status, code="engine_error")
    if isinstance(error, OSError):
        return DialectError(f"the recorder cannot write this call: {error}", status=500, code="not_recorded")
    logger.error("a bug of rolltap or of a renderer", exc_info=error)
    return DialectError(f"internal error of the recorder: {error!r}", status=500, code="internal_error")


def error_response(error: DialectError) -> web.Response:
    """The error as this API writes it."""
    return web.Response(body=chat.encode_error(error), status=error.status, content_type="application/json")
