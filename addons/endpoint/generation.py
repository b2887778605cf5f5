"""Generation: one model call from its prompt to its record. This page is the life of a call, in full.

A call begins when its event `call_started` is on disk. A task of its own samples it, independent of the requests that
listen to it, so that a lost connection costs no tokens.

    SAMPLING ----> SAMPLED ----> COMMITTED ----> COMPLETED
        |             |              |
        +-- FAILED, ABORTED          +-- FAILED

`SAMPLING`: the engine is asked, and tokens are appended to the call. A retryable failure of an engine does not end the
call: another engine, or the same one after a pause, samples the rest (`engine/completion.py`).

`SAMPLED`: the completion has a finish reason. The call waits until a request listens, so that a reply which nobody
takes is not continued.

`COMMITTED`: the call is in the run as `completed`. With `rolltap_fsync=call` the fsync is outstanding.

`COMPLETED`: the reply may be delivered. What a harness has seen complete is on disk, and the next call of its session
can continue it. It waits for no other call: the conversations learn of it when they are free, before all later calls.

`FAILED`, `ABORTED`: after `SAMPLING` or `SAMPLED` the call is in the run with that status, with the tokens sampled so
far and the error. After `COMMITTED` its row stays `completed`; only the harness gets the error.

**Who ends it.** The engine, with a finish reason. An error, which fails it: of an engine when no retry is left, of the
disk, of a renderer. An abort, before it is recorded and never after: because no request listened for `LINGER_SECONDS`,
because the session ended, or because the recorder stops. Nothing else ends it, and it ends once.

**When it is committed.** Exactly once, when it leaves `SAMPLING` or `SAMPLED` for one of the other states. If that
write fails, a reply is not delivered: the call fails, and the failure is recorded if it can be. If the record of a
failed or aborted call cannot be written, the error is logged and its listeners end all the same.

**What a retry joins.** A request that repeats a call of its session (`request_digest`: same API, model, prompt and
parameters) joins that call when it is abandoned, that is without a listener and never fully delivered; or, whoever
listens, when the client marks the request as a retry and no abandoned call is equal. A running call is joined (event
`joined`), a finished one is given again (event `replayed`), from its first event on and in the form that the retry
asks for. Calls that failed or were aborted are not repeated, and every other equal request is a sample of its own: two
sub-agents can send the same prompt. `retries.py` finds the call; finished ones are remembered there and, after a
restart, in the rows of the session (`recovery.py`).

**What a listener sees.** The headers of a stream immediately; text once later tokens should not change it; keep-alives
while there is none; the last event after `COMPLETED`, or one error after `FAILED` or `ABORTED`. All listeners of a call
see the same text and the same end (`exchange.py` writes it in the API's form).
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

from rolltap.addons.concurrency import Workers
from rolltap.addons.dialects.call import DialectError, Reply, Usage
from rolltap.addons.endpoint.budget import WAITED, Grant
from rolltap.addons.endpoint.refusals import Refusals, as_dialect_error, event_kind
from rolltap.addons.endpoint.request import PreparedCall
from rolltap.addons.engine.completion import sample
from rolltap.addons.engine.connections import SILENCE_SECONDS
from rolltap.addons.engine.policy import SessionPolicy
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.errors import EngineError
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallStatus, find_violation, json_text, utc_now
from rolltap.addons.store.routing import make_routing
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0
"""Seconds without a listener after which a call is aborted. Harnesses retry a lost call after 0.2 to 5 s."""
UNANSWERED_SECONDS = 6 * SILENCE_SECONDS
"""Seconds without a new token, for this call or any other, after which an aborted call counts as one that the engine
did not answer. It is twice the time in which a silent engine is found out, so that a long prefill is still an answer.
An engine that samples for others meanwhile has a queue: who leaves it hangs up by itself."""


class State(Enum):
    """State of a call. The docstring of this file says what each means, `NEXT` lists the transitions."""

    SAMPLING = auto()
    SAMPLED = auto()
    COMMITTED = auto()
    COMPLETED = auto()
    FAILED = auto()
    ABORTED = auto()


NEXT = {
    State.SAMPLING: {State.SAMPLED, State.FAILED, State.ABORTED},
    State.SAMPLED: {State.COMMITTED, State.FAILED, State.ABORTED},
    State.COMMITTED: {State.COMPLETED, State.FAILED},
}
"""Transitions. The other states are final."""
UNRECORDED = {State.SAMPLING, State.SAMPLED}
STATUS: dict[State, CallStatus] = {State.COMMITTED: "completed", State.FAILED: "failed", State.ABORTED: "aborted"}
"""Recorded status of a call, by the state that follows the unrecorded ones."""


class Owner(Protocol):
    """The session of a call, as far as its generation uses it."""

    engines: EnginePool
    rendering: Rendering
    workers: Workers
    writer: RunWriter
    refusals: Refusals

    def add(self, prepared: PreparedCall, reply: Reply) -> Coroutine[None, None, None]:
        """Let later calls of the session continue a committed call. Raises nothing."""


class Generation:
    """A running or finished call. Create it inside the event loop: its task starts immediately.

    When it is `done`, either `reply` or `error` is set. `pieces` is the text of the reply so far, as a list of (new
    reasoning, new content).
    """

    def __init__(self, session: Owner, prepared: PreparedCall, policy: SessionPolicy, grant: Grant) -> None:
        self.call = prepared.call
        self.call_id = prepared.call.call_id
        self.digest = prepared.digest
        self.pieces: list[tuple[str, str]] = []
        self.reply: Reply | None = None
        self.error: DialectError | None = None
        self.listeners = 0
        """Number of requests that listen."""
        self.left = False
        """True when all who listened have gone."""
        self.delivered = False
        """True when the whole reply or error was written to a listener's connection."""
        self._session = session
        self._prepared = prepared
        self._policy = policy
        self._grant = grant
        self._state = State.SAMPLING
        self._sampled = session.rendering.sampled_reply(prepared.prompt.ids, prepared.model_call)
        self._stop: str | None = None
        self._routed_experts: str | None = None
        self._token_at = asyncio.get_running_loop().time()
        """Time of its newest tokens, or of the start, of the event loop's clock."""
        self._changed = asyncio.Event()
        self._done = asyncio.Event()
        self._heard = asyncio.Event()
        self._linger = self._abort_later()
        self._task = asyncio.create_task(self._run())

    @property
    def done(self) -> bool:
        """True when the call is in a final state. It is recorded by then, unless its commit failed."""
        return self._state not in NEXT

    @property
    def abandoned(self) -> bool:
        """True when no request listens and the reply was never fully delivered."""
        return not self.listeners and not self.delivered

    @property
    def usage(self) -> Usage:
        """Token counts so far. The end is known when the call is done."""
        call, cached = self.call, self.call.cached_tokens or 0
        reasoning = self._sampled.reasoning_tokens
        return Usage(len(call.prompt_ids), len(call.completion_ids), cached, reasoning, call.finished_at)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the duration of the block.

        The reply counts as delivered when the block ends without an error after the call is done.
        """
        self._linger.cancel()
        self.left = False
        self.listeners += 1
        self._heard.set()
        try:
            yield
            self.delivered |= self.done
        finally:
            self.listeners -= 1
            self.left = not self.listeners
            if self.left and not self.done:
                self._heard.clear()
                self._linger = self._abort_later()

    async def changed(self, num_pieces: int, timeout: float) -> bool:
        """Wait for more than `num_pieces` pieces, or for the end. Return False after `timeout` seconds."""
        if len(self.pieces) > num_pieces or self.done:
            return True
        self._changed.clear()
        return await _happens(self._changed, timeout)

    async def finished(self, timeout: float) -> bool:
        """Wait until the call is done. Return False after `timeout` seconds."""
        return await _happens(self._done, timeout)

    def abort(self, why: str) -> None:
        """Stop sampling and record the tokens so far. Does nothing when the call is already recorded."""
        if self._state in UNRECORDED:
            self._task.cancel()
            self._enter(State.ABORTED, DialectError(why, status=503, code="aborted"))

    def _abort_later(self) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(LINGER_SECONDS, self.abort, "the harness closed the connection")

    async def _run(self) -> None:
        call, session = self.call, self._session
        try:
            sampling, vocabulary = self._prepared.sampling, session.rendering.vocabulary
            async for chunk in sample(call, sampling, session.engines, self._policy, session.writer, vocabulary):
                self._stop = chunk.stop or self._stop
                self._routed_experts = chunk.routed_experts or self._routed_experts
                self._token_at = asyncio.get_running_loop().time()
                self._add_piece(self._sampled.feed(chunk.token_ids))
            self._enter(State.SAMPLED)
            while self.abandoned:
                await self._heard.wait()
            reply, piece = self._sampled.finish()
            if reply.unread is not None:
                logger.info("a part of call %s is text: %s", self.call_id, reply.unread)
            self._complete(reply)
            self._add_piece(piece)
            self._enter(State.COMMITTED, reply)
            adding = asyncio.create_task(session.add(self._prepared, reply))  # in the order of commits
            if session.writer.sync_policy == "call":
                await asyncio.to_thread(session.writer.sync)
            self._enter(State.COMPLETED, reply)
            await adding
        except Exception as error:  # any error is recorded with the call and sent to the harness
            if not self.done:
                self._enter(State.FAILED, error)

    def _enter(self, state: State, outcome: Reply | Exception | None = None) -> None:
        """Change the state, with the reply or the error. The call is recorded here, when it leaves `UNRECORDED`.

        Raises `RuntimeError` for a transition that `NEXT` does not list, and the error of a failed commit of a
        completed call: the state stays then.
        """
        if state not in NEXT.get(self._state, ()):
            raise RuntimeError(f"call {self.call_id} is {self._state.name} and cannot become {state.name}")
        if isinstance(outcome, Exception):
            self.error = as_dialect_error(outcome)
            answered_at = max(self._token_at, self._session.engines.token_at.get(self.call.engine, 0.0))
            silence = asyncio.get_running_loop().time() - answered_at
            hung = self._state is State.SAMPLING and silence > UNANSWERED_SECONDS  # it may answer `/health`
            if state is State.ABORTED and self.call.error is None and hung:
                self.call.error = f"the engine at {self.call.engine} sent nobody a token for {silence:.0f} s"
            self._note_fault(state, outcome)
        if self._state in UNRECORDED and state not in UNRECORDED:
            try:
                self._record(STATUS[state], outcome)
            except Exception as failure:
                if state is State.COMMITTED:
                    raise
                logger.error("cannot write call %s to %s: %s", self.call_id, self._session.writer.run, failure)
            fault = state is State.FAILED and isinstance(outcome, Exception) and event_kind(outcome) == "fault"
            if (cut := self._grant.settle(self.call, fault=fault)) is not None:
                self._session.refusals.record(cut)
        self._state = state
        if self.done:
            if not isinstance(outcome, Exception):
                self.reply = outcome
            self._linger.cancel()
            self._done.set()
            self._changed.set()

    def _note_fault(self, state: State, error: Exception) -> None:
        """Record an event `fault` for an error of ours, or an abort of a call that the engine did not answer."""
        known = error if isinstance(error, EngineError) else self.error
        detail = self.call.error if state is State.ABORTED else str(known)
        if detail is not None and event_kind(error) == "fault":
            self._session.writer.note(self.call.event("fault", detail))

    def _record(self, status: CallStatus, outcome: Reply | Exception | None) -> None:
        """Commit the call to the run. Raises `OSError`."""
        call, prepared = self.call, self._prepared
        outage, call.error = call.error, None
        call.status, call.finished_at = status, utc_now()
        asked = prepared.model_call.unapplied()
        if prepared.model_call.grammar is not None and "structured_outputs" not in prepared.sampling:
            asked["structured_outputs"] = prepared.model_call.grammar
        call.sampling = json_text({**prepared.sampling, "asked": asked})
        bounds = self._session.rendering.vocabulary, prepared.sampling["max_tokens"]
        call.violation = find_violation(call.completion_ids, call.logprobs, call.weight_versions, *bounds)
        call.reply = None
        if isinstance(outcome, Reply):
            call.reply = json_text(outcome.to_message())
        else:
            call.error = str(outcome) or repr(outcome)
            if outage is not None and status == "aborted":
                call.error += f"{WAITED}{outage}"
        if call.violation and call.reply is not None:
            logger.warning("call %s is excluded from training: %s", call.call_id, call.violation)
        self._session.writer.add_call(call)
        if status == "completed" and self._session.engines.routing:
            self._session.writer.note_routing(make_routing(call, self._routed_experts))
        self._routed_experts = None

    def _complete(self, reply: Reply) -> None:
        """Set why the reply ends, and the ids of its tool calls."""
        reply.issue(self.call_id)
        reply.stop = reply.stop or self._stop
        if self.call.finish_reason == "length":
            reply.finish_reason = "length"
        elif reply.tool_calls:
            reply.finish_reason = "tool_calls"

    def _add_piece(self, piece: tuple[str, str]) -> None:
        if any(piece):
            self.pieces.append(piece)
            self._changed.set()


async def _happens(event: asyncio.Event, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
