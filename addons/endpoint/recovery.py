"""Recovery: a session's state from the rows of its run, after a restart or when it was dropped.

recovered = recovery.recover(session_id)  # at its first call here, or after it was dropped
if recovered.ended: ...                   # refuse with 410
recovered.index(dialect.NAME, model_call.echo_rule)
prompt = recovered.conversations.prompt(model_call)
find_retried(recovered.calls, request_digest(...), headers)
"""

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.dialects.call import EchoRule, ModelCall, Reply, Usage
from rolltap.addons.dialects.openai_responses.stored import NAMING_API, StoredCall
from rolltap.addons.endpoint.budget import Used
from rolltap.addons.endpoint.generation import REMEMBERED, Generation
from rolltap.addons.endpoint.request import request_digest
from rolltap.addons.endpoint.roles import PastCall, SessionRoles
from rolltap.addons.errors import RunError
from rolltap.addons.prompts.conversations import Conversations, ids_digest
from rolltap.addons.prompts.history import Turn
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.index import SessionIndex, Skip, TableScan
from rolltap.addons.store.records import CALL_SCHEMA, DIGEST, Event, utc_now
from rolltap.addons.store.rows import Row, row_digest
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.tables import RunWriter, batch_rows

logger = logging.getLogger(__name__)


class RunCalls:
    """The calls of a run, by session. Thread-safe. It reads each commit once, at a `refresh`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._index: SessionIndex | None = None

    def refresh(self, skip: Skip = None) -> None:
        """Add what was committed since. Raises `OSError` and `RunError`."""
        with self._lock:
            if self._index is None:
                self._index = SessionIndex(self._run, "calls", skip)
            else:
                self._index.refresh(skip)

    def rows(self, session_id: str) -> tuple[dict[str, Row], bool]:
        """Return call id -> row, for the undamaged rows of a session as of the last `refresh`.

        Also return True when there are damaged ones: they are left out with a warning. Raises
        `OSError`.
        """
        with self._lock:
            assert self._index is not None, "`refresh` comes first"
            batches = list(self._index.batches(session_id))
            self._index.close()
        rows: dict[str, Row] = {}
        damaged = False
        for batch in batches:
            for number in range(batch.num_rows):
                row = _undamaged(batch.slice(number, 1))
                if row is None:
                    damaged = True
                    what = "the row of a call is damaged and not continued"
                    logger.warning("session %s: %s", session_id, what)
                else:
                    rows.setdefault(row["call_id"], row)
        return rows, damaged


def _undamaged(batch: pa.RecordBatch) -> Row | None:
    """Return the row of a batch of one, or None when it is not what was committed."""
    try:
        (row,) = batch_rows(batch)
    except RunError:  # a value that Python does not have
        return None
    if row_digest(row, CALL_SCHEMA) != row[DIGEST]:
        return None
    return row


def parents_first(rows: dict[str, Row]) -> list[Row]:
    """Return rows in their order but each parent first: the clocks of writers may differ."""
    ordered: dict[str, Row] = {}
    for own in rows.values():
        row: Row | None = own
        path: dict[str, Row] = {}
        while row is not None and row["call_id"] not in ordered and row["call_id"] not in path:
            path[row["call_id"]] = row
            row = rows.get(row["parent_id"])
        for call_id in reversed(path):
            ordered[call_id] = path[call_id]
    return list(ordered.values())


def readable_calls(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of calls whose prompts can be rebuilt, with decoded JSON.

    `reply` is None for a call that did not complete. Each parent must come first. The other calls
    are left out with a warning.
    """
    found: dict[str | None, Row] = {}
    for row in rows:
        try:
            _decode(row, found.get(row["parent_id"]))
        except (ValueError, TypeError, RecursionError) as error:
            leave_out(row, str(error))
        else:
            found[row["call_id"]] = row
            yield row


def _decode(row: Row, parent: Row | None) -> None:
    """Decode the JSON of a row. Raises `ValueError` if its prompt cannot be rebuilt, and others."""
    prefix = 0
    if parent is not None:
        prefix = parent["prompt_length"] + len(parent["completion_ids"])
    if row["parent_id"] is not None and (parent is None or parent["reply"] is None):
        raise ValueError(f"its parent {row['parent_id']} cannot be read")
    length = row["prompt_length"]
    if length != prefix + len(row["prompt_tail_ids"]):
        raise ValueError(f"its prompt has {length} tokens, but fewer or more can be rebuilt")
    if parent is not None and row["tools"] is None:
        row["tools"] = parent["tools"]
    else:
        row["tools"] = json.loads(row["tools"])
    row["messages"] = json.loads(row["messages"])
    row["sampling"] = json.loads(row["sampling"])
    if row["status"] != "completed":
        row["reply"] = None
        return
    row["reply"] = json.loads(row["reply"])
    if row["reply"] is None:
        raise ValueError("it has no reply")


def leave_out(row: Row, why: str) -> None:
    """Warn that a call is not taken from its row."""
    where = f"session {row['session_id']}: call {row['call_id']}"
    logger.warning("%s cannot be continued after a restart: %s", where, why)


_NOT_A_RECORDERS = KeyError, TypeError, AttributeError, ValueError, RecursionError
"""Errors of reading messages that no recorder wrote."""


class Recovery:
    """Rebuilds sessions from the run that `writer` appends to. One for each recorder process.

    Thread-safe. It reads the session ids of the run once. After that it reads only what other
    writers have committed since; what this process has committed only for a session that it has
    recovered before. Call it in a worker thread.
    """

    def __init__(self, writer: RunWriter, rendering: Rendering) -> None:
        self.writer = writer
        self.rendering = rendering
        self.calls = RunCalls(writer.run)
        self.started = utc_now()
        self._lock = threading.Lock()
        """Guards all below."""
        self._recovered: set[str] = set()
        self._ended: set[str] = set()
        """Ids of sessions with an event `ended` or a row."""
        self._events = TableScan(writer.run, "events")
        self._sessions = TableScan(writer.run, "sessions")

    def load(self) -> None:
        """Read the session ids of the run: 50 µs a call that is not compacted.

        Raises `OSError` and `RunError`.
        """
        own = self.writer.owns
        self.calls.refresh(own)
        with self._lock:
            for new in self._events.new(own):
                for _, batch in new.batches:
                    self._add_ended(batch.filter(pc.equal(batch.column("kind"), "ended")))
            for new in self._sessions.new(own):
                for _, batch in new.batches:
                    self._add_ended(batch)

    def _add_ended(self, rows: pa.RecordBatch) -> None:
        self._ended.update(rows.column("session_id").drop_null().to_pylist())

    def has_ended(self, session_id: str) -> bool:
        """Return True for a session that has ended, as far as it is known without reading."""
        return session_id in self._ended

    def end(self, session_id: str) -> None:
        """Commit that a session has ended.

        Raises `OSError`; the session has ended in this process even then.
        """
        with self._lock:
            self._ended.add(session_id)
        self.writer.add_event(Event(kind="ended", session_id=session_id))

    def recover(self, session_id: str) -> "RecoveredSession":
        """Return the state of a session as its rows have it; empty for a session without rows.

        Raises as `load`, also for damaged options of the session.
        """
        self.load()
        with self._lock:
            ended = session_id in self._ended
            again = session_id in self._recovered
            self._recovered.add(session_id)
        if again:
            self.calls.refresh()
        given = SessionOptions.read(self.writer.run, session_id)
        recovered = RecoveredSession(self, self.calls, session_id, given)
        recovered.ended = ended
        return recovered


class RecoveredSession:
    """A session's state. Not thread-safe: one worker at a time.

    It can be dropped whenever no generation runs.
    """

    again = False
    """True for one of a rerun, which cannot be dropped: no row has which calls have answered."""

    def __init__(
        self,
        recovery: Recovery,
        run_calls: RunCalls,
        session_id: str,
        given: SessionOptions,
    ) -> None:
        self.ended = False
        """True when the session has ended: an event `ended`, or a row in `sessions`."""
        self.given = given
        """Options of this session alone."""
        self.has_rows = True
        """False once it is known that the session had no rows: `index` is not needed."""
        self.conversations = Conversations(recovery.rendering)
        self.calls: list[Generation] = []
        """The calls that run, and the newest completed ones, oldest first.

        Known after `index`, as all below.
        """
        self.stored: dict[str, StoredCall] = {}
        """Call id -> a completed call that a request can name."""
        self.roles = SessionRoles()
        self.last_version: str | None = None
        """The weights that sampled the last token of the session's newest call that has one."""
        self.used = Used()
        """The use of the budgets by the earlier calls of the session."""
        self._recovery = recovery
        self._run_calls = run_calls
        self._session_id = session_id
        self._indexed: set[tuple[str, EchoRule | None]] = set()
        self._recovered: set[str] | None = None
        """Ids of the calls that were recorded before; None before `index`."""

    def index(self, dialect: str, rule: EchoRule | None = None) -> None:
        """Make the recorded calls findable for a request of an API, with the rule of its harness.

        Reads the session's rows for the first request. The rule with which a harness's echoes are
        compared (`ModelCall.echo_rule`) is not recorded. The calls of the request's API are taken
        to have its rule, those of other APIs none. A later request with another rule reads the rows
        again. Calls whose ancestors are missing or damaged are left out with a warning. Raises
        `OSError`.
        """
        if (dialect, rule) in self._indexed:
            return
        rows, damaged = self._rows()
        first = self._recovered is None
        if self._recovered is None:
            self._recovered = {row["call_id"] for row in rows}
            self.has_rows = bool(rows)
        rows = [row for row in rows if row["call_id"] in self._recovered]
        calls = list(readable_calls(rows))
        if damaged or len(calls) < len(rows):
            self.conversations.history.incomplete = True
        past: list[PastCall] = []
        restored: list[tuple[Row, Turn]] = []
        completed: dict[str | None, StoredCall] = {}
        indexed = {(dialect, rule)}
        for row in calls:
            own_rule = None
            if row["dialect"] == dialect:
                own_rule = rule
            key = row["dialect"], own_rule
            indexed.add(key)
            if key in self._indexed:
                continue
            request = self.request(row, own_rule)
            try:
                if first:
                    past.append(self._past(row, request))
                if row["reply"] is not None:
                    restored.append((row, self._restore(row, request)))
                    if first:
                        self._name(row, completed)
            except _NOT_A_RECORDERS as error:
                self.conversations.history.incomplete = True
                leave_out(row, f"its messages are not those of a recorder ({error!r})")
        self._indexed |= indexed
        if first:
            self.roles.restore(past)
            self.last_version = _last_version(rows)
            self.used = Used.of(rows)
            self._remember(restored, rows)

    def request(self, row: Row, rule: EchoRule | None) -> ModelCall:
        """Return the request of a call with only the new messages, of a harness with this rule."""
        return ModelCall(
            row["model"],
            row["messages"],
            row["tools"],
            echo_rule=rule,
            again=self.again,
        )

    def finished_call(self, row: Row, turn: Turn, *, delivered: bool) -> Generation | None:
        """Return the call as it can be given again; None if that is not exactly its reply."""
        sampling = row["sampling"]
        rendering = self._recovery.rendering
        prompt_ids = turn.prompt_ids()
        completion_ids = turn.completion_ids.tolist()
        stop_texts = sampling.get("stop") or ()
        sampled, num_reasoning = rendering.read(
            prompt_ids,
            completion_ids,
            row["tools"],
            stop_texts,
        )
        reply = Reply.of_message(row["reply"], row["finish_reason"])
        reply.stop = sampled.stop
        by_token = not set(rendering.stop_token_ids).isdisjoint(completion_ids[-1:])
        unread_stop = row["finish_reason"] == "stop" and reply.stop is None and not by_token
        if stop_texts and unread_stop:
            return None
        usage = Usage(
            prompt=row["prompt_length"],
            completion=len(completion_ids),
            cached=row["cached_tokens"] or 0,
            reasoning=num_reasoning,
            ended=row["finished_at"],
        )
        digest = request_digest(row["dialect"], row["model"], ids_digest(prompt_ids), sampling)
        return Generation(row["call_id"], digest, usage, reply, delivered=delivered)

    def _rows(self) -> tuple[list[Row], bool]:
        """Return the session's rows, each parent first, and True when there are damaged ones."""
        rows, damaged = self._run_calls.rows(self._session_id)
        return parents_first(rows), damaged

    def _past(self, row: Row, request: ModelCall) -> PastCall:
        sampled_by = row["parent_id"]
        if row["kind"] == "rendered":
            sampled_by = self.conversations.sampled_by(request)
        return PastCall(row, request, sampled_by)

    def _restore(self, row: Row, request: ModelCall) -> Turn:
        """Let later requests continue a completed call."""
        parent_id = row["parent_id"]
        return self.conversations.restore(
            row["call_id"],
            None if parent_id is None else self.conversations.history.turns[parent_id],
            row["prompt_tail_ids"],
            row["completion_ids"],
            request,
            row["reply"],
            row["kind"],
        )

    def _name(self, row: Row, completed: dict[str | None, StoredCall]) -> None:
        """Let later requests name a completed call. `completed` has its parent, of any API.

        Calls of other APIs cannot be named: they are kept only while a later call has them.
        """
        call = StoredCall(
            call_id=row["call_id"],
            parent=completed.get(row["parent_id"]),
            messages=row["messages"],
            reply=row["reply"],
            asked=row["sampling"].get("asked", {}),
        )
        completed[call.call_id] = call
        if row["dialect"] == NAMING_API:
            self.stored[call.call_id] = call

    def _remember(self, restored: list[tuple[Row, Turn]], rows: list[Row]) -> None:
        """Let retries get the newest completed calls."""
        started = self._recovery.started
        last_start = max((row["started_at"] for row in rows), default=started)
        for row, turn in restored[-REMEMBERED:]:
            finished_at = row["finished_at"] or started
            lost = last_start <= finished_at < started
            call = self.finished_call(row, turn, delivered=not lost)
            if call is not None:
                self.calls.append(call)


def _last_version(rows: Iterable[Row]) -> str | None:
    """Return the weights of the last token of the newest call that has one."""
    for row in sorted(rows, key=itemgetter("started_at"), reverse=True):
        for span in reversed(row["weight_versions"] or []):
            if span["end"] > span["start"]:
                version: str = span["version"]
                return version
    return None
