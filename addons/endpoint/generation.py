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
from enum import Enum, auto
from typing import Any

from rolltap.addons.dialects.types import DialectError, ModelCall, Reply, Usage
from rolltap.addons.engine.completion import sample
from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.errors import EngineError
from rolltap.addons.prompts.continuity import Conversations, Prompt
from rolltap.addons.prompts.deltas import TextDeltas, cut_at_stop
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import Call, CallStatus, find_violation, utc_now
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0
"""How long a generation that nobody listens to goes on: harnesses repeat a lost call after 0.2 to 5 s."""


@dataclass(frozen=True, slots=True)
class Services:
    """The engines, the renderer and the run of all calls."""

    engines: EnginePool
    policy: PolicyFile
    rendering: Rendering
    writer: RunWriter
    patience: float
    """Seconds that a call waits for an engine that is down, counted from the last sampled token."""


class State(Enum):
    """Where a call is. `_NEXT` says which states may follow."""

    SAMPLING = auto()
    SAMPLED = auto()
    """The completion is whole. It is not recorded as completed before somebody listens."""
    COMMITTED = auto()
    """Recorded as completed: later calls may continue it. The harness is told when the disk has it."""
    COMPLETED = auto()
    FAILED = auto()
    ABORTED = auto()


_NEXT = {
    State.SAMPLING: {State.SAMPLED, State.FAILED, State.ABORTED},
    State.SAMPLED: {State.COMMITTED, State.FAILED, State.ABORTED},
    State.COMMITTED: {State.COMPLETED, State.FAILED},
}
"""Every other state is an end."""
_UNRECORDED = {State.SAMPLING, State.SAMPLED}
_STATUS: dict[State, CallStatus] = {State.COMMITTED: "completed", State.FAILED: "failed", State.ABORTED: "aborted"}
"""The recorded status of a call that leaves the unrecorded states for another."""


class Generation:
    """A call that is being sampled, or was. Create it inside the event loop; it starts at once.

    Either `reply` or `error` is set when it is `done`. `pieces` is the text of the reply so far, in the order in which
    it became certain, each a pair of new reasoning and new content.
    """

    def __init__(
        self,
        services: Services,
        conversations: Conversations,
        call: Call,
        prompt: Prompt,
        model_call: ModelCall,
        sampling: dict[str, Any],
    ) -> None:
        self._services = services
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
        self._state = State.SAMPLING
        self._deltas = TextDeltas()
        self._parsed_tokens = 0
        self._stop: str | None = None
        self._changed = asyncio.Event()
        self._done = asyncio.Event()
        self._heard = asyncio.Event()
        self._listeners = 0
        self._linger = self._abort_later()
        self._task = asyncio.create_task(self._run())

    @property
    def done(self) -> bool:
        """Whether the call has ended. It is recorded then, unless the disk refused it."""
        return self._state not in _NEXT

    @property
    def unheard(self) -> bool:
        """Whether nobody listens and nobody has had the whole reply."""
        return not self._listeners and not self.delivered

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(len(self.call.prompt_ids), len(self.call.completion_ids), self.call.cached_tokens or 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep the generation going inside the block. It is aborted when nobody listens for `LINGER_SECONDS`.

        The listener has had the whole reply when it leaves the block without an exception after the call is done.
        """
        self._linger.cancel()
        self._listeners += 1
        self._heard.set()
        try:
            yield
            self.delivered |= self.done
        finally:
            self._listeners -= 1
            if not self._listeners and not self.done:
                self._heard.clear()
                self._linger = self._abort_later()

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
        if self._state not in _UNRECORDED or self._parsed_tokens == len(self.call.completion_ids):
            return False
        self._parsed_tokens = len(self.call.completion_ids)
        try:
            self._add_piece(self._deltas.feed(self._parse(partial=True)))
        except Exception as error:  # a renderer's bug must not cut a stream
            self._task.cancel()
            self._enter(State.FAILED, error)
        return True

    def abort(self, why: str) -> None:
        """End the call now and record what was sampled. Does nothing when it is recorded."""
        if self._state in _UNRECORDED:
            self._task.cancel()
            self._enter(State.ABORTED, DialectError(why, status=503, code="aborted"))

    def _abort_later(self) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(LINGER_SECONDS, self.abort, "the harness closed the connection")

    async def _run(self) -> None:
        call, services = self.call, self._services
        try:
            async for chunk in sample(
                call, self._sampling, services.engines, services.policy, services.writer, services.patience
            ):
                self._stop = chunk.stop or self._stop
                self._changed.set()
            self._enter(State.SAMPLED)
            while self.unheard:
                await self._heard.wait()
            reply = self._parse()
            self._add_piece(self._deltas.finish(reply))
            self._enter(State.COMMITTED, reply)
            self._conversations.add(call.call_id, self._prompt, call.completion_ids, reply.to_message())
            if services.writer.sync_policy == "call":
                await asyncio.to_thread(services.writer.sync)
            self._enter(State.COMPLETED, reply)
        except Exception as error:  # whatever it is, the call is recorded and the harness is told
            if not self.done:
                self._enter(State.FAILED, error)

    def _enter(self, state: State, outcome: Reply | Exception | None = None) -> None:
        """Change the state, with the reply or with what went wrong. This is where the call is recorded, once.

        Raises `RuntimeError` for a state that may not follow. A reply that cannot be recorded is not given: whatever
        its record raises is raised and the state stays. Without a reply the call ends all the same, for others wait.
        """
        if state not in _NEXT.get(self._state, ()):
            raise RuntimeError(f"call {self.call.call_id} is {self._state.name} and cannot become {state.name}")
        if self._state in _UNRECORDED and state not in _UNRECORDED:
            try:
                self._record(_STATUS[state], outcome)
            except Exception as failure:
                if state is State.COMMITTED:
                    raise
                logger.error("cannot write call %s to %s: %s", self.call.call_id, self._services.writer.run, failure)
        self._state = state
        if self.done:
            if isinstance(outcome, Exception):
                self.error = as_dialect_error(outcome)
                where = f"session {self.call.session_id}: call {self.call.call_id}"
                logger.warning("%s %s: %s", where, state.name.lower(), str(outcome) or repr(outcome))
            else:
                self.reply = outcome
            self._linger.cancel()
            self._done.set()
            self._changed.set()

    def _record(self, status: CallStatus, outcome: Reply | Exception | None) -> None:
        """Write the call. From here on it is in the dataset. Raises `OSError`."""
        call, hosted = self.call, self.model_call.hosted_tools
        call.status, call.finished_at = status, utc_now()
        asked = self.model_call.requested_sampling | ({"hosted_tools": hosted} if hosted else {})
        call.sampling = json.dumps({**self._sampling, "asked": asked})
        call.reply = call.violation = None
        if isinstance(outcome, Reply):
            call.reply = json.dumps(outcome.to_message(), ensure_ascii=False)
            call.violation = find_violation(call.completion_ids, call.logprobs, call.weight_versions)
        else:
            call.error = str(outcome) or repr(outcome)
        if call.violation:
            logger.warning("call %s will not be trained on: %s", call.call_id, call.violation)
        self._services.writer.add_call(call)

    def _parse(self, *, partial: bool = False) -> Reply:
        call, model_call = self.call, self.model_call
        reply = self._services.rendering.parse(call.prompt_ids, call.completion_ids, model_call.tools, partial=partial)
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


def as_dialect_error(error: Exception) -> DialectError:
    """A failure as the harness is told of it."""
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
