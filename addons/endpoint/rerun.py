"""Rerun: the calls of a recorded session answer the requests of a program that runs again.

Without an engine, nothing is sampled: a rerun has no calls of its own, but an event `rerun` for
each answer, and one `diverged`.

**A recorded call answers the request whose canonical conversation it is**: equal tools and equal
messages, in the form of `canonical.py`. It does not matter in which order requests come, so that
sub-agents may run at the same time, nor what the program asks for besides: a model's name, a
temperature, a stream. Of recorded calls with equal conversations each answers once, in the order in
which they were asked, if its reply is what its tokens say: whoever changes a record could have the
program run a command that no model sampled. A retry gets the reply of the request that it repeats.

**Ids are those that were issued then.** All ids of a reply follow from its call's id.

**Refusals are those of the recorder.** A request without a recorded call goes the way of every
request: one that is too long, wrong or over a budget gets its error, as it did then. What would
reach the engine **diverges**: it is refused with the first difference to the recorded call that is
most like it, and the session takes no more calls.

**A fork** is a rerun up to a call, and goes on with an engine. Calls that began before that call
answer. The request with its conversation, or that of a later call, begins the live part, in which
nothing diverges. A call of the live part continues the tokens of the recorded calls. They are no
rows of its run, where nothing sampled them: its row has them in its prompt, and names the call in
`kind_reason`.
"""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from rolltap.addons.dialects.call import ModelCall, ServedModel
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.endpoint.budget import Used
from rolltap.addons.endpoint.generation import Generation, find_retried
from rolltap.addons.endpoint.recovery import RecoveredSession, Recovery, RunCalls, parents_first
from rolltap.addons.endpoint.request import ClientRequest
from rolltap.addons.errors import RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.prompts.canonical import canonical, canonical_tools, describe_difference
from rolltap.addons.prompts.conversations import Prompt
from rolltap.addons.prompts.history import Turn
from rolltap.addons.prompts.reply import is_sampled
from rolltap.addons.store.metadata import require_tokenizer
from rolltap.addons.store.records import EventKind, json_text
from rolltap.addons.store.rows import Row
from rolltap.addons.store.session_options import SessionOptions

_ROLES = {
    "system": "the system prompt",
    "assistant": "the assistant's message",
    "tool": "the tool's result",
}


def served_model(
    source: RecordedFrom,
    engine: str,
    digests: Mapping[str, str],
) -> ServedModel | None:
    """Return what the engine at a URL served when the run was recorded.

    None for a fork, which asks its own engine. Raises `RunError` when the run does not say, and for
    a run of another tokenizer or chat template than `digests`.
    """
    metadata = require_tokenizer(source.folder, digests, "give the model of that run")
    if source.until is not None:
        return None
    try:
        served = metadata["engines"][engine]
        return ServedModel(served["model"], served["max_model_len"])
    except (KeyError, TypeError):
        why = f"{source.run} does not say what the engine at {engine} served"
        raise RunError(why) from None


class RerunSession(RecoveredSession):
    """The recorded session, as the requests of one program find it."""

    again = True

    def __init__(
        self,
        recovery: Recovery,
        source: RecordedFrom,
        given: SessionOptions,
    ) -> None:
        super().__init__(recovery, calls_of(source.folder), source.session, given)
        self.source = source
        self.live = False
        """True once a fork samples."""
        self._recorded: dict[str, Row] = {}
        """Call id -> the row of a completed call, in the order of their starts."""
        self._asked: dict[bytes, list[str]] = {}
        """Digest of a conversation -> the calls that have it."""
        self._given: dict[str, Generation] = {}
        """The calls that have answered."""
        self._foreign: str | None = None
        """Why a call does not answer: its reply was written by somebody else than its model."""

    def _rows(self) -> tuple[list[Row], bool]:
        """Return the recorded rows; of what a fork samples only those that it can come to."""
        self._run_calls.refresh()
        rows, damaged = super()._rows()
        sampled = {row["call_id"] for row in rows if not self._answers(row)}
        rows = [row for row in rows if row["parent_id"] not in sampled]
        rows.sort(key=itemgetter("started_at"))
        return parents_first({row["call_id"]: row for row in rows}), damaged

    def _answers(self, row: Row) -> bool:
        """Return False for a call of the part that a fork samples."""
        return self.source.until is None or row["started_at"] < self.source.until

    def _restore(self, row: Row, request: ModelCall) -> Turn:
        history = self.conversations.history
        if self._answers(row):
            turn = super()._restore(row, request)
        else:  # a request is known by its conversation, and no call continues it
            turn = Turn(row["call_id"], None, 0, array("i"), array("i"))
        asked = history.read_after(history.turns.get(row["parent_id"]), request).digest()
        self._asked.setdefault(asked, []).append(turn.call_id)
        self._recorded[turn.call_id] = row
        return turn

    def _remember(self, *_: Any) -> None:
        """Leave it to `answer` to give a call again. A fork has budgets and weights of its own."""
        if self.source.until is not None:
            self.used = Used()
            self.last_version = None

    def without_recorded_parent(self, prompt: Prompt) -> Prompt:
        """Return the prompt of a new call, without a parent that its run has not."""
        if prompt.parent is None or prompt.parent.call_id not in self._recorded:
            return prompt
        source = f"session {self.source.session} of {self.source.run}"
        return replace(
            prompt,
            kind="root",
            reason=f"it continues call {prompt.parent.call_id} of {source}",
            parent=None,
            prefix_length=0,
            new_messages=prompt.model_call.messages,
        )

    def answer(
        self,
        dialect: Dialect,
        model_call: ModelCall,
        request: ClientRequest,
    ) -> Generation | None:
        """Return the recorded call that answers a request, and commit the event that says so.

        None without any. Raises `OSError` and `RunError`.
        """
        self.index(dialect.NAME, model_call.echo_rule)
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
            row = self._recorded[call_id]
            if not self._answers(row):
                self.live = True
                return None
            turn = history.turns[call_id]
            if not self._is_sampled(row, turn):
                number = list(self._recorded).index(call_id) + 1
                self._foreign = f"call {number}: its recorded reply is not what its tokens say"
                return None
            finished = self.finished_call(row, turn, delivered=False)
            if finished is not None:
                finished.digest = digest
                self._given[call_id] = finished
                return self._answer(finished, "rerun", request)
        return None

    def _answer(self, recorded: Generation, kind: EventKind, request: ClientRequest) -> Generation:
        where = json_text({"run": str(self.source.run), "session": self.source.session})
        self._recovery.writer.add_event(request.event(kind, where, recorded.call_id))
        return recorded

    def _is_sampled(self, row: Row, turn: Turn) -> bool:
        stop = row["sampling"].get("stop") or []
        completion_ids = turn.completion_ids.tolist()
        rendering = self._recovery.rendering
        sampled, _ = rendering.read(turn.prompt_ids(), completion_ids, row["tools"], stop)
        return is_sampled(row["reply"], sampled)

    def difference(self, model_call: ModelCall) -> str | None:
        """Say where a request differs from the most similar recorded one that has not answered.

        No recorded call answers it. In the live part there is no difference.
        """
        if self._foreign is not None:
            return self._foreign
        if self.live:
            return None
        if self._asked.get(self.conversations.history.read(model_call).digest()):
            return "a call that is asked once more than in the record"
        nearest = "a call more than the record has"
        most_alike = (-1, 0)
        ours = _texts(model_call)
        for number, (call_id, row) in enumerate(self._recorded.items(), 1):
            if call_id in self._given:
                continue
            recorded = self._whole_request(row, model_call)
            theirs = _texts(recorded)
            num_equal = sum(own == other for own, other in zip(ours, theirs, strict=False))
            alike = (num_equal, -abs(len(ours) - len(theirs)))
            if alike > most_alike:
                most_alike = alike
                what = _difference(model_call, ours, recorded, theirs)
                nearest = f"call {number}: {what}"
        return nearest

    def _whole_request(self, row: Row, asked: ModelCall) -> ModelCall:
        """Return the request of a call with all its messages, to compare it with `asked`."""
        request = self.request(row, asked.echo_rule)
        parent = self._recorded.get(row["parent_id"])
        while parent is not None:
            request.messages = [*parent["messages"], parent["reply"], *request.messages]
            parent = self._recorded.get(parent["parent_id"])
        return request


@lru_cache(8)
def calls_of(run: Path) -> RunCalls:
    """Return the calls of a recorded run, which the reruns of its sessions share."""
    return RunCalls(run)


def _texts(model_call: ModelCall) -> list[str]:
    texts = [canonical(message, model_call) for message in model_call.messages]
    return [canonical_tools(model_call), *texts]


def _difference(
    ours: ModelCall,
    our_texts: list[str],
    theirs: ModelCall,
    their_texts: list[str],
) -> str:
    """Say where a request differs first from a recorded one.

    That is in its tools, in a message, or in how many messages there are.
    """
    if our_texts[0] != their_texts[0]:
        which = _other_tools(ours, theirs) or describe_difference(our_texts[0], their_texts[0])
        return f"it offers other tools: {which}"
    for i, (own, other) in enumerate(zip(our_texts[1:], their_texts[1:], strict=False)):
        if own != other:
            what = _ROLES.get(ours.messages[i]["role"], "the message")
            return f"{what} is another one (message {i}): {describe_difference(own, other)}"
    number = len(theirs.messages)
    return f"it has {len(ours.messages)} messages, and the recorded call {number}"


def _other_tools(ours: ModelCall, theirs: ModelCall) -> str:
    """Name the tools that only one of two requests has."""
    our_names = {tool["function"]["name"] for tool in ours.tools}
    their_names = {tool["function"]["name"] for tool in theirs.tools}
    which = []
    if our_names - their_names:
        which.append(f"with {', '.join(sorted(our_names - their_names))}")
    if their_names - our_names:
        which.append(f"without {', '.join(sorted(their_names - our_names))}")
    return " and ".join(which)
