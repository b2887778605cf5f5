"""Opens a run folder: its calls with full prompts, and its sessions."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from rolltap.addons.errors import RunError
from rolltap.addons.store.digest import DIGEST
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import CALL_SCHEMA, SESSION_SCHEMA, Call, Session, VersionSpan
from rolltap.addons.store.segment import SegmentReader, rows_of_session
from rolltap.addons.store.tables import TABLES, batch_rows, read_batches, read_rows, run_files
from rolltap.trainer.traces.tokens import Tokens
from rolltap.trainer.traces.tree import parents_first, start_order

Row = dict[str, Any]

OPEN_FILES = 64
"""Segments that are mapped at the same time."""
_STORED_OTHERWISE = ("prompt_length", "prompt_tail_ids", DIGEST)


@dataclass(slots=True, kw_only=True)
class RecordedSession:
    """A session as it stands in the run folder."""

    session_id: str
    session: Session | None
    """None when only its calls were recorded, by a recorder that somebody else started."""
    calls: list[Call]
    """In the order in which they started, each with its full prompt as `Tokens`, which holds only what is new in it."""


def iter_sessions(run: Path, sessions: Collection[str] | None = None) -> Iterator[RecordedSession]:
    """Every session of a run, one at a time, in the order in which they were first recorded.

    With `sessions`, only those of these session ids. Holds the calls of one session in memory, and of the others where
    they lie; a run that grows meanwhile is read as it was at the beginning. Marks and raises as `load_calls`.
    """
    known = load_sessions(run)
    with SessionIndex(run, "calls") as index:
        for session_id in dict.fromkeys([*index.session_ids, *known]):
            if session_id is not None and (sessions is None or session_id in sessions):
                calls = rebuild_calls(run, session_id, index.batches(session_id))
                yield RecordedSession(session_id=session_id, session=known.get(session_id), calls=calls)


def count_sessions(run: Path) -> int:
    """How many sessions `iter_sessions` yields, without reading their tokens. Raises `RunError`."""
    found = set(load_sessions(run))
    for batch in read_batches(run, "calls"):
        found.update(batch.column("session_id").unique().to_pylist())
    return len(found)


def load_calls(run: Path, sessions: Collection[str] | None = None) -> dict[str, list[Call]]:
    """Session id -> its calls in the order in which they started, each with its full prompt.

    With `sessions`, only those of these session ids.

    A call whose prompt cannot be rebuilt, because its parent is missing or the lengths disagree, has `violation` set
    and only the tail that was stored as its prompt. Raises `RunError` when the folder cannot be read and when a call
    is recorded twice.
    """
    return {session.session_id: session.calls for session in iter_sessions(run, sessions) if session.calls}


def load_sessions(run: Path) -> dict[str, Session]:
    """Session id -> session; the row that was written last wins. Raises `RunError` when the folder cannot be read."""
    names = [name for name in SESSION_SCHEMA.names if name != DIGEST]
    return {row["session_id"]: Session(**{name: row[name] for name in names}) for row in read_rows(run, "sessions")}


class SessionIndex:
    """Where the rows of each session lie in the segments of a table, so that one session is read without the others.

    A context manager. Raises `RunError` when the folder cannot be read.
    """

    def __init__(self, run: Path, table: str) -> None:
        read_metadata(run)
        self._paths = run_files(run, table)
        self._schema = TABLES[table]
        self._inodes = [0] * len(self._paths)
        # session id (None for rows of nobody) -> segment -> byte offsets of its batches
        self._places: defaultdict[str | None, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._open: dict[int, SegmentReader] = {}
        for number in range(len(self._paths)):
            self._scan(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for reader in self._open.values():
            reader.close()

    @property
    def session_ids(self) -> list[str | None]:
        """Sessions that have rows, in the order of their first ones."""
        return list(self._places)

    def batches(self, session_id: str | None) -> Iterator[pa.RecordBatch]:
        """The rows of one session in the order of their commits, file by file."""
        for number in sorted(self._places.get(session_id, ())):
            reader = self._reader(number)
            for offset in self._places[session_id][number]:
                yield rows_of_session(reader.read(offset), session_id)

    def _scan(self, number: int) -> None:
        with SegmentReader(self._paths[number], self._schema) as reader:
            self._inodes[number] = reader.inode
            for offset, batch in reader:
                for session_id in batch.column("session_id").unique().to_pylist():
                    self._places[session_id][number].append(offset)
            reader.warn_of_damage()

    def _reader(self, number: int) -> SegmentReader:
        if number not in self._open:
            if len(self._open) == OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            while (reader := SegmentReader(self._paths[number], self._schema)).inode != self._inodes[number]:
                # compacted since: the same rows in other places
                reader.close()
                for places in self._places.values():
                    places.pop(number, None)
                self._scan(number)
            self._open[number] = reader
        return self._open[number]


def rebuild_calls(run: Path, session_id: str, batches: Iterator[pa.RecordBatch]) -> list[Call]:
    """The calls of one session from its rows, in the order in which they started. Marks and raises as `load_calls`."""
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
    for call_id, parent_id in parents_first({call_id: row["parent_id"] for call_id, row in rows.items()}):
        calls[call_id] = _call(rows[call_id], None if parent_id is None else calls[parent_id])
    return sorted(calls.values(), key=start_order)


def _call(row: Row, parent: Call | None) -> Call:
    tail: list[int] = row["prompt_tail_ids"]
    prefix_length = row["prompt_length"] - len(tail)
    known = len(parent.prompt_ids) + len(parent.completion_ids) if parent and prefix_length else 0
    violation = None
    if row["parent_id"] is not None and parent is None:
        violation = f"parent {row['parent_id']} is not in the run"
    elif known != prefix_length:
        violation = f"the prompt has {row['prompt_length']} tokens, but {known + len(tail)} can be rebuilt"
    prompt_ids = Tokens(tail)
    if parent is not None and known and violation is None:
        assert isinstance(parent.prompt_ids, Tokens)
        prompt_ids = Tokens(parent.completion_ids + tail, parent.prompt_ids)
    fields = {name: row[name] for name in CALL_SCHEMA.names if name not in _STORED_OTHERWISE}
    fields |= {
        "prompt_ids": prompt_ids,
        "prefix_length": 0 if violation else prefix_length,
        "logprobs": row["logprobs"] or [],
        "weight_versions": [VersionSpan(**span) for span in row["weight_versions"] or []],
        "violation": row["violation"] or violation,
    }
    return Call(**fields)
