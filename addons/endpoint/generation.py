"""One model call from its prompt to its record, whoever listens to it.

It runs in a task of its own, so that a retry can join it, a listener that hangs up can come back, and an engine that
dies in the middle is continued from the last sampled token.
"""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rolltap.addons.dialects.types import DialectError, ModelCall, Reply, Usage
from rolltap.addons.engine.client import Engine, EngineError
from rolltap.addons.engine.policy import Policy, PolicyFile
from rolltap.addons.engine.pool import Engines
from rolltap.addons.prompts.continuity import Conversations, Prompt
from rolltap.addons.prompts.deltas import TextDeltas, cut_at_stop
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import Call, Event, VersionSpan, find_violation, utc_now
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0
"""How long a generation that nobody listens to goes on: harnesses repeat a lost call after 0.2 to 5 s."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
"""Between attempts to go on with an engine that failed; each pause is twice the last one."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What calls are answered from and recorded to."""

    engines: Engines
    policy: PolicyFile
    rendering: Rendering
    writer: RunWriter
    patience: float
    """Seconds that a call waits for an engine that is down, counted from the last sampled token."""


class Generation:
    """A call that is being sampled, or was. Create it inside the event loop; it starts at once.

    Either `reply` or `error` is set when it is `done`: the call is recorded by then. `pieces` is the text of the reply
    so far, in the order in which it became certain, each a pair of new reasoning and new content.
    """

    def __init__(
        self,
        parts: Parts,
        conversations: Conversations,
        call: Call,
        prompt: Prompt,
        model_call: ModelCall,
        sampling: dict[str, Any],
    ) -> None:
        self._parts = parts
        self._conversations = conversations
        self._prompt = prompt
        self._sampling = sampling
        self.call = call
        self.model_call = model_call
        self.pieces: list[tuple[str, str]] = []
        self.reply: Reply | None = None
        self.error: DialectError | None = None
        self.delivered = False
        """Whether a listener has had the whole reply."""
        self._deltas = TextDeltas()
        self._parsed_tokens = 0
        self._stop: str | None = None
        self._committed = False
        self._changed = asyncio.Event()
        self._done = asyncio.Event()
        self._heard = asyncio.Event()
        self._listeners = 0
        self._linger: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run())

    @property
    def done(self) -> bool:
        """Whether the call is recorded."""
        return self.reply is not None or self.error is not None

    @property
    def unheard(self) -> bool:
        """Whether its listener hung up before the reply was out."""
        return not self._listeners and not self.delivered

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(len(self.call.prompt_ids), len(self.call.completion_ids), self.call.cached_tokens or 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep the generation going inside the block. It is aborted `LINGER_SECONDS` after the last listener left."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._listeners += 1
        self._heard.set()
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners and not self.done:
                self._heard.clear()
                loop = asyncio.get_running_loop()
                self._linger = loop.call_later(LINGER_SECONDS, self.abort, "the harness closed the connection")

    async def changed(self, timeout: float) -> bool:
        """Wait until tokens were sampled or the call is done; False when `timeout` seconds passed before."""
        return await _happens(self._changed, timeout)

    async def finished(self, timeout: float) -> bool:
        """Wait until the call is done; False when `timeout` seconds passed before."""
        return await _happens(self._done, timeout)

    def advance(self) -> bool:
        """Parse what was sampled since the last time into `pieces`; False when that was nothing."""
        if self.done:
            return False
        self._changed.clear()
        # a call that is committed has all its pieces, and may only wait for the disk
        if self._committed or self._parsed_tokens == len(self.call.completion_ids):
            return False
        self._parsed_tokens = len(self.call.completion_ids)
        try:
            self._add_piece(self._deltas.feed(self._parse(partial=True)))
        except Exception as error:  # a renderer's bug must not cut a stream
            self._task.cancel()
            self._fail(error)
        return True

    def abort(self, why: str) -> None:
        """End the call now and record what was sampled. Does nothing when it is recorded."""
        if self.done or self._committed:
            return
        self._task.cancel()
        self.call.status = "aborted"
        self._end(DialectError(why, status=503, code="aborted"), why)

    async def _run(self) -> None:
        try:
            await self._sample()
            # a reply that nobody waits for is recorded as aborted, unless a retry comes for it
            await self._heard.wait()
            self.call.finished_at = utc_now()
            reply = self._parse()
            self._add_piece(self._deltas.finish(reply))
            self._commit(reply)
        except Exception as error:  # whatever it is, the call is recorded and the harness is told
            self._fail(error)
            return
        try:
            if self._parts.writer.policy == "call":
                await asyncio.to_thread(self._parts.writer.sync)
        except OSError as error:  # the call is written, but may not outlive the machine
            logger.error("call %s is not on the disk: %s", self.call.call_id, error)
            self.error = as_dialect_error(error)
        else:
            self.reply = reply
        self._set_done()

    async def _sample(self) -> None:
        """Sample the whole completion, across failures of the engine. Raises `EngineError`."""
        call = self.call
        pause, waited, sampled = FIRST_PAUSE_SECONDS, 0.0, 0
        while call.finish_reason is None:
            policy, start = self._parts.policy.read(), len(call.completion_ids)
            engine = self._parts.engines.of(call.session_id)
            try:
                await self._sample_piece(engine, policy)
            except EngineError as error:
                if self._drops_schema(error):
                    continue
                if not error.passing:
                    raise
                self._complete_spans(policy, start)
                if len(call.completion_ids) > sampled:
                    pause, waited, sampled = FIRST_PAUSE_SECONDS, 0.0, len(call.completion_ids)
                moves = self._parts.engines.failed(engine)
                if not moves and waited + pause > self._parts.patience:
                    raise
                logger.warning("call %s goes on after %d tokens: %s", call.call_id, sampled, error)
                self._record(Event("continued", call.session_id, call.host, "POST", call.path, call_id=call.call_id))
                if not moves:
                    await asyncio.sleep(pause)
                    waited, pause = waited + pause, min(2 * pause, LONGEST_PAUSE_SECONDS)
                self._finish_what_was_complete()

    async def _sample_piece(self, engine: Engine, policy: Policy) -> None:
        """Ask an engine once for the rest of the completion. Raises `EngineError`."""
        call = self.call
        call.engine = engine.url
        start = len(call.completion_ids)
        sampling = {**self._sampling, "max_tokens": self._sampling["max_tokens"] - start}
        finish_reason = None
        async for chunk in engine.generate([*call.prompt_ids, *call.completion_ids], sampling, policy.model):
            if chunk.token_ids and call.first_token_at is None:
                call.first_token_at = utc_now()
            call.completion_ids += chunk.token_ids
            call.logprobs += chunk.logprobs
            finish_reason, self._stop = chunk.finish_reason or finish_reason, chunk.stop or self._stop
            if chunk.cached_tokens is not None and not start:
                call.cached_tokens = chunk.cached_tokens
            for span in chunk.weight_versions or []:
                call.weight_versions.append(VersionSpan(span.version, start + span.start, start + span.end))
            self._changed.set()
        if policy.model is not None:
            # vLLM counts weight versions of the base model only: an adapter's version is the name it was asked by
            call.weight_versions = [span for span in call.weight_versions if span.start < start]
            call.weight_versions.append(VersionSpan(policy.version, start, len(call.completion_ids)))
        if finish_reason == "abort":
            raise EngineError("the engine aborted the generation", passing=True)
        if finish_reason not in ("stop", "length"):
            raise EngineError(f"the engine ended the generation with {finish_reason!r}", status=500)
        call.finish_reason = finish_reason

    def _drops_schema(self, error: EngineError) -> bool:
        """An engine that does not support a schema is asked without it."""
        if error.status == 400 and "structured_outputs" in self._sampling and not self.call.completion_ids:
            del self._sampling["structured_outputs"]
            return True
        return False

    def _complete_spans(self, policy: Policy, start: int) -> None:
        """Name the weights of a piece whose last chunk was lost, if the policy was the same before and after it. The
        call keeps a gap otherwise, and is not trained on."""
        covered = self.call.weight_versions[-1].end if self.call.weight_versions else 0
        end = len(self.call.completion_ids)
        if covered == start < end and self._parts.policy.read() == policy:
            self.call.weight_versions.append(VersionSpan(policy.version, start, end))

    def _finish_what_was_complete(self) -> None:
        """Do not sample on when only the engine's last words were lost."""
        call = self.call
        if call.completion_ids and call.completion_ids[-1] in self._sampling["stop_token_ids"]:
            call.finish_reason = "stop"
        elif len(call.completion_ids) == self._sampling["max_tokens"]:
            call.finish_reason = "length"

    def _parse(self, *, partial: bool = False) -> Reply:
        call, model_call = self.call, self.model_call
        reply = self._parts.rendering.parse(call.prompt_ids, call.completion_ids, model_call.tools, partial=partial)
        if model_call.schema is not None and not reply.content:
            # the engine let the model write JSON alone, where its template may have opened its reasoning
            reply.content, reply.reasoning = reply.reasoning, ""
        cut_at_stop(reply, model_call.stop, partial=partial)
        reply.stop = reply.stop or self._stop
        if call.finish_reason == "length":
            reply.finish_reason = "length"
        elif reply.tool_calls:
            reply.finish_reason = "tool_calls"
        return reply

    def _add_piece(self, piece: tuple[str, str]) -> None:
        if any(piece):
            self.pieces.append(piece)

    def _fail(self, error: Exception) -> None:
        self.call.status = "failed"
        self._end(as_dialect_error(error), str(error) or repr(error))

    def _end(self, error: DialectError, why: str) -> None:
        """Record a call that did not complete, with what was sampled of it."""
        call = self.call
        call.error, call.finished_at = why, utc_now()
        logger.warning("session %s: call %s %s: %s", call.session_id, call.call_id, call.status, why)
        try:
            if not self._committed:
                self._commit(None)
        except Exception as failure:  # what waits for this call must not wait for ever
            logger.error("cannot write call %s to %s: %s", call.call_id, self._parts.writer.run, failure)
        self.error = error
        self._set_done()

    def _set_done(self) -> None:
        self._done.set()
        self._changed.set()

    def _commit(self, reply: Reply | None) -> None:
        """Write the call. From here on it is in the dataset and later calls may continue it. Raises `OSError`."""
        call = self.call
        if call.status == "completed":
            call.violation = find_violation(call.completion_ids, call.logprobs, call.weight_versions)
            if call.violation:
                logger.warning("call %s will not be trained on: %s", call.call_id, call.violation)
        message = reply.to_message() if reply else None
        call.sampling = json.dumps({**self._sampling, "asked": self._asked()})
        call.reply = json.dumps(message, ensure_ascii=False) if message else None
        self._parts.writer.add_call(call)
        self._committed = True
        if message:
            self._conversations.add(call.call_id, self._prompt, call.completion_ids, message)

    def _asked(self) -> dict[str, Any]:
        hosted = self.model_call.hosted_tools
        return {**self.model_call.asked, **({"hosted_tools": hosted} if hosted else {})}

    def _record(self, event: Event) -> None:
        try:
            self._parts.writer.add_event(event)
        except OSError as error:
            logger.error("cannot write to %s: %s", self._parts.writer.run, error)


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


async def _happens(event: asyncio.Event, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
