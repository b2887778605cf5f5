"""One session in the endpoint: its conversations, its budget and its running calls.

The state is a cache of the session's rows: what earlier calls were is read from the run at the
first request, so an idle session can be dropped and a new one continues where it was.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, ParamSpec, TypeVar

from rolltap.addons.concurrency import Workers
from rolltap.addons.dialects.call import DialectError, Message, ModelCall, Reply, Usage
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.openai_responses.stored import NAMING_API, NeedsStoredState, StoredCall
from rolltap.addons.endpoint.body import Decoded, KeptTexts, RecentBodies
from rolltap.addons.endpoint.budget import (
    FINAL_STATUS,
    Grant,
    SessionBudget,
    prompt_window,
    require_fit,
)
from rolltap.addons.endpoint.generation import REMEMBERED, Generation, find_retried
from rolltap.addons.endpoint.recovery import RecoveredSession, Recovery
from rolltap.addons.endpoint.refusals import DIVERGED, UNREADABLE, Refusals
from rolltap.addons.endpoint.request import (
    ClientRequest,
    PreparedCall,
    request_digest,
    sampling_parameters,
)
from rolltap.addons.endpoint.rerun import RerunSession
from rolltap.addons.endpoint.roles import find_role
from rolltap.addons.engine.policy import PolicyFile, SessionPolicy
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.options import RecorderOptions
from rolltap.addons.prompts.conversations import Prompt
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import Call, EventKind, json_text
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""Requests of fewer bytes are worked on in the event loop. With a known prefix they take some
milliseconds. In a thread they would take twice the CPU time: the loop and the thread interrupt each
other."""
LEFT = 16
"""Number of running calls of a session that its harness may leave behind."""


def _complete(named: NeedsStoredState, dialect: Dialect, recovered: RecoveredSession) -> ModelCall:
    recovered.index(dialect.NAME)
    return named.complete(recovered.stored.get)


def _add(recovered: RecoveredSession, prepared: PreparedCall, reply: Message) -> None:
    call = prepared.call
    prompt = prepared.prompt
    if call.dialect == NAMING_API:
        parent = recovered.stored.get(call.parent_id or "")
        recovered.stored[call.call_id] = StoredCall(
            call_id=call.call_id,
            parent=parent,
            messages=prompt.model_call.messages if parent is None else prompt.new_messages,
            reply=reply,
            asked=prepared.asked,
        )
    recovered.roles.complete(call.call_id, call.role, prompt.opening, reply)
    recovered.conversations.add(call.call_id, prompt, call.completion_ids, reply)


@dataclass(kw_only=True, eq=False)
class Session:
    """The conversations and generations of a session. For the event loop alone."""

    session_id: str
    # what all sessions share
    options: RecorderOptions
    engines: EnginePool
    published: PolicyFile
    rendering: Rendering
    writer: RunWriter
    recovery: Recovery
    workers: Workers
    texts: KeptTexts
    refusals: Refusals

    used_at: float = field(init=False)
    """Time of the last request or reply, of the event loop's clock."""
    _state: Literal["open", "ended", "recorded"] = field(default="open", init=False)
    """`recorded` when the end is in the run."""
    _recovered: RecoveredSession | None = field(default=None, init=False)
    """None before the first request and after the end."""
    _policy: SessionPolicy | None = field(default=None, init=False)
    _budget: SessionBudget | None = field(default=None, init=False)
    """None before the first call, as the policy, because it follows from the rows."""
    _bodies: RecentBodies = field(init=False)
    _order: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while a prompt is made, and while a call is added to the conversations.

    First come, first served. Whoever holds it waits for no engine.
    """

    def __post_init__(self) -> None:
        self._bodies = RecentBodies(self.texts)
        self.touch()

    @property
    def generations(self) -> list[Generation]:
        """The calls that run, and the finished ones that a retry can get, oldest first."""
        if self._recovered is None:
            return []
        return self._recovered.calls

    @property
    def idle(self) -> bool:
        """True when nothing runs: the state can be dropped."""
        if self._order.locked() or (self._recovered is not None and self._recovered.again):
            return False
        return all(each.done and not each.listeners for each in self.generations)

    def touch(self) -> None:
        """Note that the session is used."""
        self.used_at = asyncio.get_running_loop().time()

    async def decode(self, dialect: Dialect, body: bytes, request: ClientRequest) -> Decoded:
        """Return the decoded request.

        Raises `DialectError` for an invalid request and when the session has ended, and `OSError`
        and `RunError` when the session's rows cannot be read.
        """
        async with self._order:
            recovered = await self._open()
            try:
                decoded = await self._work(
                    len(body),
                    self._bodies.decode,
                    dialect,
                    body,
                    request.target,
                )
            except NeedsStoredState as named:
                # the rows of a session are read in a thread
                num_bytes = max(len(body), INLINE_BYTES)
                complete = partial(_complete, named, dialect, recovered)
                model_call = await self._work(num_bytes, complete)
                decoded = Decoded(dialect, model_call, len(body))
        model_call = decoded.model_call
        model_call.again = recovered.again
        if self.rendering.refuses_tools and model_call.tools and model_call.may_call:
            raise DialectError(str(self.rendering.unreadable), code=UNREADABLE)
        if self.options.images == "refuse" and model_call.hidden_parts:
            others = f"other parts (images, audio, files): {model_call.hidden_parts}"
            raise DialectError(f"This model takes text only. The conversation has {others}.")
        return decoded

    async def begin(
        self,
        decoded: Decoded,
        request: ClientRequest,
        context_window: int,
    ) -> Generation:
        """Return the call that a decoded request repeats, or start one.

        `context_window` is the engine's, in tokens. Raises `DialectError` when the session has
        ended, a budget is used up or the prompt fills the window, `RunError` when the session's
        rows cannot be read, and `OSError` also when the call's event cannot be committed or the
        disk is nearly full.

        A call that needs what running ones have reserved of a budget waits for their ends.
        """
        while True:
            async with self._order:
                recovered = await self._open()
                prepared = await self._work(
                    self._work_bytes(recovered, decoded.num_bytes),
                    self._prepare,
                    recovered,
                    decoded.dialect,
                    decoded.model_call,
                    request,
                    context_window,
                )
                self._check_open()  # the session may have ended meanwhile
                self._bodies.keep(decoded)  # its prompt fits the window
                if not isinstance(prepared, PreparedCall):
                    return prepared
                retried = find_retried(recovered.calls, prepared.digest, request.headers)
                if retried is not None:
                    kind: EventKind = "replayed" if retried.done else "joined"
                    self.refusals.record(request.event(kind, call_id=retried.call_id))
                    return retried
                if self._budget is None:
                    self._budget = SessionBudget(self.options, recovered.used)
                budget = self._budget
                grant = budget.take(decoded.dialect, prepared.sampling["max_tokens"])
                if grant is not None:
                    return self._start(recovered, prepared, request, grant)
            await budget.given_back()

    async def count_tokens(self, decoded: Decoded) -> int:
        """Return the prompt tokens of a decoded request.

        They may be more than the window. Raises as `decode`.
        """
        async with self._order:
            recovered = await self._open()
            prompt = await self._work(
                self._work_bytes(recovered, decoded.num_bytes),
                self._prompt,
                recovered,
                decoded.dialect,
                decoded.model_call,
            )
            return len(prompt.ids)

    def drop_unheard(self) -> None:
        """Drop the calls that no request listens to, unless a retry may get them.

        Finished ones are forgotten: those of errors, and all but the newest `REMEMBERED`. Running
        ones are aborted, but the newest `LEFT`: each holds an engine.
        """
        self.touch()
        running = []
        completed = []
        for generation in [*self.generations]:
            if generation.listeners:
                continue
            if not generation.done:
                running.append(generation)
            elif generation.reply is not None:
                completed.append(generation)
            else:
                self.generations.remove(generation)
        for generation in running[:-LEFT]:
            generation.abort("the harness closed the connection, and those of later calls")
        for generation in completed[:-REMEMBERED]:
            self.generations.remove(generation)

    def abort(self, why: str) -> None:
        """Abort the running generations and record them."""
        for generation in self.generations:
            generation.abort(why)

    async def end(self) -> None:
        """Abort the running calls, free the conversations, and refuse later calls. Idempotent.

        Raises `OSError` when the end cannot be committed; calls are refused even then.
        """
        self.abort("the session ended")
        self._recovered = None
        self.forget_bodies()
        if self._state != "recorded":
            self._state = "ended"
            await asyncio.to_thread(self.recovery.end, self.session_id)
            self._state = "recorded"

    def forget_bodies(self) -> None:
        """Free the texts of the last requests. The next request is parsed as a whole."""
        self._bodies.close()

    async def add(self, prepared: PreparedCall, reply: Reply) -> None:
        """Let later calls continue a committed one: those that begin from now on wait for this."""
        async with self._order:
            recovered = self._recovered
            if recovered is None:
                return
            num_chars = len(prepared.call.messages)
            try:
                await self._work(num_chars, _add, recovered, prepared, reply.to_message())
            except Exception:
                # an assistant's message may be its reply from now on
                recovered.conversations.history.incomplete = True
                logger.exception("call %s cannot be continued", prepared.call.call_id)

    def _start(
        self,
        recovered: RecoveredSession,
        prepared: PreparedCall,
        request: ClientRequest,
        grant: Grant,
    ) -> Generation:
        """Begin a call: its event is committed before the engine is asked. Raises as `begin`."""
        call = prepared.call
        model_call = prepared.prompt.model_call
        if grant.cut:
            prepared.asked["max_tokens"] = prepared.sampling["max_tokens"]
            prepared.sampling["max_tokens"] = grant.tokens
        earlier = recovered.roles.ask(
            model_call.messages,
            model_call.tools,
            prepared.prompt.opening,
            prepared.prompt.sampled_by,
        )
        role = find_role(model_call, request.headers, earlier)
        call.role = role.role
        call.role_evidence = role.evidence
        try:
            if prepared.difference is not None:
                self._state = "ended"
                why = f"diverged at {prepared.difference}"
                raise DialectError(why, status=FINAL_STATUS[call.dialect], code=DIVERGED)
            self.writer.require_room()
            self.writer.add_event(call.event("call_started"))
        except Exception:
            grant.budget.free(grant)
            raise
        if model_call.hidden_parts:
            self.refusals.record(call.event("hidden", str(model_call.hidden_parts)))
        if prepared.controls is not None:
            self.refusals.record(call.event("controls", prepared.controls))
        if self._policy is None:
            keep = self.options.keep_adapter
            last = recovered.last_version
            self._policy = SessionPolicy(self.published, keep=keep, last_version=last)
        usage = Usage(len(call.prompt_ids), 0)
        generation = Generation(call.call_id, prepared.digest, usage)
        generation.start(self, prepared, self._policy, grant)
        recovered.calls.append(generation)
        return generation

    def _prepare(
        self,
        recovered: RecoveredSession,
        dialect: Dialect,
        model_call: ModelCall,
        request: ClientRequest,
        window: int,
    ) -> PreparedCall | Generation:
        """Make the call of a request, or return the recorded one that answers it in a rerun.

        A conversation that cannot fit into the window is refused untokenised.
        """
        if isinstance(recovered, RerunSession):
            recorded = recovered.answer(dialect, model_call, request)
            if recorded is not None:
                return recorded
        most = prompt_window(self.options, window)
        least = self.rendering.least_tokens(model_call.messages, model_call.tools, most)
        require_fit(self.options, least, window)
        prompt = self._prompt(recovered, dialect, model_call)
        require_fit(self.options, len(prompt.ids), window)
        sampling = sampling_parameters(
            {**self.options.sampling, **recovered.given.sampling},
            self.rendering.stop_token_ids,
            model_call,
            window - len(prompt.ids),
        )
        call = Call(
            session_id=self.session_id,
            call_id=uuid.uuid4().hex,
            prompt_ids=prompt.ids,
            prefix_length=prompt.prefix_length,
            kind=prompt.kind,
            kind_reason=prompt.reason,
            dialect=dialect.NAME,
            host=request.host,
            path=request.path,
            model=model_call.model,
            stream=model_call.stream,
            messages=json_text(prompt.new_messages),
        )
        if prompt.parent is None:
            call.tools = json_text(model_call.tools)
        else:
            call.parent_id = prompt.parent.call_id
        asked = model_call.options_asked()
        whole = {**sampling, "asked": asked}
        prepared = PreparedCall(
            call=call,
            prompt=prompt,
            sampling=sampling,
            digest=request_digest(dialect.NAME, model_call.model, prompt.digest(), whole),
            asked=asked,
            controls=self.rendering.controls.found(call.messages + (call.tools or "")),
        )
        if isinstance(recovered, RerunSession):
            prepared.difference = recovered.difference(model_call)
        return prepared

    def _prompt(
        self,
        recovered: RecoveredSession,
        dialect: Dialect,
        model_call: ModelCall,
    ) -> Prompt:
        if recovered.has_rows:
            recovered.index(dialect.NAME, model_call.echo_rule)
        prompt = recovered.conversations.prompt(model_call)
        if isinstance(recovered, RerunSession):
            prompt = recovered.without_recorded_parent(prompt)
        return prompt

    async def _open(self) -> RecoveredSession:
        """Return what the session's earlier calls were."""
        self._check_open()
        if self._recovered is None:
            recovered = await asyncio.to_thread(self._recover)
            self._check_open()
            self._recovered = recovered
        return self._recovered

    def _recover(self) -> RecoveredSession:
        recovered = self.recovery.recover(self.session_id)
        if recovered.ended:
            self._state = "recorded"
        source = recovered.given.rerun or self.options.rerun
        if source is None:
            return recovered
        return RerunSession(self.recovery, source, recovered.given)

    async def _work(
        self,
        num_bytes: int,
        function: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call `function`, in a thread unless its request has few bytes."""
        if num_bytes < INLINE_BYTES:
            return function(*args, **kwargs)
        return await self.workers.run(num_bytes, function, *args, **kwargs)

    def _work_bytes(self, recovered: RecoveredSession, num_bytes: int) -> int:
        """Return the size of the work on a request: the rows of a session are read in a thread."""
        if recovered.has_rows:
            return max(num_bytes, INLINE_BYTES)
        return num_bytes

    def _check_open(self) -> None:
        if self._state != "open":
            # not 409: the OpenAI and Anthropic SDKs retry it
            why = "This session has ended and takes no more calls: use another session id."
            raise DialectError(why, status=410, code="session_ended")
