"""Recovery: a session's state from the rows of its run, after a restart or when it was dropped.

recovered = recovery.recover(session_id)   # at its first call in this process, or after it was dropped
if recovered.ended: ...                    # refuse with 410
prompt = recovered.prompt(dialect, model_call)
find_retried(recovered.calls, request_digest(...), headers)
"""

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rolltap.addons.dialects.call import EchoRule, Message, ModelCall, Reply, Tool, Usage
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.endpoint.budget import Used
from rolltap.addons.endpoint.generation import Generation
from rolltap.addons.endpoint.request import ClientRequest, request_digest
from rolltap.addons.endpoint.retries import REMEMBERED
from rolltap.addons.endpoint.roles import PastCall, SessionRoles
from rolltap.addons.errors import RunError
from rolltap.addons.prompts.history import Conversations, Prompt, Turn, ids_digest
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.index import EndedSessions, SessionIndex, nothing
from rolltap.addons.store.records import CALL_SCHEMA, DIGEST, Event, utc_now
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.tables import RunWriter, batch_rows

logger = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call whose prompt can be rebuilt."""

    row: Row
    messages: list[Message]
    """The messages after the parent's conversation and reply."""
    tools: list[Tool]
    reply: Message | None
    """None for a call that did not complete."""
    sampling: dict[str, Any]
    again: bool
    """The `ModelCall.again` of the request."""

    def model_call(self, rule: EchoRule | None) -> ModelCall:
        """Return the request with only the new messages, of a harness with this echo rule."""
        return ModelCall(self.row["model"], self.messages, self.tools, echo_rule=rule, again=self.again)


def parents_first(rows: dict[str, Row]) -> list[Row]:
    """Return rows, by call id, in their order but each parent first: writers whose clocks differ may mix them."""
    ordered: list[Row] = []
    seen: set[str] = set()
    for own in rows.values():
        row: Row | None = own
        path: list[Row] = []
        while row is not None and row["call_id"] not in seen:
            seen.add(row["call_id"])
            path.append(row)
            row = rows.get(row["parent_id"])
        ordered += reversed(path)
    return ordered


def readable_calls(rows: Iterable[Row], again: bool = False) -> Iterator[RecordedCall]:
    """Yield the calls of a session's rows whose prompts can be rebuilt. The others are left out with a warning."""
    found: dict[str | None, RecordedCall] = {}
    for row in rows:
        parent = found.get(row["parent_id"])
        known = parent.row["prompt_length"] + len(parent.row["completion_ids"]) if parent is not None else 0
        try:
            if row["parent_id"] is not None and (parent is None or parent.reply is None):
                raise ValueError(f"its parent {row['parent_id']} cannot be read")
            if row["prompt_length"] != known + len(row["prompt_tail_ids"]):
                raise ValueError(f"its prompt has {row['prompt_length']} tokens, but fewer or more can be rebuilt")
            tools = json.loads(row["tools"]) if row["tools"] is not None or parent is None else parent.tools
            messages, sampling = json.loads(row["messages"]), json.loads(row["sampling"])
            reply = json.loads(row["reply"]) if row["status"] == "completed" else None
            if reply is None and row["status"] == "completed":
                raise ValueError("it has no reply")
        except (ValueError, TypeError, RecursionError) as error:
            leave_out(row, str(error))
        else:
            recorded = found[row["call_id"]] = RecordedCall(row, messages, tools, reply, sampling, again)
            yield recorded


def leave_out(row: Row, why: str) -> None:
    """Warn that a call is not taken from its row."""
    where = f"session {row['session_id']}: call {row['call_id']}"
    logger.warning("%s cannot be continued after a restart: %s", where, why)


_NOT_A_RECORDERS = KeyError, TypeError, AttributeError, ValueError, RecursionError
"""Errors of reading messages that no recorder wrote."""


class Recovery:
    """Rebuilds sessions from the run that `writer` appends to. One for each recorder process. Thread-safe.

    It reads the session ids of the run once. After that it reads only what other writers have committed since; what
    this process has committed only for a session that it has recovered before. Call it in a worker thread.
    """

    def __init__(self, writer: RunWriter, rendering: Rendering) -> None:
        self.writer = writer
        self.rendering = rendering
        self.started = utc_now()
        self._lock = threading.Lock()
        """Guards all below."""
        self._recovered: set[str] = set()
        self._ended = EndedSessions(writer.run)
        self._calls: SessionIndex | None = None

    def load(self) -> None:
        """Read the session ids of the run: 50 µs a call that is not compacted. Raises `OSError` and `RunError`."""
        with self._lock:
            self._refresh(own=False)

    def end(self, session_id: str) -> None:
        """Commit that a session has ended. Raises `OSError`; the session has ended in this process even then."""
        with self._lock:
            self._ended.add(session_id)
        self.writer.add_event(Event(kind="ended", session_id=session_id))

    def recover(self, session_id: str) -> "RecoveredSession":
        """Return the state of a session as its rows have it; empty for a session without rows.

        Raises as `load`, and `ValueError` for damaged options of the session.
        """
        with self._lock:
            self._refresh(own=session_id in self._recovered)
            self._recovered.add(session_id)
            ended = session_id in self._ended
        return RecoveredSession(self, session_id, ended, SessionOptions.read(self.writer.run, session_id))

    def rows(self, session_id: str) -> tuple[list[Row], bool]:
        """Return the undamaged rows of a session as of the last `recover` or `load`, each call once, parents first.

        Also return True when there are damaged ones: they are left out with a warning. Raises `OSError`.
        """
        with self._lock:
            assert self._calls is not None, "`recover` comes first"
            batches = list(self._calls.batches(session_id))
            self._calls.close()
        return undamaged_calls(session_id, batches)

    def _refresh(self, *, own: bool) -> None:
        """Read what was committed since; with `own`, by this process too."""
        skip = nothing if own else self.writer.owns
        self._ended.refresh(self.writer.owns)
        if self._calls is None:
            self._calls = SessionIndex(self.writer.run, "calls", skip)
        else:
            self._calls.refresh(skip)


class RecoveredSession:
    """A session's state. Not thread-safe: one worker at a time. It can be dropped whenever no generation runs."""

    again = False
    """True for one of a rerun, which cannot be dropped: which calls have answered is in no row."""

    def __init__(self, recovery: Recovery, session_id: str, ended: bool, given: SessionOptions) -> None:
        self.ended = ended
        """True when the session has ended: an event `ended`, or a row in `sessions`."""
        self.given = given
        """Options of this session alone."""
        self.conversations = Conversations(recovery.rendering)
        self.calls: list[Generation] = []
        """The calls that run, and the newest completed ones, oldest first."""
        self.roles = SessionRoles()
        """Known after `index`."""
        self.last_version: str | None = None
        """The weights that sampled the last token of the session's newest call that has one. Known after `index`."""
        self.used = Used()
        """The use of the budgets by the earlier calls of the session. Known after `index`."""
        self._recovery = recovery
        self._session_id = session_id
        self._indexed: set[tuple[str, EchoRule | None]] = set()
        self._recovered: set[str] | None = None
        """Ids of the calls that were recorded before; None before `index`."""

    @property
    def without_rows(self) -> bool:
        """True once it is known that the session had no rows: `index` reads nothing."""
        return self._recovered == set()

    def index(self, dialect: str, model_call: ModelCall) -> None:
        """Make the recorded calls findable for a request of an API. Reads the session's rows for the first request.

        The rule with which a harness's echoes are compared (`ModelCall.echo_rule`) is not recorded. The calls of the
        request's API are taken to have its rule, those of other APIs none. A later request with another rule reads the
        rows again. Calls whose ancestors are missing or damaged are left out with a warning. Raises `OSError`.
        """
        asked = dialect, model_call.echo_rule
        if self._recovered == set() or asked in self._indexed:
            return
        rows, damaged = self._rows()
        first = self._recovered is None
        if self._recovered is None:
            self._recovered = {row["call_id"] for row in rows}
        rows = [row for row in rows if row["call_id"] in self._recovered]
        restored: list[tuple[RecordedCall, Turn]] = []
        past: list[PastCall] = []
        calls = list(readable_calls(rows, self.again))
        damaged |= sum(call.reply is not None for call in calls) < sum(row["status"] == "completed" for row in rows)
        self.conversations.history.incomplete |= damaged
        for recorded in calls:
            theirs = recorded.row["dialect"]
            rule = model_call.echo_rule if theirs == dialect else None
            if (theirs, rule) in self._indexed:
                continue
            try:
                if first:
                    past.append(self._past(recorded, rule))
                if recorded.reply is not None:
                    restored.append((recorded, self._restore(recorded, recorded.reply, rule)))
            except _NOT_A_RECORDERS as error:
                self.conversations.history.incomplete = True
                leave_out(recorded.row, f"its messages are not those of a recorder ({error!r})")
        self._indexed |= {asked, *((row["dialect"], None) for row in rows if row["dialect"] != dialect)}
        if first:
            self.roles.restore(past)
            self.last_version = _last_version(rows)
            self.used = Used.of(rows)
            self._remember(restored, rows)

    def answer(
        self,
        dialect: Dialect,
        model_call: ModelCall,
        request: ClientRequest,
    ) -> Generation | None:
        """Return the recorded call that answers a request, in a rerun. Raises `OSError` and `RunError`."""
        return None

    def difference(self, model_call: ModelCall) -> str | None:
        """Return the difference between a request, which `answer` does not know, and the record, in a rerun."""
        return None

    def prompt(self, dialect: Dialect, model_call: ModelCall) -> Prompt:
        """Return the prompt of a new call. Raises as `index`."""
        self.index(dialect.NAME, model_call)
        return self.conversations.prompt(model_call)

    def _remember(self, restored: list[tuple[RecordedCall, Turn]], rows: list[Row]) -> None:
        """Let retries get the newest completed calls."""
        last_start = max((row["started_at"] for row in rows), default=self._recovery.started)
        for recorded, turn in restored[-REMEMBERED:]:
            finished_at = recorded.row["finished_at"] or self._recovery.started
            lost = last_start <= finished_at < self._recovery.started
            if (call := self._finished_call(recorded, turn, delivered=not lost)) is not None:
                self.calls.append(call)

    def _rows(self) -> tuple[list[Row], bool]:
        """Return the session's rows as `Recovery.rows`."""
        return self._recovery.rows(self._session_id)

    def _past(self, recorded: RecordedCall, rule: EchoRule | None) -> PastCall:
        row, model_call = recorded.row, recorded.model_call(rule)
        sampled_by = self.conversations.sampled_by(model_call) if row["kind"] == "rendered" else row["parent_id"]
        return PastCall(
            call_id=row["call_id"],
            parent_id=row["parent_id"],
            sampled_by=sampled_by,
            role=row["role"],
            started_at=row["started_at"],
            finished_at=row["finished_at"] or self._recovery.started,
            model_call=model_call,
            reply=recorded.reply,
        )

    def _restore(self, recorded: RecordedCall, reply: Message, rule: EchoRule | None) -> Turn:
        """Let later calls continue a completed one."""
        row, request = recorded.row, recorded.model_call(rule)
        parent = None if row["parent_id"] is None else self.conversations.history.turns[row["parent_id"]]
        return self.conversations.restore(
            row["call_id"], parent, row["prompt_tail_ids"], row["completion_ids"], request, reply, row["kind"]
        )

    def _finished_call(self, recorded: RecordedCall, turn: Turn, *, delivered: bool) -> Generation | None:
        """Return the call as it can be given again, or None when its reply cannot be rebuilt exactly."""
        row, message = recorded.row, recorded.reply or {}
        prompt_ids, sampling = turn.prompt_ids(), recorded.sampling
        reply = Reply.of_message(message, row["finish_reason"])
        completion_ids, rendering = turn.completion_ids.tolist(), self._recovery.rendering
        stop_texts = sampling.get("stop") or ()
        sampled, num_reasoning = rendering.read(prompt_ids, completion_ids, recorded.tools, stop_texts)
        reply.stop = sampled.stop
        own_end = completion_ids[-1:] in [[i] for i in rendering.stop_token_ids()]
        if stop_texts and reply.stop is None and row["finish_reason"] == "stop" and not own_end:
            return None
        cached = row["cached_tokens"] or 0
        return Generation(
            call_id=row["call_id"],
            digest=request_digest(row["dialect"], row["model"], ids_digest(prompt_ids), sampling),
            reply=reply,
            usage=Usage(row["prompt_length"], len(completion_ids), cached, num_reasoning, row["finished_at"]),
            delivered=delivered,
        )


def undamaged_calls(session_id: str, batches: Iterable[pa.RecordBatch]) -> tuple[list[Row], bool]:
    """Return the undamaged rows of a session, each call once, parents first, and True when there are damaged ones."""
    rows: dict[str, Row] = {}
    damaged = False
    for batch in batches:
        for number in range(batch.num_rows):
            if (row := undamaged(batch.slice(number, 1), CALL_SCHEMA)) is not None:
                rows.setdefault(row["call_id"], row)
            else:
                damaged = True
                logger.warning("session %s: the row of a call is damaged and not continued", session_id)
    return parents_first(rows), damaged


def undamaged(batch: pa.RecordBatch, schema: pa.Schema) -> Row | None:
    """Return the row of a batch of one, or None when it is not what was committed."""
    try:
        (row,) = batch_rows(batch)
    except RunError:  # a value that Python does not have
        return None
    return row if row_digest(row, schema) == row[DIGEST] else None


def _last_version(rows: Iterable[Row]) -> str | None:
    """Return the weights of the last token of the newest call that has one."""
    for row in sorted(rows, key=lambda row: row["started_at"], reverse=True):
        for span in reversed(row["weight_versions"] or []):
            if span["end"] > span["start"]:
                version: str = span["version"]
                return version
    return None
