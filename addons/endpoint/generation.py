"""Generation: one model call from its prompt to its record, independent of the requests that listen to it.

It runs in its own task. A retry can therefore join it, a request that lost its connection can be repeated, and after an
engine failure sampling continues from the last sampled token.

States of a generation, their transitions, and the status that each records.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

from rolltap.addons.dialects.model_call import DialectError, ModelCall, Reply, Usage
from rolltap.addons.endpoint.budget import WAITED
from rolltap.addons.endpoint.errors import as_dialect_error, event_kind
from rolltap.addons.endpoint.services import Services
from rolltap.addons.engine.completion import sample
from rolltap.addons.engine.connections import SILENCE_SECONDS
from rolltap.addons.engine.policy import SessionPolicy
from rolltap.addons.errors import EngineError
from rolltap.addons.prompts.continuity import Prompt
from rolltap.addons.prompts.reply import GrowingReply
from rolltap.addons.store.records import Call, CallStatus, Event, find_violation, utc_now


class State(Enum):
    """State of a generation. `NEXT` lists the transitions."""

    SAMPLING = auto()
    SAMPLED = auto()
    """The completion has a finish reason. It is committed once a request listens."""
    COMMITTED = auto()
    """Recorded as completed: later calls can continue it. With `rolltap_fsync=call` the sync is outstanding."""
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
"""Recorded status of a call, by the state that follows the unrecorded ones. A call whose sync fails stays `completed`:
its harness gets an error."""


logger = logging.getLogger(__name__)

LINGER_SECONDS = 10.0
"""Seconds until a generation without listeners is aborted. Harnesses retry a lost call after 0.2 to 5 s."""
UNANSWERED_SECONDS = 6 * SILENCE_SECONDS
"""Seconds without a new token after which an aborted call counts as one that the engine did not answer. It is twice the
time in which an engine that says nothing is found out, so that a long prefill or a queue is still an answer."""

Settle = Callable[[Call, bool], None]
"""Counts a call that has ended against the budgets of its session. True: it ended for a reason of ours."""
AddCall = Callable[[Call, Prompt, Reply], Awaitable[None]]
"""Lets later calls of the session continue a committed call."""


class Generation:
    """A running or finished call. Create it inside the event loop: its task starts immediately.

    When it is `done`, either `reply` or `error` is set. `pieces` is the text of the reply so far, as a list of (new
    reasoning, new content). Text is appended once later tokens should not change it, and then stays.
    """

    def __init__(
        self,
        services: Services,
        policy: SessionPolicy,
        add_call: AddCall,
        settle: Settle,
        call: Call,
        prompt: Prompt,
        model_call: ModelCall,
        sampling: dict[str, Any],
        request: bytes,
    ) -> None:
        self._services = services
        self._policy = policy
        self._add_call = add_call
        self._settle = settle
        self._prompt = prompt
        self._sampling = sampling
        self.call = call
        self.model_call = model_call
        self.request = request
        """The `request_digest` of the call."""
        self.pieces: list[tuple[str, str]] = []
        self.reply: Reply | None = None
        self.error: DialectError | None = None
        self.delivered = False
        """True when the whole reply or error was written to a listener's connection."""
        self._state = State.SAMPLING
        self._growing = GrowingReply(services.rendering, prompt.ids, model_call)
        self._parsed_tokens = 0
        self._stop: str | None = None
        self._token_at = asyncio.get_running_loop().time()
        """Time of the newest tokens, or of the start, of the event loop's clock."""
        self._changed = asyncio.Event()
        self._done = asyncio.Event()
        self._heard = asyncio.Event()
        self._listeners = 0
        self._linger = self._abort_later()
        self._task = asyncio.create_task(self._run())

    @property
    def done(self) -> bool:
        """True when the call is in a final state. It is recorded by then, unless its commit failed."""
        return self._state not in NEXT

    @property
    def call_id(self) -> str:
        """The id of the call."""
        return self.call.call_id

    @property
    def listeners(self) -> int:
        """The number of requests that listen."""
        return self._listeners

    @property
    def unheard(self) -> bool:
        """True without listeners, if the whole reply has not been delivered either."""
        return not self._listeners and not self.delivered

    @property
    def usage(self) -> Usage:
        """Token counts so far: prompt, completion, and prompt tokens from the engine's prefix cache."""
        return Usage(len(self.call.prompt_ids), len(self.call.completion_ids), self.call.cached_tokens or 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the duration of the block. Without listeners the generation is aborted after `LINGER_SECONDS`.

        The reply counts as delivered when the block ends without an exception after the call is done.
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
        """Wait for new tokens since the last `advance`, or for the end. Returns False after `timeout` seconds."""
        return await _happens(self._changed, timeout)

    async def finished(self, timeout: float) -> bool:
        """Wait until the call is done. Returns False after `timeout` seconds."""
        return await _happens(self._done, timeout)

    def advance(self) -> bool:
        """Append the new text of the completion so far to `pieces`. Returns False without new tokens.

        Amortised O(new tokens).
        """
        if self.done:
            return False
        self._changed.clear()
        # a committed call has all its pieces: at most its sync is outstanding
        if self._state not in UNRECORDED or self._parsed_tokens == len(self.call.completion_ids):
            return False
        self._parsed_tokens = len(self.call.completion_ids)
        try:
            self._add_piece(self._growing.feed(self.call.completion_ids))
        except Exception as error:  # a bug in a renderer ends the stream with an error event instead of cutting it
            self._task.cancel()
            self._enter(State.FAILED, error)
        return True

    def abort(self, why: str) -> None:
        """Stop sampling and record the tokens so far. Does nothing when the call is already recorded."""
        if self._state in UNRECORDED:
            self._task.cancel()
            self._enter(State.ABORTED, DialectError(why, status=503, code="aborted"))

    def _abort_later(self) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(LINGER_SECONDS, self.abort, "the harness closed the connection")

    async def _run(self) -> None:
        call, services = self.call, self._services
        try:
            async for chunk in sample(
                call, self._sampling, services.engines, self._policy, services.writer, services.patience
            ):
                self._stop = chunk.stop or self._stop
                self._token_at = asyncio.get_running_loop().time()
                self._changed.set()
            self._enter(State.SAMPLED)
            while self.unheard:
                await self._heard.wait()
            # about four bytes a token: a long completion is parsed in a thread
            num_bytes = 4 * len(call.completion_ids)
            reply, piece = await services.workers.run(num_bytes, self._growing.finish, call.completion_ids)
            self._complete(reply)
            self._add_piece(piece)
            self._enter(State.COMMITTED, reply)
            await self._add_call(call, self._prompt, reply)
            if services.writer.sync_policy == "call":
                await asyncio.to_thread(services.writer.sync)
            self._enter(State.COMPLETED, reply)
        except Exception as error:  # any error is recorded with the call and sent to the harness
            if not self.done:
                self._enter(State.FAILED, error)

    def _enter(self, state: State, outcome: Reply | Exception | None = None) -> None:
        """Change the state, with the reply or the error. The call is recorded here, when it leaves `UNRECORDED`.

        Raises `RuntimeError` for a transition that `NEXT` does not list. When the commit of a completed call fails,
        its error is raised and the state stays, so that an unrecorded reply is not delivered. When the commit of a
        failed or aborted call fails, the error is logged and the state changes, so that its listeners end.
        """
        if state not in NEXT.get(self._state, ()):
            raise RuntimeError(f"call {self.call.call_id} is {self._state.name} and cannot become {state.name}")
        if isinstance(outcome, Exception):
            self.error = as_dialect_error(outcome)
            if state is State.ABORTED:
                self.call.error = self._unanswered()
            self._note_fault(state, outcome)
        if self._state in UNRECORDED and state not in UNRECORDED:
            try:
                self._record(STATUS[state], outcome)
            except Exception as failure:
                if state is State.COMMITTED:
                    raise
                logger.error("cannot write call %s to %s: %s", self.call.call_id, self._services.writer.run, failure)
            fault = state is State.FAILED and isinstance(outcome, Exception) and event_kind(outcome) == "fault"
            self._settle(self.call, fault)
        self._state = state
        if self.done:
            if not isinstance(outcome, Exception):
                self.reply = outcome
            self._linger.cancel()
            self._done.set()
            self._changed.set()

    def _unanswered(self) -> str | None:
        """Return why the engine does not answer the call, or None while it does.

        It has failed and no token came since, or it is silent for more than `UNANSWERED_SECONDS`: a hung engine may
        answer `/health`.
        """
        silence = asyncio.get_running_loop().time() - self._token_at
        if self.call.error is None and self._state is State.SAMPLING and silence > UNANSWERED_SECONDS:
            return f"the engine at {self.call.engine} sent no token for {silence:.0f} s"
        return self.call.error

    def _note_fault(self, state: State, error: Exception) -> None:
        """Record an event `fault` when the call ends for a reason of ours, before the harness gets the error.

        Reasons of ours are errors, and an abort of a call that the engine did not answer.
        """
        known = error if isinstance(error, EngineError) else self.error
        detail = self.call.error if state is State.ABORTED else str(known)
        if detail is not None and event_kind(error) == "fault":
            call = self.call
            event = Event(
                kind="fault",
                session_id=call.session_id,
                host=call.host,
                method="POST",
                path=call.path,
                detail=detail,
                call_id=call.call_id,
            )
            self._services.writer.note(event)

    def _record(self, status: CallStatus, outcome: Reply | Exception | None) -> None:
        """Commit the call to the run. Raises `OSError`."""
        call = self.call
        outage, call.error = call.error, None
        call.status, call.finished_at = status, utc_now()
        call.sampling = json.dumps({**self._sampling, "asked": self.model_call.unapplied()})
        call.reply = call.violation = None
        if isinstance(outcome, Reply):
            call.reply = json.dumps(outcome.to_message(), ensure_ascii=False)
            call.violation = find_violation(call.completion_ids, call.logprobs, call.weight_versions)
        else:
            call.error = str(outcome) or repr(outcome)
            if outage is not None and status == "aborted":
                call.error += f"{WAITED}{outage}"
        if call.violation:
            logger.warning("call %s is excluded from training: %s", call.call_id, call.violation)
        self._services.writer.add_call(call)

    def _complete(self, reply: Reply) -> None:
        """Set why the reply ends, and the ids of its tool calls."""
        reply.issue(self.call.call_id)
        reply.stop = reply.stop or self._stop
        if self.call.finish_reason == "length":
            reply.finish_reason = "length"
        elif reply.tool_calls:
            reply.finish_reason = "tool_calls"

    def _add_piece(self, piece: tuple[str, str]) -> None:
        if any(piece):
            self.pieces.append(piece)


async def _happens(event: asyncio.Event, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return False
    return True
