"""State of one session in the endpoint: its conversations and its generations."""

import json
import uuid
from collections.abc import Mapping
from typing import Any

from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.types import ContextOverflow, DialectError, ModelCall
from rolltap.addons.endpoint.generation import Generation, Services
from rolltap.addons.endpoint.retries import find_retried, worth_remembering
from rolltap.addons.endpoint.roles import find_role
from rolltap.addons.prompts.continuity import Conversations, Prompt
from rolltap.addons.store.records import Call, Event, EventKind


class SessionState:
    """The conversations and generations of one session.

    After `end`, `begin` and `count_tokens` refuse: the session may already be evaluated and read. `sampling` are vLLM's
    sampling parameters of each call. Not thread-safe: use it in the event loop.
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

    def begin(
        self,
        dialect: Dialect,
        model_call: ModelCall,
        context_window: int,
        *,
        host: str,
        path: str,
        headers: Mapping[str, str],
    ) -> Generation:
        """Return the generation that the request repeats, or start a new one.

        A new one's `call_started` event is committed before the engine is asked. `context_window` is the
        engine's, in tokens; `headers` are the request's. Raises `DialectError` when the session has ended or the prompt
        fills the window, and `OSError` when an event cannot be committed or the disk is nearly full.
        """
        least = self._services.rendering.least_tokens(model_call.messages, model_call.tools, context_window)
        if least > context_window:
            raise ContextOverflow(least, context_window)
        conversations, prompt = self._prompt(model_call)
        max_new_tokens = context_window - len(prompt.ids)
        if max_new_tokens < 1:
            raise ContextOverflow(len(prompt.ids), context_window)
        writer = self._services.writer
        generation = find_retried(self.generations, dialect.NAME, model_call, prompt.ids, headers)
        if generation is not None:
            kind: EventKind = "replayed" if generation.done else "joined"
            writer.add_event(
                Event(
                    kind=kind,
                    session_id=self._session_id,
                    host=host,
                    method="POST",
                    path=path,
                    call_id=generation.call.call_id,
                )
            )
            return generation
        role = find_role(model_call, headers, tools_before=self._tools_seen)
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
            host=host,
            path=path,
            model=model_call.model,
            stream=model_call.stream,
            messages=json.dumps(prompt.new_messages, ensure_ascii=False),
            tools=json.dumps(model_call.tools, ensure_ascii=False) if prompt.parent is None else None,
        )
        writer.require_room()
        writer.add_event(
            Event(
                kind="call_started",
                session_id=self._session_id,
                host=host,
                method="POST",
                path=path,
                call_id=call.call_id,
            )
        )
        sampling = self._sampling_for(model_call, max_new_tokens)
        generation = Generation(self._services, conversations, call, prompt, model_call, sampling)
        self.generations = [*worth_remembering(self.generations), generation]
        return generation

    def count_tokens(self, model_call: ModelCall) -> int:
        """Return the number of prompt tokens of a call. Raises `DialectError` when the session has ended."""
        return len(self._prompt(model_call)[1].ids)

    def abort(self, why: str) -> None:
        """Abort the running generations and record them."""
        for generation in self.generations:
            generation.abort(why)

    def end(self) -> None:
        """Abort the running generations, free the conversations, and refuse later calls. Idempotent."""
        self.abort("the session ended")
        self.generations, self._conversations = [], None

    def _prompt(self, model_call: ModelCall) -> tuple[Conversations, Prompt]:
        if self._conversations is None:
            # not 409: the OpenAI and Anthropic SDKs retry it
            raise DialectError(
                "This session has ended and takes no more calls: use another session id.",
                status=410,
                code="session_ended",
            )
        return self._conversations, self._conversations.prompt(model_call)

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
