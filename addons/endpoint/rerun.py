"""Rerun: the calls of a recorded session answer the requests of a program that runs again, without an engine.

**A recorded call answers the request whose canonical conversation it is**: equal tools and equal messages, in the form
of `canonical.py`. It does not matter in which order requests come, so that sub-agents may run at the same time, nor
what the program asks for besides: a model's name, a temperature, a stream. Of recorded calls with equal conversations
each answers once, in the order in which they were asked, if its reply is what its tokens say: whoever changes a record
could have the program run a command that no model sampled. A retry gets the reply of the request that it repeats.

**Ids are those that were issued then.** All ids of a reply follow from its call's id.

**Refusals are those of the recorder.** A request without a recorded call goes the way of every request: one that is too
long, wrong or over a budget gets its error, as it did then. What would reach the engine **diverges**: it is refused
with the first difference to the recorded call that is most like it, and the session takes no more calls.

Nothing is sampled, so a rerun has no calls of its own: an event `rerun` for each answer, and one `diverged`.

**A fork** is a rerun up to a call, and goes on with an engine. Calls that began before that call answer. The request
with its conversation, or that of a later call, begins the live part, in which nothing diverges. A call of the live part
continues the tokens of the recorded calls. They are no rows of its run, where nothing sampled them: its row has them in
its prompt, and names the call in `kind_reason`.
"""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from rolltap.addons.dialects.call import EchoRule, Message, ModelCall, ServedModel
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.endpoint.budget import Used
from rolltap.addons.endpoint.generation import Generation
from rolltap.addons.endpoint.recovery import (
    RecordedCall,
    RecoveredSession,
    Recovery,
    Row,
    parents_first,
    undamaged_calls,
)
from rolltap.addons.endpoint.request import ClientRequest
from rolltap.addons.endpoint.retries import find_retried
from rolltap.addons.endpoint.stored import Archive
from rolltap.addons.errors import RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.prompts.canonical import canonical, canonical_tools, describe_difference
from rolltap.addons.prompts.history import Prompt, Turn
from rolltap.addons.prompts.reply import is_sampled
from rolltap.addons.store.metadata import require_tokenizer
from rolltap.addons.store.records import EventKind, json_text
from rolltap.addons.store.session_options import SessionOptions

_ROLES = {"system": "the system prompt", "assistant": "the assistant's message", "tool": "the tool's result"}


def served_model(source: RecordedFrom, engine: str, digests: Mapping[str, str]) -> ServedModel | None:
    """Return what the engine at a URL served when the run was recorded; None for a fork, which asks its own engine.

    Raises `RunError` when the run does not say, and for a run of another tokenizer or chat template than `digests`.
    """
    metadata = require_tokenizer(source.run, digests, "give the model of that run")
    if source.until is not None:
        return None
    try:
        served = metadata["engines"][engine]
        return ServedModel(served["model"], served["max_model_len"])
    except (KeyError, TypeError):
        raise RunError(f"{source.run} does not say what the engine at {engine} served") from None


class RerunSession(RecoveredSession):
    """The recorded session, as the requests of one program find it."""

    again = True

    def __init__(self, recovery: Recovery, source: RecordedFrom, ended: bool, given: SessionOptions) -> None:
        super().__init__(recovery, source.session, ended, given)
        self.source = source
        self.live = False
        """True once a fork samples."""
        self._calls: dict[str, RecordedCall] = {}
        """Completed calls in the order of their starts, with all their messages."""
        self._asked: dict[bytes, list[str]] = {}
        """Digest of a conversation -> the calls that have it."""
        self._given: dict[str, Generation] = {}
        """The calls that have answered."""
        self._foreign: str | None = None
        """Why a call does not answer: its reply was written by somebody else than its model."""

    def _rows(self) -> tuple[list[Row], bool]:
        """Return the rows of the recorded session; of what a fork samples only those that it can come to."""
        session_id = self.source.session
        archive = archive_of(self.source.run)
        places = archive.new_places(session_id, {})
        rows, damaged = undamaged_calls(session_id, (archive.row(session_id, place) for place in places))
        sampled = {row["call_id"] for row in rows if not self._answers(row)}
        rows = sorted((row for row in rows if row["parent_id"] not in sampled), key=itemgetter("started_at"))
        return parents_first({row["call_id"]: row for row in rows}), damaged

    def _answers(self, row: Row) -> bool:
        """Return False for a call of the part that a fork samples."""
        return self.source.until is None or row["started_at"] < self.source.until

    def _restore(self, recorded: RecordedCall, reply: Message, rule: EchoRule | None) -> Turn:
        row, history = recorded.row, self.conversations.history
        if self._answers(row):
            turn = super()._restore(recorded, reply, rule)
        else:  # a request is known by its conversation, and no call continues it
            turn = Turn(row["call_id"], None, 0, array("i"), array("i"))
        parent = self._calls.get(row["parent_id"])
        before = [] if parent is None else [*parent.messages, parent.reply or {}]
        self._calls[turn.call_id] = replace(recorded, messages=[*before, *recorded.messages])
        asked = history.read_after(history.turns.get(row["parent_id"]), recorded.model_call(rule)).digest()
        self._asked.setdefault(asked, []).append(turn.call_id)
        return turn

    def _remember(self, *_: Any) -> None:
        """Leave it to `answer` to give a call again. A fork has budgets and weights of its own."""
        if self.source.until is not None:
            self.used, self.last_version = Used(), None

    def prompt(self, dialect: Dialect, model_call: ModelCall) -> Prompt:
        """Return the prompt of a call of the live part: one that continues a recorded call has no parent in its run."""
        prompt = super().prompt(dialect, model_call)
        if prompt.parent is None or prompt.parent.call_id not in self._calls:
            return prompt
        reason = f"it continues call {prompt.parent.call_id} of session {self.source.session} of {self.source.run}"
        root = replace(prompt, kind="root", reason=reason, parent=None, prefix_length=0)
        return replace(root, new_messages=prompt.model_call.messages)

    def answer(
        self,
        dialect: Dialect,
        model_call: ModelCall,
        request: ClientRequest,
    ) -> Generation | None:
        """Return the recorded call that answers a request, and commit the event that says so; None without any.

        Raises `OSError` and `RunError`.
        """
        self.index(dialect.NAME, model_call)
        history = self.conversations.history
        digest = history.read(model_call).digest()
        known = self._asked.get(digest, [])
        given = [self._given[call_id] for call_id in known if call_id in self._given]
        retried = find_retried(given, digest, request.headers)
        if retried is not None:
            return self._answer(retried, "replayed", request)
        for call_id in known:
            if call_id in self._given:
                continue
            if not self._answers(self._calls[call_id].row):
                self.live = True
                return None
            if not self._is_sampled(self._calls[call_id], history.turns[call_id]):
                number = [*self._calls].index(call_id) + 1
                self._foreign = f"call {number}: its recorded reply is not what its tokens say"
                return None
            finished = self._finished_call(self._calls[call_id], history.turns[call_id], delivered=False)
            if finished is not None:
                finished.digest = digest
                self._given[call_id] = finished
                return self._answer(finished, "rerun", request)
        return None

    def _answer(self, recorded: Generation, kind: EventKind, request: ClientRequest) -> Generation:
        where = json_text({"run": str(self.source.run), "session": self.source.session})
        self._recovery.writer.add_event(request.event(kind, where, recorded.call_id))
        return recorded

    def _is_sampled(self, recorded: RecordedCall, turn: Turn) -> bool:
        stop = recorded.sampling.get("stop") or []
        ids = turn.prompt_ids(), turn.completion_ids.tolist()
        sampled, _ = self._recovery.rendering.read(*ids, recorded.tools, stop)
        return is_sampled(recorded.reply or {}, sampled)

    def difference(self, model_call: ModelCall) -> str | None:
        """Say where a request that no recorded call answers differs from the most similar one that has not answered.

        In the live part there is no difference.
        """
        if self._foreign is not None:
            return self._foreign
        if self.live:
            return None
        if self._asked.get(self.conversations.history.read(model_call).digest()):
            return "a call that is asked once more than in the record"
        ours = _texts(model_call)
        nearest, found = "a call more than the record has", (-1, 0)
        for number, (call_id, recorded) in enumerate(self._calls.items(), 1):
            asked = recorded.model_call(model_call.echo_rule)
            theirs = _texts(asked)
            alike = sum(a == b for a, b in zip(ours, theirs, strict=False)), -abs(len(ours) - len(theirs))
            if call_id not in self._given and alike > found:
                nearest, found = f"call {number}: {_difference(model_call, ours, asked, theirs)}", alike
        return nearest


@lru_cache(8)
def archive_of(run: Path) -> Archive:
    """Return the archive of a recorded run, which the forks of its sessions share: an index takes time."""
    return Archive(run)


def _texts(model_call: ModelCall) -> list[str]:
    return [canonical_tools(model_call), *(canonical(message, model_call) for message in model_call.messages)]


def _difference(ours: ModelCall, our_texts: list[str], theirs: ModelCall, their_texts: list[str]) -> str:
    """Say where a request differs first from a recorded one: in its tools, in a message, or in how many there are."""
    if our_texts[0] != their_texts[0]:
        names = [{tool["function"]["name"]: tool for tool in call.tools} for call in (ours, theirs)]
        more, fewer = sorted(names[0].keys() - names[1]), sorted(names[1].keys() - names[0])
        which = [f"{word} {', '.join(tools)}" for word, tools in (("with", more), ("without", fewer)) if tools]
        return f"it offers other tools: {' and '.join(which) or describe_difference(our_texts[0], their_texts[0])}"
    for i, (own, other) in enumerate(zip(our_texts[1:], their_texts[1:], strict=False)):
        if own != other:
            what = _ROLES.get(ours.messages[i]["role"], "the message")
            return f"{what} is another one (message {i}): {describe_difference(own, other)}"
    return f"it has {len(our_texts) - 1} messages, and the recorded call {len(their_texts) - 1}"
