"""Reading a run folder: its calls with full prompts, and its sessions.

A row whose digest does not match was changed after it was written. It is read and marked, so that nothing is trained on
it: its call and those that continue it get a violation, its session loses the reward.

`SessionReader` reads sessions, and `SessionRows` single columns, also while the run is being recorded.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rolltap.addons.errors import RunError
from rolltap.addons.store.records import CALL_SCHEMA, DIGEST, SESSION_JSON, SESSION_SCHEMA, Call, Session, VersionSpan
from rolltap.addons.store.rewards import make_session
from rolltap.addons.store.rows import FIRST_VERSION_COLUMNS, Row, first_version, row_digest
from rolltap.addons.store.sessions import SessionIndex
from rolltap.addons.store.tables import batch_rows, read_rows
from rolltap.trainer.traces.routing import Experts
from rolltap.trainer.traces.scores import RecordedScores
from rolltap.trainer.traces.tokens import Tokens
from rolltap.trainer.traces.tree import parents_first, start_order

logger = logging.getLogger(__name__)

CHANGED = "its row was changed after it was written"
"""Violation of a call, and error of a session, whose digest does not match."""
_STORED_OTHERWISE = ("prompt_length", "prompt_tail_ids", DIGEST)


class RecordedRouting:
    """The experts of a run's tokens, read from the disk when they are asked for. Not thread-safe."""

    def __init__(self, run: Path) -> None:
        """Raises `RunError` when the folder cannot be read."""
        self._index = SessionIndex(run, "routing")

    def of(self, session_id: str) -> dict[str, Experts]:
        """Return call id -> the experts of the call's tokens, for the calls that have them.

        Rows whose digest does not match are left out, as are those that say that the experts are missing.
        """
        found: dict[str, Experts] = {}
        for row in self._index.sound_rows(session_id):
            if row["missing"] is None:
                experts = np.frombuffer(row["experts"], f"<u{row['expert_bytes']}")
                chosen = experts.reshape(-1, row["layers"], row["top_k"])
                found[row["call_id"]] = Experts(row["first"], chosen)
        self._index.close()
        return found

    def refresh(self) -> None:
        """Add what was committed since. Raises `OSError`."""
        self._index.refresh()


@dataclass(slots=True, kw_only=True)
class RecordedSession:
    """A session as it is in the run folder."""

    session_id: str
    session: Session | None
    """The session's row that counts; None when only its calls were recorded."""
    calls: list[Call] = field(repr=False)
    """Calls in the order of `started_at`, each with its full prompt as `Tokens`, which share their prefixes."""
    routing: RecordedRouting | None = field(default=None, repr=False)
    scores: RecordedScores | None = field(default=None, repr=False)
    """The experts, and the scores, of its run's tokens; None if they are not asked for."""


class SessionReader:
    """The sessions of a run, each of which is read from the disk when it is asked for. Not thread-safe.

    It knows what was committed when it was built, and at the last `refresh`. Each commit is read once for that. So a
    session costs what its own rows cost, however many others the run has.

    `routing` and `scores` are those of the run that its sessions are given. Raises `RunError` when the folder cannot be
    read.
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
        self._rows = SessionIndex(run, "sessions")

    def refresh(self) -> None:
        """Add what was committed since. Raises `OSError`, and as `RecordedScores`."""
        for part in (self._calls, self._rows, self.routing, self.scores):
            if part is not None:
                part.refresh()

    @property
    def session_ids(self) -> list[str]:
        """Ids of the sessions, in the order of the first commits of their calls; those without calls at the end."""
        known = dict.fromkeys([*self._calls.session_ids, *self._rows.session_ids])
        return [session_id for session_id in known if session_id is not None]

    def count_calls(self, session_id: str) -> int:
        """Return the number of a session's calls."""
        return self._calls.count(session_id)

    def read(self, session_id: str) -> RecordedSession:
        """Return a session; one that is not in the run has no calls and no row. Marks and raises as `rebuild_calls`."""
        calls = rebuild_calls(self.run, session_id, self._calls.batches(session_id))
        session = _counting_rows(self.run, self._rows.rows(session_id)).get(session_id)
        return RecordedSession(
            session_id=session_id,
            session=session,
            calls=calls,
            routing=self.routing,
            scores=self.scores,
        )

    def sessions(self, session_ids: Collection[str] | None = None) -> Iterator[RecordedSession]:
        """Yield the sessions in the order of their first commits; with `session_ids`, only those of these ids.

        Holds the calls of one session in memory. Raises as `read`.
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
        self._rows.close()


def iter_sessions(run: Path, sessions: Collection[str] | None = None) -> Iterator[RecordedSession]:
    """Yield every session of a run as `SessionReader.sessions` does; with `sessions`, only those of these ids."""
    yield from SessionReader(run).sessions(sessions)


def recorded_ids(run: Path) -> set[str]:
    """Return the ids of the sessions that `iter_sessions` yields, without reading their tokens. Raises `RunError`."""
    return set(SessionReader(run).session_ids)


def load_sessions(run: Path) -> dict[str, Session]:
    """Return session id -> the row that counts: the one of the highest revision, of several the last.

    One whose digest does not match has no reward, and says why in `error`; the log has a warning. Raises `RunError`
    when the folder cannot be read.
    """
    return _counting_rows(run, read_rows(run, "sessions"))


def _counting_rows(run: Path, rows: Iterable[Row]) -> dict[str, Session]:
    sessions: dict[str, Session] = {}
    changed: set[str] = set()
    take_session_rows(rows, sessions, changed)
    if changed:
        which = f"the rows of {len(changed)} sessions were changed after they were written"
        logger.warning(
            "%s: %s (%s, ...): their rewards are not used; see `rolltap verify`",
            run,
            which,
            min(changed),
        )
    return sessions


def take_session_rows(rows: Iterable[Row], sessions: dict[str, Session], changed: set[str]) -> None:
    """Add rows to `sessions`, session id -> the row that counts; to `changed`, the ids of those changed since."""
    for row in rows:
        session = make_session(row)
        known = sessions.get(session.session_id)
        if known is None or session.revision >= known.revision:
            sessions[session.session_id] = session
            changed.discard(session.session_id)
            if row[DIGEST] != row_digest(row, SESSION_SCHEMA):
                broken: dict[str, Any] = {}
                for name in SESSION_JSON:
                    if not isinstance(getattr(session, name), dict):
                        broken[name] = {}
                unrewarded = replace(session, reward=None, error=CHANGED, **broken)
                sessions[session.session_id] = unrewarded
                changed.add(session.session_id)


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

    It holds the sessions whose calls were committed when it was built, in the order of their first commits. Marks and
    raises as `rebuild_calls`.
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
        return (session_id for session_id in self._index.session_ids if session_id is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
        """Return the weights that sampled the first token of a session's calls, or None without one. Raises as `of`."""
        return first_version(self.of("calls", session_id, FIRST_VERSION_COLUMNS))


def rebuild_calls(
    run: Path, session_id: str, batches: Iterator[pa.RecordBatch], *, check_digests: bool = True
) -> list[Call]:
    """Return the calls of one session from its rows, in the order of `started_at`, each with its full prompt.

    A call whose prompt cannot be rebuilt has `violation` set, and as its prompt only the tail that was stored. Reasons
    are a parent that is missing, lengths that disagree and a prompt without tokens. With `check_digests`, calls whose
    digest does not match, and those whose prompts continue theirs, have `violation` set too, and the log has a warning.
    Raises `RunError` when a call is recorded twice.
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
    calls: dict[str, Call] = {}
    changed: dict[str, str] = {}
    if check_digests:
        for call_id, row in rows.items():
            if row[DIGEST] != row_digest(row, CALL_SCHEMA):
                changed[call_id] = CHANGED
    if changed:
        which = f"{len(changed)} rows of session {session_id} were changed after they were written"
        named = ", ".join(changed)
        logger.warning("%s: %s (call %s): not trained on; see `rolltap verify`", run, which, named)
    parents = {call_id: row["parent_id"] for call_id, row in rows.items()}
    for call_id, parent_id in parents_first(parents):
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
    prefix_length = row["prompt_length"] - len(tail)
    known = 0
    if parent and prefix_length:
        known = len(parent.prompt_ids) + len(parent.completion_ids)
    violation = None
    if row["parent_id"] is not None and parent is None:
        violation = f"parent {row['parent_id']} is not in the run"
    elif known != prefix_length:
        rebuilt = known + len(tail)
        violation = f"the prompt has {row['prompt_length']} tokens, but {rebuilt} can be rebuilt"
    elif not row["prompt_length"] and row["completion_ids"]:
        violation = "its prompt has no token, so that nothing gives its first one a probability"
    prompt_ids = Tokens(tail)
    if parent is not None and known and violation is None:
        assert isinstance(parent.prompt_ids, Tokens)
        prompt_ids = Tokens(parent.completion_ids + tail, parent.prompt_ids)
    fields = {name: row[name] for name in CALL_SCHEMA.names if name not in _STORED_OTHERWISE}
    fields |= {
        "prompt_ids": prompt_ids,
        "prefix_length": prefix_length if violation is None else 0,
        "logprobs": row["logprobs"] or [],
        "weight_versions": [VersionSpan(**span) for span in row["weight_versions"] or []],
        "violation": row["violation"] or violation,
    }
    return Call(**fields)
