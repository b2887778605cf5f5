"""Generation: one model call from its prompt to its record. This page is the life of a call, in
full.

A call begins when its event `call_started` is on disk. A task of its own samples it, independent of
the requests that listen to it, so that a lost connection costs no tokens.

            finish reason     a listener        fsync, if any
    SAMPLING -----------> SAMPLED --------> COMMITTED ------> DELIVERABLE
        |                     |                 |
        +----------+----------+                 +-- error: FAILED
                   |
                   +-- error: FAILED
                   +-- abort: ABORTED

`SAMPLING`: the engine is asked, and tokens are appended to the call. A retryable failure of an
engine does not end the call: another engine, or the same one after a pause, samples the rest
(`engine/pool.py`).

`SAMPLED`: the completion has a finish reason. The call waits until a request listens, so that a
reply which nobody takes is not continued.

`COMMITTED`: the call is in the run as `completed`. With `rolltap_fsync=call` the fsync is
outstanding.

`DELIVERABLE`: the reply may be delivered. What a harness has seen complete is on disk, and the next
call of its session can continue it. It waits for no other call: the conversations learn of it when
they are free, before all later calls.

`FAILED`, `ABORTED`: after `SAMPLING` or `SAMPLED` the call is in the run with that status, with the
tokens sampled so far and the error. After `COMMITTED` its row stays `completed`; only the harness
gets the error.

**Who ends it.** The engine, with a finish reason. An error, which fails it: of an engine when no
retry is left, of the disk, of a renderer. An abort, before it is recorded and never after: because
no request listened for `LINGER_SECONDS`, because the session ended, or because the recorder stops.
Nothing else ends it, and it ends once.

**When it is committed.** Exactly once, when it leaves `SAMPLING` or `SAMPLED` for one of the other
states. If that write fails, a reply is not delivered: the call fails, and the failure is recorded
if it can be. If the record of a failed or aborted call cannot be written, the error is logged and
its listeners end all the same.

**What a retry joins.** A request that repeats a call of its session (`request_digest`: same API,
model, prompt and parameters) joins that call when it is abandoned, that is without a listener and
never fully delivered; or, whoever listens, when the client marks the request as a retry and no
abandoned call is equal. A running call is joined (event `joined`), a finished one is given again
(event `replayed`), from its first event on and in the form that the retry asks for. Calls that
failed or were aborted are not repeated, and every other equal request is a sample of its own: two
sub-agents can send the same prompt. `find_retried` finds the call. The session remembers its newest
finished ones, which have no tokens any more; after a restart they come from its rows
(`recovery.py`).

**What a listener sees.** The headers of a stream immediately; text once later tokens should not
change it; keep-alives while there is none; the last event after `DELIVERABLE`, or one error after
`FAILED` or `ABORTED`. All listeners of a call see the same text and the same end (`server.py`
writes it in the API's form).
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

from rolltap.addons.dialects.call import DialectError, Reply, Usage
from rolltap.addons.endpoint.budget import WAITED, Grant
from rolltap.addons.endpoint.refusals import Refusals, as_dialect_error, event_kind
from rolltap.addons.endpoint.request import PreparedCall
from rolltap.addons.engine.client import SILENCE_SECONDS
from rolltap.addons.engine.policy import SessionPolicy
from rolltap.addons.engine.pool import EnginePool, sample
from rolltap.addons.errors import EngineError
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import CallStatus, find_violation, json_text, utc_now
from rolltap.addons.store.routing import make_routing
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0
"""Seconds without a listener after which a call is aborted. Harnesses retry a lost call after
0.2 to 5 s."""
UNANSWERED_SECONDS = 6 * SILENCE_SECONDS
"""Seconds without a new token, for this call or any other, after which an aborted call counts as
one that the engine did not answer.

It is twice the 30 s after which a silent engine is found out at the latest (`HEALTH_SECONDS`
of `engine/client.py`), so that a long prefill is still an answer. An engine that samples for others
meanwhile has a queue: who leaves it hangs up by itself.
"""
_RETRY_COUNT = "x-stainless-retry-count"
"""Header of the OpenAI and Anthropic SDKs: the number of times that the client has sent this
request already."""
REMEMBERED = 8
"""Number of finished calls of a session that a retry can still get: the newest."""


class State(Enum):
    """State of a call. The docstring of this file says what each means, `NEXT` lists the
    transitions."""

    SAMPLING = auto()
    SAMPLED = auto()
    COMMITTED = auto()
    DELIVERABLE = auto()
    FAILED = auto()
    ABORTED = auto()


NEXT = {
    State.SAMPLING: {State.SAMPLED, State.FAILED, State.ABORTED},
    State.SAMPLED: {State.COMMITTED, State.FAILED, State.ABORTED},
    State.COMMITTED: {State.DELIVERABLE, State.FAILED},
}
"""Transitions. The other states are final."""
UNRECORDED = {State.SAMPLING, State.SAMPLED}
STATUS: dict[State, CallStatus] = {State.FAILED: "failed", State.ABORTED: "aborted"}


class CallSession(Protocol):
    """The session of a call, as far as its generation uses it."""

    engines: EnginePool
    rendering: Rendering
    writer: RunWriter
    refusals: Refusals

    def add(self, prepared: PreparedCall, reply: Reply) -> Coroutine[None, None, None]:
        """Let later calls of the session continue a committed call. Raises nothing."""


class Generation:
    """One call as its listeners see it: running, or finished and without tokens.

    When it is `done`, either `reply` or `error` is set. `pieces` is the text of the reply so
    far, as a list of (new reasoning, new content). `usage` is complete when `reply` is set. The row
    and its tokens (`call`) exist from `start` until it is `done`.
    """

    def __init__(
        self,
        call_id: str,
        digest: bytes,
        usage: Usage,
        reply: Reply | None = None,
        *,
        delivered: bool = False,
    ) -> None:
        self.call_id = call_id
        self.digest = digest
        """The `request_digest`."""
        self.usage = usage
        self.reply = reply
        self.error: DialectError | None = None
        self.pieces: list[tuple[str, str]] = []
        self.listeners = 0
        """Number of requests that listen."""
        self.delivered = delivered
        """True when the whole reply or error was written to a listener's connection.

        False for a call that an earlier process committed, unless a later call shows that its reply
        arrived.
        """
        self._state = State.SAMPLING
        self._linger: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._done = asyncio.Event()
        if reply is not None:
            self._state = State.DELIVERABLE
            self._join_pieces()
            self._done.set()

    def start(
        self,
        session: CallSession,
        prepared: PreparedCall,
        policy: SessionPolicy,
        grant: Grant,
    ) -> None:
        """Begin to sample, in a task of its own. Needs the event loop."""
        self.call = prepared.call
        self._session = session
        self._prepared = prepared
        self._grant = grant
        prompt = prepared.prompt
        self._sampled = session.rendering.sampled_reply(prompt.ids, prompt.model_call)
        self._outage: str | None = None
        """The failure of an engine after which no token was sampled."""
        self._started_at = asyncio.get_running_loop().time()
        self._abort_later()
        self._task = asyncio.create_task(self._run(policy))

    @property
    def done(self) -> bool:
        """True when the call is in a final state. It is recorded by then, unless its commit
        failed."""
        return self._state not in NEXT

    @property
    def abandoned(self) -> bool:
        """True when no request listens and the reply was never fully delivered."""
        return not self.listeners and not self.delivered

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the duration of the block.

        The reply counts as delivered when the block ends without an error after the call is done.
        """
        if self._linger is not None:
            self._linger.cancel()
        self.listeners += 1
        self._changed.set()
        try:
            yield
            self.delivered |= self.done
        finally:
            self.listeners -= 1
            if self.done:
                self._join_pieces()
            elif not self.listeners:
                self._abort_later()

    async def changed(self, num_pieces: int, timeout: float) -> bool:
        """Wait for more than `num_pieces` pieces, or for the end. Return False after `timeout`
        seconds."""
        if len(self.pieces) > num_pieces or self.done:
            return True
        self._changed.clear()
        return await _happens(self._changed, timeout)

    async def finished(self, timeout: float) -> bool:
        """Wait until the call is done. Return False after `timeout` seconds."""
        return await _happens(self._done, timeout)

    def abort(self, why: str) -> None:
        """Stop sampling and record the tokens so far. Does nothing when the call is already
        recorded.

        A call that no engine answered has an event `fault` too.
        """
        if self._state not in UNRECORDED:
            return
        self._task.cancel()
        error_recorded = why
        unanswered = self._outage or self._silence()
        if unanswered is not None:
            self._session.writer.note(self.call.event("fault", unanswered))
            error_recorded += f"{WAITED}{unanswered}"
        error_sent = DialectError(why, status=503, code="aborted")
        self._end(State.ABORTED, error_sent, error_recorded)

    def _abort_later(self) -> None:
        loop = asyncio.get_running_loop()
        why = "the harness closed the connection"
        self._linger = loop.call_later(LINGER_SECONDS, self.abort, why)

    def _silence(self) -> str | None:
        """Say that the engine answers nobody, although it may be healthy, or return None."""
        engine = self.call.engine
        answered_at = max(self._started_at, self._session.engines.token_at.get(engine, 0.0))
        seconds = asyncio.get_running_loop().time() - answered_at
        if self._state is not State.SAMPLING or seconds <= UNANSWERED_SECONDS:
            return None
        return f"the engine at {engine} sent nobody a token for {seconds:.0f} s"

    async def _run(self, policy: SessionPolicy) -> None:
        session = self._session
        prepared = self._prepared
        routed_experts = None
        stop = None
        try:
            async for chunk in sample(
                self.call,
                prepared.sampling,
                session.engines,
                policy,
                session.writer,
                session.rendering.vocabulary,
            ):
                stop = chunk.stop or stop
                routed_experts = chunk.routed_experts or routed_experts
                if chunk.token_ids or chunk.outage:
                    self._outage = chunk.outage
                    self._add_piece(self._sampled.feed(chunk.token_ids))
            self._enter(State.SAMPLED)
            while self.abandoned:
                self._changed.clear()
                await self._changed.wait()
            reply, piece = self._sampled.finish()
            if reply.unread is not None:
                logger.info("a part of call %s is text: %s", self.call_id, reply.unread)
            reply.issue(self.call_id)
            reply.stop = reply.stop or stop
            if self.call.finish_reason == "length":
                reply.finish_reason = "length"
            elif reply.tool_calls:
                reply.finish_reason = "tool_calls"
            self._add_piece(piece)
            self.call.reply = json_text(reply.to_message())
            self._record("completed")
            self._give_back()
            self._enter(State.COMMITTED)
            if session.engines.routing:
                session.writer.note(make_routing(self.call, routed_experts))
            # begun before the sync: calls take the session's lock in the order of their commits
            adding = asyncio.create_task(session.add(prepared, reply))
            if session.writer.sync_policy == "call":
                await asyncio.to_thread(session.writer.sync)
            self.usage = Usage(
                prompt=len(self.call.prompt_ids),
                completion=len(self.call.completion_ids),
                cached=self.call.cached_tokens or 0,
                reasoning=self._sampled.reasoning_tokens,
                ended=self.call.finished_at,
            )
            self.reply = reply
            self._enter(State.DELIVERABLE)
            await adding
        except Exception as error:  # any error is recorded with the call and sent to the harness
            if not self.done:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        error_sent = as_dialect_error(error)
        fault = event_kind(error) == "fault"
        if fault:
            known = error if isinstance(error, EngineError) else error_sent
            self._session.writer.note(self.call.event("fault", str(known)))
        self._end(State.FAILED, error_sent, str(error) or repr(error), fault=fault)

    def _end(
        self,
        state: State,
        error_sent: DialectError,
        error_recorded: str,
        *,
        fault: bool = False,
    ) -> None:
        """End the call with an error: its harness gets `error_sent`, its row `error_recorded`."""
        if self._state in UNRECORDED:
            self.call.reply = None
            self.call.error = error_recorded
            try:
                self._record(STATUS[state])
            except Exception as failure:
                run = self._session.writer.run
                logger.error("cannot write call %s to %s: %s", self.call_id, run, failure)
            self._give_back(fault=fault)
        self.error = error_sent
        self._enter(state)

    def _record(self, status: CallStatus) -> None:
        """Commit the call to the run. Raises `OSError`."""
        call = self.call
        call.status = status
        call.finished_at = utc_now()
        sampling = self._prepared.sampling
        asked = self._prepared.asked
        grammar = self._prepared.prompt.model_call.grammar
        if grammar is not None and "structured_outputs" not in sampling:
            # an engine refused the grammar while it was asked (`pool.sample`): the row says so, and
            # keeps the request's digest
            asked["structured_outputs"] = grammar
        call.sampling = json_text({**sampling, "asked": asked})
        call.violation = find_violation(
            call.completion_ids,
            call.logprobs,
            call.weight_versions,
            self._session.rendering.vocabulary,
            sampling["max_tokens"],
        )
        if call.violation and call.reply is not None:
            why = call.violation
            logger.warning("call %s is excluded from training: %s", call.call_id, why)
        self._session.writer.add_call(call)

    def _give_back(self, *, fault: bool = False) -> None:
        cut = self._grant.give_back(self.call, fault=fault)
        if cut is not None:
            self._session.refusals.record(cut)

    def _enter(self, state: State) -> None:
        """Change the state. Raises `RuntimeError` for a transition that `NEXT` does not list."""
        if state not in NEXT.get(self._state, ()):
            now = self._state.name
            raise RuntimeError(f"call {self.call_id} is {now} and cannot become {state.name}")
        self._state = state
        if self.done:
            del self.call, self._prepared, self._sampled
            self._join_pieces()
            if self._linger is not None:
                self._linger.cancel()
            self._done.set()
            self._changed.set()

    def _join_pieces(self) -> None:
        """Keep the text of a reply once, when nobody is in the middle of it."""
        if self.reply is not None and not self.listeners:
            self.pieces.clear()
            self._add_piece((self.reply.reasoning, self.reply.content))

    def _add_piece(self, piece: tuple[str, str]) -> None:
        if any(piece):
            self.pieces.append(piece)
            self._changed.set()


def find_retried(
    calls: Sequence[Generation],
    digest: bytes,
    headers: Mapping[str, str],
) -> Generation | None:
    """Return the newest of `calls` with this digest that a request repeats, or None.

    `headers` ignore case.
    """
    marked = headers.get(_RETRY_COUNT, "0") != "0"
    equal = None
    for call in reversed(calls):
        if call.error is not None or call.digest != digest:
            continue
        if call.abandoned:
            return call
        if equal is None and marked:
            equal = call
    return equal


async def _happens(event: asyncio.Event, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
