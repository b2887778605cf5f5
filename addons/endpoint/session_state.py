"""State of one session in the endpoint: its conversations and its generations."""

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.types import ContextOverflow, DialectError, ModelCall, Reply
from rolltap.addons.endpoint.client_request import ClientRequest
from rolltap.addons.endpoint.generation import Generation, Services
from rolltap.addons.endpoint.retries import find_retried, worth_remembering
from rolltap.addons.endpoint.roles import find_role
from rolltap.addons.prompts.continuity import Conversations, Prompt
from rolltap.addons.store.records import Call, Event, EventKind


class SessionState:
    """The conversations and generations of one session.

    After `end`, `begin` and `count_tokens` refuse: the session may already be evaluated and read. `sampling` are vLLM's
    sampling parameters of each call. Not thread-safe: use it in the event loop. Prompts are made one after another, in
    the order of the requests, in threads (`Workers`).
    """

    def __init__(self, session_id: str, services: Services, sampling: Mapping[str, Any]) -> None:
        self.generations: list[Generation] = []
        """Running generations and the newest finished ones, oldest first."""
        self._session_id = session_id
        self._services = services
        self._sampling = sampling
        self._conversations: Conversations | None = Conversations(services.rendering)
        """None after `end`."""
        self._tools_seen = False
        self._order = asyncio.Lock()
        """Held while a prompt is made, and while a call is added to the conversations."""

    async def begin(
        self, dialect: Dialect, body: bytes, request: ClientRequest, context_window: int
    ) -> tuple[Generation, ModelCall]:
        """Return the generation that the request repeats, or start a new one; and the decoded request.

        A new one's `call_started` event is committed before the engine is asked. `context_window` is the
        engine's, in tokens. Raises `DialectError` for an invalid request, when the session has ended and when the
        prompt fills the window, and `OSError` when an event cannot be committed or the disk is nearly full.
        """
        async with self._order:
            model_call, prompt = await self._prepare(dialect, body, request)
            max_new_tokens = context_window - len(prompt.ids)
            if max_new_tokens < 1:
                raise ContextOverflow(len(prompt.ids), context_window)
            generation = find_retried(self.generations, dialect.NAME, model_call, prompt.ids, request.headers)
            if generation is None:
                generation = self._start(dialect, model_call, prompt, request, max_new_tokens)
            else:
                kind: EventKind = "replayed" if generation.done else "joined"
                self._services.writer.add_event(self._event(kind, request, generation.call))
            return generation, model_call

    def _start(
        self, dialect: Dialect, model_call: ModelCall, prompt: Prompt, request: ClientRequest, max_new_tokens: int
    ) -> Generation:
        role = find_role(model_call, request.headers, tools_before=self._tools_seen)
        self._tools_seen = self._tools_seen or bool(model_call.tools)
        call = Call(
            session_id=self._session_id,
            call_id=uuid.uuid4().hex,
            prompt_ids=prompt.ids,
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
            messages=json.dumps(prompt.new_messages, ensure_ascii=False),
            tools=json.dumps(model_call.tools, ensure_ascii=False) if prompt.parent is None else None,
        )
        self._services.writer.require_room()
        self._services.writer.add_event(self._event("call_started", request, call))
        sampling = self._sampling_for(model_call, max_new_tokens)
        generation = Generation(self._services, self._add, call, prompt, model_call, sampling)
        self.generations = [*worth_remembering(self.generations), generation]
        return generation

    async def count_tokens(self, dialect: Dialect, body: bytes, request: ClientRequest) -> int:
        """Return the number of prompt tokens of a call. Raises `DialectError` as `begin` does."""
        async with self._order:
            _, prompt = await self._prepare(dialect, body, request)
            return len(prompt.ids)

    def abort(self, why: str) -> None:
        """Abort the running generations and record them."""
        for generation in self.generations:
            generation.abort(why)

    def end(self) -> None:
        """Abort the running generations, free the conversations, and refuse later calls. Idempotent."""
        self.abort("the session ended")
        self.generations, self._conversations = [], None

    async def _prepare(self, dialect: Dialect, body: bytes, request: ClientRequest) -> tuple[ModelCall, Prompt]:
        """Decode a request and make its prompt. Hold `_order`: conversations are not thread-safe."""
        conversations = self._open_conversations()

        def prepare() -> tuple[ModelCall, Prompt]:
            model_call = dialect.decode(body, request.target)
            return model_call, conversations.prompt(model_call)

        prepared = await self._services.workers.run(len(body), prepare)
        self._open_conversations()  # the session may have ended meanwhile
        return prepared

    async def _add(self, call: Call, prompt: Prompt, reply: Reply) -> None:
        """Let later calls continue a committed one."""
        async with self._order:
            if self._conversations is not None:
                self._conversations.add(call.call_id, prompt, call.completion_ids, reply.to_message())

    def _event(self, kind: EventKind, request: ClientRequest, call: Call) -> Event:
        return Event(
            kind=kind,
            session_id=self._session_id,
            host=request.host,
            method="POST",
            path=request.path,
            call_id=call.call_id,
        )

    def _open_conversations(self) -> Conversations:
        if self._conversations is None:
            # not 409: the OpenAI and Anthropic SDKs retry it
            raise DialectError(
                "This session has ended and takes no more calls: use another session id.",
                status=410,
                code="session_ended",
            )
        return self._conversations

    def _sampling_for(self, model_call: ModelCall, max_new_tokens: int) -> dict[str, Any]:
        """Return vLLM's sampling parameters: the run's, and the harness's token limit, stop texts and JSON schema."""
        own_limit = self._sampling.get("max_tokens", max_new_tokens)
        sampling = {
            **self._sampling,
            "max_tokens": min(model_call.max_tokens or max_new_tokens, max_new_tokens, own_limit),
            "stop_token_ids": self._services.rendering.stop_token_ids(),
        }
        if model_call.stop:
            sampling["stop"] = model_call.stop
        if model_call.schema is not None:
            sampling["structured_outputs"] = {"json": model_call.schema} if model_call.schema else {"json_object": True}
        return sampling
