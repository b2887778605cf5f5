"""Reading a run folder: its calls with full prompts, and its sessions.

A row whose digest does not match was changed after it was written. It is read and marked, so that
nothing is trained on it: its call and those that continue it get a violation, its session loses the
reward.

`SessionReader` reads sessions, `SessionTable` their rows alone, and `SessionRows` single columns,
also while the run is being recorded. Each reads a commit once.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.errors import RunError
from rolltap.addons.store.index import SessionIndex, TableScan
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import (
    CALL_SCHEMA,
    DIGEST,
    SESSION_JSON,
    SESSION_SCHEMA,
    Call,
    Session,
    VersionSpan,
)
from rolltap.addons.store.rewards import make_session
from rolltap.addons.store.rows import FIRST_VERSION_COLUMNS, Row, first_version, row_digest
from rolltap.addons.store.tables import batch_rows
from rolltap.trainer.traces.routing import RecordedRouting
from rolltap.trainer.traces.scores import RecordedScores
from rolltap.trainer.traces.tokens import Tokens
from rolltap.trainer.traces.tree import parents_first, start_order

logger = logging.getLogger(__name__)

CHANGED = "its row was changed after it was written"
"""Violation of a call, and error of a session, whose digest does not match."""
_STORED_OTHERWISE = ("prompt_length", "prompt_tail_ids", DIGEST)


class SessionTable:
    """The rows of a run's sessions. Reads each commit once, at a `refresh`, from any thread.

    Attributes:
        rows: Session id -> the row that counts: the one of the highest revision, of several the
            last. One whose digest does not match has no reward, and says why in `error`.
        changed: Ids of the sessions whose digest does not match.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.scan = TableScan(run, "sessions")
        self.rows: dict[str, Session] = {}
        self.changed: set[str] = set()
        self._lock = threading.Lock()

    def refresh(self) -> dict[str, Session]:
        """Add what was committed since, with a warning for changed rows, and return the rows.

        Raises `OSError`, and `RunError` when the folder cannot be read.
        """
        read_metadata(self.run)
        with self._lock:
            known = set(self.changed)
            for segment in self.scan.new():
                for _, batch in segment.batches:
                    for row in batch_rows(batch):
                        self._take(row)
            new = self.changed - known
        if new:
            logger.warning(
                "%s: the rows of %d sessions were changed after they were written (%s, ...): "
                "their rewards are not used; see `rolltap verify`",
                self.run,
                len(new),
                min(new),
            )
        return self.rows

    def _take(self, row: Row) -> None:
        session = make_session(row)
        name = session.session_id
        if name in self.rows and self.rows[name].revision > session.revision:
            return
        self.rows[name] = session
        self.changed.discard(name)
        if row[DIGEST] != row_digest(row, SESSION_SCHEMA):
            self.changed.add(name)
            session.reward = None
            session.error = CHANGED
            for column in SESSION_JSON:
                if not isinstance(getattr(session, column), dict):
                    setattr(session, column, {})


def load_sessions(run: Path) -> dict[str, Session]:
    """Return session id -> the row that counts, as `SessionTable` has it.

    Raises `RunError` when the folder cannot be read.
    """
    return SessionTable(run).refresh()


@dataclass(slots=True, kw_only=True)
class RecordedSession:
    """A session as it is in the run folder."""

    session_id: str
    session: Session | None
    """The session's row that counts; None when only its calls were recorded."""
    calls: list[Call] = field(repr=False)
    """Calls in the order of their starts, each with its full prompt as `Tokens`."""
    routing: RecordedRouting | None = field(default=None, repr=False)
    scores: RecordedScores | None = field(default=None, repr=False)
    """The experts, and the scores, of its run's tokens; None if they are not asked for."""


class SessionReader:
    """The sessions of a run. The calls of each are read when it is asked for. Not thread-safe.

    It knows what was committed when it was built, and at the last `refresh`. Each commit is read
    once for that. So a session costs what its own rows cost, however many others the run has.

    `routing` and `scores` are those of the run that its sessions are given. Raises `RunError` when
    the folder cannot be read.
    """

    def __init__(
        self,
        run: Path,
        *,
        routing: RecordedRouting | None = None,
        scores: RecordedScores | None = None,
    ) -> None:
        self.run = run
        self.routing = routing
        self.scores = scores
        self._calls = SessionIndex(run, "calls")
        self._table = SessionTable(run)
        self._table.refresh()

    def refresh(self) -> None:
        """Add what was committed since. Raises `OSError`."""
        for part in (self._calls, self._table, self.routing, self.scores):
            if part is not None:
                part.refresh()

    @property
    def session_ids(self) -> list[str]:
        """Ids of the sessions, in the order of the first commits of their calls.

        Those without calls are at the end.
        """
        return list(dict.fromkeys([*session_ids(self._calls), *self._table.rows]))

    def count_calls(self, session_id: str) -> int:
        """Return the number of a session's calls."""
        return self._calls.count(session_id)

    def read(self, session_id: str) -> RecordedSession:
        """Return a session; one that is not in the run has no calls and no row.

        Marks and raises as `rebuild_calls`.
        """
        return RecordedSession(
            session_id=session_id,
            session=self._table.rows.get(session_id),
            calls=rebuild_calls(self.run, session_id, self._calls.batches(session_id)),
            routing=self.routing,
            scores=self.scores,
        )

    def sessions(self, session_ids: Collection[str] | None = None) -> Iterator[RecordedSession]:
        """Yield the sessions in the order of their first commits.

        With `session_ids`, only those of these ids. Holds the calls of one session in memory.
        Raises as `read`.
        """
        try:
            for session_id in self.session_ids:
                if session_ids is None or session_id in session_ids:
                    yield self.read(session_id)
        finally:
            self.close()

    def close(self) -> None:
        """Close the files. The next session that is read opens them again."""
        self._calls.close()


def iter_sessions(run: Path, sessions: Collection[str] | None = None) -> Iterator[RecordedSession]:
    """Yield every session of a run, or those of the ids `sessions`, as `SessionReader.sessions`."""
    yield from SessionReader(run).sessions(sessions)


def recorded_ids(run: Path) -> set[str]:
    """Return the ids of the sessions that `iter_sessions` yields, without reading their rows.

    Raises `RunError`.
    """
    return set(session_ids(SessionIndex(run, "calls"), SessionIndex(run, "sessions")))


def session_ids(*tables: SessionIndex) -> list[str]:
    """Return the ids of the sessions with rows in some tables, table by table, each id once.

    In a table they are in the order of their first rows.
    """
    found: dict[str, None] = {}
    for table in tables:
        for session_id in table.session_ids:
            if session_id is not None:
                found[session_id] = None
    return list(found)


def unknown_session(session_id: str, calls: Sequence[Call]) -> Session:
    """Return the session of calls without a row. `calls` are in the order of their starts."""
    ends = [call.finished_at for call in calls if call.finished_at is not None]
    return Session(
        session_id=session_id,
        status="unknown",
        started_at=calls[0].started_at,
        finished_at=max(ends, default=None),
    )


class RecordedCalls(Mapping[str, list[Call]]):
    """The calls of a run: session id -> its calls, read from the disk at each access.

    It holds the sessions whose calls were committed when it was built, in the order of their first
    commits. Marks and raises as `rebuild_calls`.
    """

    def __init__(self, run: Path) -> None:
        """Raises `RunError` when the folder cannot be read."""
        self._run = run
        self._index = SessionIndex(run, "calls")

    def __repr__(self) -> str:
        return f"RecordedCalls({str(self._run)!r})"

    def __getitem__(self, session_id: str) -> list[Call]:
        if session_id not in self._index:
            raise KeyError(session_id)
        return rebuild_calls(self._run, session_id, self._index.batches(session_id))

    def __contains__(self, session_id: object) -> bool:
        return session_id is not None and session_id in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(session_ids(self._index))

    def __len__(self) -> int:
        return len(session_ids(self._index))


class SessionRows:
    """The rows of each session of a run. Reads each commit once. Thread-safe."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._indexes: dict[str, SessionIndex] = {}

    def of(self, table: str, session_id: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return the values of some columns of the session's rows.

        Raises `RunError` and `OSError` when the folder cannot be read.
        """
        rows: list[tuple[Any, ...]] = []
        with self._lock:
            if table in self._indexes:
                self._indexes[table].refresh()
            else:
                self._indexes[table] = SessionIndex(self._run, table)
            index = self._indexes[table]
            for batch in index.batches(session_id, columns):
                rows += zip(*batch.to_pydict().values(), strict=True)
            index.close()
        return rows

    def first_version(self, session_id: str) -> str | None:
        """Return the weights that sampled the first token of a session, or None without one.

        Raises as `of`.
        """
        return first_version(self.of("calls", session_id, FIRST_VERSION_COLUMNS))


def rebuild_calls(
    run: Path,
    session_id: str,
    batches: Iterable[pa.RecordBatch],
    *,
    check_digests: bool = True,
) -> list[Call]:
    """Return the calls of one session from its rows, each with its full prompt, as they started.

    A call whose prompt cannot be rebuilt has `violation` set, and as its prompt only the tail that
    was stored. Reasons are a parent that is missing, lengths that disagree and a prompt without
    tokens. With `check_digests`, calls whose digest does not match, and those whose prompts
    continue theirs, have `violation` set too, and the log has a warning. Raises `RunError` when a
    call is recorded twice.
    """
    rows: dict[str, Row] = {}
    for batch in batches:
        for row in batch_rows(batch):
            if row["call_id"] in rows:
                raise RunError(
                    f"{run} holds call {row['call_id']} of session {session_id} twice: "
                    "remove the calls-*.arrow file that is a copy of another"
                )
            rows[row["call_id"]] = row
    changed: dict[str, str] = {}
    if check_digests:
        for call_id, row in rows.items():
            if row[DIGEST] != row_digest(row, CALL_SCHEMA):
                changed[call_id] = CHANGED
    if changed:
        which = f"{len(changed)} rows of session {session_id} were changed after they were written"
        named = ", ".join(changed)
        logger.warning("%s: %s (call %s): not trained on; see `rolltap verify`", run, which, named)
    calls: dict[str, Call] = {}
    for call_id, parent_id in parents_first({name: row["parent_id"] for name, row in rows.items()}):
        parent = None
        if parent_id is not None:
            parent = calls[parent_id]
        call = _call(rows[call_id], parent)
        if parent_id in changed and call.prefix_length:
            why = f"its prompt continues call {parent_id}, whose row was changed"
            changed.setdefault(call_id, why)
        call.violation = call.violation or changed.get(call_id)
        calls[call_id] = call
    return sorted(calls.values(), key=start_order)


def _call(row: Row, parent: Call | None) -> Call:
    tail: list[int] = row["prompt_tail_ids"]
    length: int = row["prompt_length"]
    prefix_length = length - len(tail)
    prompt_ids = Tokens(tail)
    if parent is not None and prefix_length:
        assert isinstance(parent.prompt_ids, Tokens)
        prompt_ids = Tokens(parent.completion_ids + tail, parent.prompt_ids)
    violation = None
    if row["parent_id"] is not None and parent is None:
        violation = f"parent {row['parent_id']} is not in the run"
    elif len(prompt_ids) != length:
        violation = f"the prompt has {length} tokens, but {len(prompt_ids)} can be rebuilt"
    elif not length and row["completion_ids"]:
        violation = "its prompt has no token, so that nothing gives its first one a probability"
    if violation is not None:
        prompt_ids = Tokens(tail)
        prefix_length = 0
    fields = {name: row[name] for name in CALL_SCHEMA.names if name not in _STORED_OTHERWISE}
    fields |= {
        "prompt_ids": prompt_ids,
        "prefix_length": prefix_length,
        "logprobs": row["logprobs"] or [],
        "weight_versions": [VersionSpan(**span) for span in row["weight_versions"] or []],
        "violation": row["violation"] or violation,
    }
    return Call(**fields)
