"""One request from its decoded form to what its call starts with: prompt, sampling parameters, digest.

State of one session in the endpoint: its conversations and its generations.

The end of a session: a request of its own, or of the program that runs it.

A body gives the session its reward. It is accepted only with `rolltap_accept_rewards`, because the harness knows the
session's credentials and an agent could reward itself. The first reward counts.
"""

import asyncio
import json
import logging
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from aiohttp import web

from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.images import refuse_hidden
from rolltap.addons.dialects.model_call import DialectError, ModelCall, Reply
from rolltap.addons.dialects.stored import NamesStored
from rolltap.addons.endpoint.body import Bodies
from rolltap.addons.endpoint.budget import Grant, SessionBudget
from rolltap.addons.endpoint.errors import Refusals
from rolltap.addons.endpoint.generation import Generation
from rolltap.addons.endpoint.recovery import RecoveredSession
from rolltap.addons.endpoint.request import HOST_HEADER, SESSION_HEADER, ClientRequest, parameters
from rolltap.addons.endpoint.retries import FinishedCall, find_retried, newest, request_digest
from rolltap.addons.endpoint.roles import find_role
from rolltap.addons.endpoint.services import Services
from rolltap.addons.endpoint.stored import SessionStore
from rolltap.addons.engine.policy import SessionPolicy
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.offload import INLINE_BYTES, LARGE_BYTES
from rolltap.addons.prompts.continuity import Prompt
from rolltap.addons.store.records import Call, Event, EventKind
from rolltap.addons.store.rewards import GivenReward, give_reward
from rolltap.addons.store.tables import RunWriter


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it was prepared in a thread."""

    prompt: Prompt
    prompt_ids: "array[int]"
    """The prompt's token ids, in the form that is written to the disk."""
    sampling: dict[str, Any]
    """vLLM's sampling parameters."""
    digest: bytes
    """The `request_digest`."""
    messages: str
    """JSON list of the prompt's new messages."""


def prepare_call(
    services: Services,
    own_sampling: Mapping[str, Any],
    dialect: Dialect,
    model_call: ModelCall,
    context_window: int,
    make_prompt: Callable[[ModelCall], Prompt],
) -> Asked:
    """Make the prompt of a request. A conversation that cannot fit into the window is refused untokenised.

    `own_sampling` are the session's parameters, `context_window` is the engine's, in tokens. Raises `DialectError`, and
    `PromptOverBudget` for a prompt that fits into the engine's window only.
    """
    budgets, rendering = services.budgets, services.rendering
    least = rendering.least_tokens(model_call.messages, model_call.tools, budgets.window(context_window))
    budgets.require_fit(least, context_window)
    prompt = make_prompt(model_call)
    budgets.require_fit(len(prompt.ids), context_window)
    room = context_window - len(prompt.ids)
    sampling = parameters(own_sampling, rendering.stop_token_ids(), model_call, room)
    prompt_ids = array("i", prompt.ids)
    recorded = {**sampling, "asked": model_call.unapplied()}
    digest = request_digest(dialect.NAME, model_call.model, prompt_ids, recorded)
    messages = json.dumps(prompt.new_messages, ensure_ascii=False)
    return Asked(prompt, prompt_ids, sampling, digest, messages)


P = ParamSpec("P")
T = TypeVar("T")
AnyCall = Generation | FinishedCall


class SessionState:
    """The conversations and generations of one session.

    What its earlier calls were is read from the run at the first request. An idle state can therefore be dropped: a
    new one continues where it was. After `end`, `begin` and `count_tokens` refuse: the session may already be
    evaluated and read. `sampling` are vLLM's sampling parameters of each call.

    Not thread-safe: use it in the event loop. Prompts are made one after another, in the order of the requests, in
    threads (`Workers`).
    """

    def __init__(self, session_id: str, services: Services, sampling: Mapping[str, Any]) -> None:
        self.generations: list[Generation] = []
        """Running generations, and finished ones until `settle`, oldest first."""
        self.used_at = asyncio.get_running_loop().time()
        """Time of the last request or reply, of the event loop's clock."""
        self._session_id = session_id
        self._services = services
        self._sampling = sampling
        self._ended = self._end_recorded = False
        self._recovered: RecoveredSession | None = None
        """None before the first request and after the end."""
        self._policy: SessionPolicy | None = None
        """None before the first call and after the end."""
        self._budget: SessionBudget | None = None
        """None before the first call and after the end."""
        self._store = SessionStore(services.archive, services.writer, session_id, services.images)
        self._order = asyncio.Lock()
        """Held while a prompt is made, and while a call is added to the conversations."""

    @property
    def idle(self) -> bool:
        """True when nothing runs: the state can be dropped."""
        return not self.generations and not self._order.locked()

    async def begin(
        self, dialect: Dialect, body: bytes, request: ClientRequest, context_window: Callable[[], Awaitable[int]]
    ) -> tuple[AnyCall, ModelCall]:
        """Return the call that the request repeats, or start a new generation; and the decoded request.

        A new one's `call_started` event is committed before the engine is asked. `context_window` returns the
        engine's, in tokens, and may wait for the engine. Raises what it raises, `DialectError` for an invalid request,
        when the session has ended and when the prompt fills the window, and `OSError` when a new call cannot be begun:
        its event cannot be committed, or the disk is nearly full.

        A call that needs what running ones have reserved of a budget waits for their ends. Raises `BudgetUsedUp`.
        """
        self.used_at = asyncio.get_running_loop().time()
        while True:
            async with self._order:
                recovered = await self._open()
                for model_call in await self._decode(dialect, body, request):
                    asked = await self._prepare(recovered, dialect, model_call, await context_window(), len(body))
                    self.settle()
                    calls: list[AnyCall] = [*recovered.finished, *self.generations]
                    retried = find_retried(calls, asked.digest, request.headers)
                    if retried is not None:
                        kind: EventKind = "replayed" if retried.done else "joined"
                        self._services.refusals.record(self._event(kind, request, retried.call_id))
                        return retried, model_call
                budget = self._budget = self._budget or SessionBudget(self._services.budgets, recovered.used)
                grant = budget.take(dialect, asked.sampling["max_tokens"])
                if grant is not None:
                    how = dialect, model_call, asked, request, grant
                    return await self._start(recovered, len(body), *how), model_call
            await budget.settled()

    async def count_tokens(self, dialect: Dialect, body: bytes, request: ClientRequest) -> int:
        """Return the number of prompt tokens of a call, which may be more than the context window.

        Raises `DialectError` for an invalid request and when the session has ended.
        """
        self.used_at = asyncio.get_running_loop().time()
        async with self._order:
            recovered = await self._open()
            model_call = (await self._decode(dialect, body, request))[-1]
            prompt = await self._work(recovered, len(body), self._prompt, recovered, dialect, model_call)
            return len(prompt.ids)

    async def store(self, dialect: Dialect, body: bytes, request: ClientRequest) -> bytes:
        """Answer a request about what the session stored. What it adds is committed before.

        Raises `DialectError` for an invalid request, when the session has ended, and for what it did not store;
        `OSError` when nothing can be written.
        """
        self.used_at = asyncio.get_running_loop().time()
        async with self._order:
            recovered = await self._open()
            # however short it is, it reads all rows of the session
            answer, hidden = await self._work(recovered, LARGE_BYTES, self._store.answer, dialect.NAME, body, request)
        if hidden:
            self._services.refusals.record(self._event("hidden", request, None, str(hidden)))
        return answer

    def settle(self) -> None:
        """Replace finished generations without listeners by what a retry needs of them, which is small."""
        over = [generation for generation in self.generations if generation.done and not generation.listeners]
        if not over:
            return
        self.used_at = asyncio.get_running_loop().time()
        self.generations = [generation for generation in self.generations if generation not in over]
        if self._recovered is not None:
            completed = [FinishedCall.of(generation) for generation in over if generation.reply is not None]
            self._recovered.finished = newest([*self._recovered.finished, *completed])

    def abort(self, why: str) -> None:
        """Abort the running generations and record them."""
        for generation in self.generations:
            generation.abort(why)

    async def end(self) -> None:
        """Abort the running generations, free the conversations, and refuse later calls. Idempotent.

        Commits that the session has ended. Raises `OSError` when that fails; calls are refused even then.
        """
        self._ended = True
        self.abort("the session ended")
        self.generations, self._recovered, self._policy, self._budget = [], None, None, None
        if not self._end_recorded:
            await asyncio.to_thread(self._services.recovery.end, self._session_id)
            self._end_recorded = True

    async def _start(
        self,
        recovered: RecoveredSession,
        num_bytes: int,
        dialect: Dialect,
        model_call: ModelCall,
        asked: Asked,
        request: ClientRequest,
        grant: Grant,
    ) -> Generation:
        grant.record_cut(model_call.requested_sampling, asked.sampling)
        call, services = self._call(recovered, dialect, model_call, asked, request), self._services
        try:
            services.writer.require_room()
            if model_call.stores is not None:
                add = self._store.add
                await services.workers.run(num_bytes, add, request, *model_call.stores, call.call_id)
                self._check_open()  # the session may have ended meanwhile
            services.writer.add_event(self._event("call_started", request, call.call_id))
        except BaseException:
            grant.cancel()
            raise
        if model_call.hidden:
            self._services.refusals.record(self._event("hidden", request, call.call_id, str(model_call.hidden)))
        if self._policy is None:
            last_version = recovered.last_version
            self._policy = SessionPolicy(services.policy, keep=services.keep_adapter, last_version=last_version)

        def settle(ended: Call, fault: bool) -> None:
            if (event := grant.settle(ended, fault=fault)) is not None:
                services.refusals.record(event)

        how = call, asked.prompt, model_call, asked.sampling, asked.digest
        self.generations.append(Generation(services, self._policy, self._add, settle, *how))
        return self.generations[-1]

    def _call(
        self,
        recovered: RecoveredSession,
        dialect: Dialect,
        model_call: ModelCall,
        asked: Asked,
        request: ClientRequest,
    ) -> Call:
        prompt = asked.prompt
        conversation = model_call.messages, bool(model_call.tools), prompt.opening, prompt.sampled_by
        role = find_role(model_call, request.headers, recovered.roles.ask(*conversation))
        return Call(
            session_id=self._session_id,
            call_id=uuid.uuid4().hex,
            prompt_ids=asked.prompt_ids,
            parent_id=prompt.parent.call_id if prompt.parent else None,
            prefix_length=prompt.prefix_length,
            kind=prompt.kind,
            kind_reason=prompt.reason,
            role=role.role,
            role_evidence=role.evidence,
            dialect=dialect.NAME,
            host=request.host,
            path=request.path,
            model=model_call.model,
            stream=model_call.stream,
            messages=asked.messages,
            tools=json.dumps(model_call.tools, ensure_ascii=False) if prompt.parent is None else None,
        )

    async def _open(self) -> RecoveredSession:
        """Return what the session's earlier calls were. Raises `DialectError` when the session has ended."""
        self._check_open()
        if self._recovered is None:
            recovered = await asyncio.to_thread(self._services.recovery.recover, self._session_id)
            self._end_recorded = recovered.ended
            self._ended = self._ended or recovered.ended
            self._check_open()
            self._recovered = recovered
        return self._recovered

    async def _decode(self, dialect: Dialect, body: bytes, request: ClientRequest) -> list[ModelCall]:
        """Decode a request. One that may be a retry is decoded as it was asked first, too: that comes before."""
        run = self._services.workers.run
        try:
            model_calls = [await run(len(body), dialect.decode, body, request.target)]
        except NamesStored as named:
            num_bytes = max(len(body), self._store.num_bytes, INLINE_BYTES)
            model_calls = await run(num_bytes, self._store.decoded, named)
        if self._services.images == "refuse":
            refuse_hidden(model_calls[-1].hidden)
        return model_calls

    async def _prepare(
        self,
        recovered: RecoveredSession,
        dialect: Dialect,
        model_call: ModelCall,
        context_window: int,
        num_bytes: int,
    ) -> Asked:
        """Make the prompt of a request. A conversation that cannot fit into the window is refused untokenised."""
        make_prompt = partial(self._prompt, recovered, dialect)
        how = self._services, self._sampling, dialect, model_call, context_window, make_prompt
        return await self._work(recovered, num_bytes, prepare_call, *how)

    async def _work(
        self, recovered: RecoveredSession, num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Do work on the conversations. Hold `_order`: they are not thread-safe."""
        # the rows of a session are read in a thread
        num_bytes = num_bytes if recovered.without_rows else max(num_bytes, INLINE_BYTES)
        done = await self._services.workers.run(num_bytes, work, *args, **kwargs)
        self._check_open()  # the session may have ended meanwhile
        return done

    def _prompt(self, recovered: RecoveredSession, dialect: Dialect, model_call: ModelCall) -> Prompt:
        recovered.index(dialect.NAME, model_call)
        return recovered.conversations.prompt(model_call)

    async def _add(self, call: Call, prompt: Prompt, reply: Reply) -> None:
        """Let later calls continue a committed one."""
        async with self._order:
            if self._recovered is not None:
                message = reply.to_message()
                self._recovered.roles.complete(call.call_id, call.role, prompt.opening, message)
                add = self._recovered.conversations.add
                num_bytes = len(call.messages)
                await self._services.workers.run(num_bytes, add, call.call_id, prompt, call.completion_ids, message)

    def _event(self, kind: EventKind, request: ClientRequest, call_id: str | None, detail: str = "") -> Event:
        return Event(
            kind=kind,
            session_id=self._session_id,
            host=request.host,
            method="POST",
            path=request.path,
            call_id=call_id,
            detail=detail,
        )

    def _check_open(self) -> None:
        if self._ended:
            # not 409: the OpenAI and Anthropic SDKs retry it
            raise DialectError(
                "This session has ended and takes no more calls: use another session id.",
                status=410,
                code="session_ended",
            )


logger = logging.getLogger(__name__)

SOURCE = "/end"
"""Value of `GivenReward.source` for a reward from a session's end."""
_NOT_ACCEPTED = "this recorder accepts no rewards: start it with rolltap_accept_rewards, or use `rolltap reward`"


async def end_session(
    request: web.Request,
    bodies: Bodies,
    session: SessionState,
    writer: RunWriter,
    refusals: Refusals,
    *,
    accept_rewards: bool,
) -> web.Response:
    """End the session of the request: abort its calls, refuse later ones, sync as `rolltap_fsync` says.

    A request whose body is refused changes nothing, and is recorded. A reward that the session cannot have is refused
    with status 409 after the session has ended.
    """
    session_id = request.headers[SESSION_HEADER]
    try:
        async with bodies.read(request, session_id) as body:
            if body and not accept_rewards:
                raise DialectError(_NOT_ACCEPTED, status=403)
            given = GivenReward.parse(body, SOURCE) if body else None
    except (DialectError, InputError) as error:
        host = request.headers[HOST_HEADER]
        detail = f"a body with a reward: {error}"
        refusals.record(
            Event(kind="refused", session_id=session_id, host=host, method="POST", path=request.path, detail=detail)
        )
        return web.Response(status=error.status if isinstance(error, DialectError) else 400, text=str(error))
    refusals.end(session_id)
    try:
        await session.end()
        if given is not None:
            await asyncio.to_thread(give_reward, writer, session_id, given)
        await asyncio.to_thread(writer.end_session)
    except InputError as error:
        return web.Response(status=409, text=str(error))
    except (RunError, OSError) as error:
        logger.error("cannot write to %s: %s", writer.run, error)
        return web.Response(status=500, text=f"the session has ended, but its calls may not be on disk: {error}")
    return web.Response()
