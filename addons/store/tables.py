"""The tables of a run folder: the writer of their segments, and reading them back.

Every writer process has segments of its own, so several may record into one run. Rows never move from one file to
another: a closed segment is compacted in its place.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.store.digest import DIGEST, row_digest
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import CALL_SCHEMA, EVENT_SCHEMA, SESSION_SCHEMA, Call, Event, Session
from rolltap.addons.store.segment import Segment, SegmentReader, compact

logger = logging.getLogger(__name__)

TABLES = {"calls": CALL_SCHEMA, "sessions": SESSION_SCHEMA, "events": EVENT_SCHEMA}
_ROWS = {table: pa.struct(list(schema)) for table, schema in TABLES.items()}
"""A row as one value, which pyarrow makes in half the time that it takes for a list of columns."""
_TOKEN_COLUMNS = ("prompt_tail_ids", "completion_ids", "logprobs")

Sync = Literal["never", "session", "call"]
"""When commits are brought to the disk itself (`fdatasync`). Killing a process loses none in any case; `never` may lose
those of the last seconds when the machine stops, `session` those of sessions that have not ended, `call` none."""

SEGMENT_BYTES = 64 * 1024 * 1024
"""A segment that is larger when a session ends is closed and compacted."""
ROOM_BYTES = 4 * 1024 * 1024
"""Free space without which no new call is begun: what the record of a long one takes."""


class RunWriter:
    """Appends calls, sessions and events to a run folder; one instance per process, and a context manager.

    Files appear with their first row. Raises `OSError` when a commit could not be written, in which case nothing
    of it is readable either. `sync` and `end_session` may run in other threads than the commits.
    """

    def __init__(self, run: Path, sync: Sync = "session") -> None:
        self.run = run
        self.sync_policy = sync
        self._suffix = f"{time.time_ns():x}-{os.getpid()}"
        self._segments: dict[str, Segment] = {}
        self._full: list[Segment] = []
        """Segments that take no more commits."""
        self._count = 0
        self._commits = threading.Lock()
        """Held for a commit, and whenever the segments change."""
        self._syncs = threading.Lock()
        """Held until the disk has answered: who waits for it finds his commits there too."""
        self._lost: OSError | None = None
        pa.array([0])  # the first one takes pyarrow a second, for it imports pandas: not in the middle of a call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def require_room(self) -> None:
        """Raise `OSError` unless the folder can be written and the record of another call has room on the disk."""
        if not os.access(self.run, os.W_OK):
            raise PermissionError(errno.EACCES, "the run folder cannot be written", str(self.run))
        disk = os.statvfs(self.run)
        if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
            raise OSError(errno.ENOSPC, f"less than {ROOM_BYTES >> 20} MiB are free", str(self.run))

    def add_call(self, call: Call) -> None:
        """Commit one call. With the policy `call`, `sync` has to follow."""
        row = call.to_row()
        for name in _TOKEN_COLUMNS:
            # pyarrow reads an array faster than a list, and so does the digest
            row[name] = np.array(row[name], dtype=np.float32 if name == "logprobs" else np.int32)
        self._add_row("calls", row)

    def add_session(self, session: Session) -> None:
        """Commit one session."""
        self._add_row("sessions", session.to_row())
        if self.sync_policy != "never":
            self.sync()

    def add_event(self, event: Event) -> None:
        """Commit one event."""
        self._add_row("events", event.to_row())

    def note(self, event: Event) -> None:
        """Commit one event, or log that it could not be: a full disk must not keep anybody from an answer."""
        try:
            self.add_event(event)
        except OSError as error:
            logger.error("cannot write to %s: %s", self.run, error)

    def add_batch(self, table: str, batch: pa.RecordBatch) -> None:
        """Commit rows of the table that have their digests already, together."""
        with self._commits:
            self._check()
            if table not in self._segments:
                path = self.run / f"{table}-{self._suffix}-{self._count:04}.arrow"
                self._count += 1
                self._segments[table] = Segment(path, TABLES[table])
            try:
                self._segments[table].append(batch)
            except OSError:
                if self._segments[table].size:
                    self._full.append(self._segments.pop(table))
                raise

    def sync(self) -> None:
        """Bring all commits so far to the disk; of calls at the same time, one does it for all that wait.

        Raises `OSError`, and then for every further commit: what the system could not write it forgets, and says so
        once.
        """
        with self._syncs:
            with self._commits:
                segments = [*self._full, *self._segments.values()]
            self._sync(segments)

    def end_session(self) -> None:
        """A session of this writer ended: bring it to the disk, and compact segments that have grown large.

        Raises `OSError` as `sync`.
        """
        self._close(SEGMENT_BYTES)

    def close(self) -> None:
        """Bring all to the disk, close and compact the segments. A process that cannot do this loses nothing.

        Raises `OSError` as `sync`.
        """
        self._close(0)

    def _close(self, size: int) -> None:
        """Bring all to the disk, and close and compact the segments of at least this size."""
        closed: list[Segment] = []
        try:
            with self._syncs:
                with self._commits:
                    segments = [*self._full, *self._segments.values()]
                    closed += [segment for segment in segments if segment in self._full or segment.size >= size]
                    self._segments = {table: s for table, s in self._segments.items() if s not in closed}
                    self._full = []
                if self.sync_policy != "never":
                    self._sync(segments)
        finally:
            _compact(closed)

    def _sync(self, segments: list[Segment]) -> None:
        self._check()
        for segment in segments:
            try:
                segment.sync()
            except OSError as error:
                self._lost = error
                self._check()

    def _check(self) -> None:
        if self._lost is not None:
            why = f"earlier commits may not be on the disk ({self._lost}): stop the recorder and look"
            raise OSError(errno.EIO, why, str(self.run))

    def _add_row(self, table: str, row: dict[str, Any]) -> None:
        row[DIGEST] = row_digest(row, TABLES[table])
        self.add_batch(table, pa.RecordBatch.from_struct_array(pa.array([row], _ROWS[table])))


def _compact(segments: list[Segment]) -> None:
    for segment in segments:
        try:
            if segment.size:
                compact(segment.path)
        except (OSError, pa.ArrowException) as error:
            logger.warning("%s stays as it is, in small batches: %s", segment.path, error)
        finally:
            segment.close()


def run_files(run: Path, table: str) -> list[Path]:
    """The segments of one table (`calls`, `sessions` or `events`), by the time when their writers started."""
    return sorted(run.glob(f"{table}-*.arrow"))


def read_batches(run: Path, table: str, sessions: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of one table, file by file; those of a session in the order in which a writer committed them.

    With `sessions`, only the rows of these session ids. What a crash left behind the last commit of a file is skipped;
    damage is skipped and warned of.
    """
    read_metadata(run)
    wanted = None if sessions is None else pa.array(list(sessions), pa.string())
    for path in run_files(run, table):
        with SegmentReader(path, TABLES[table]) as reader:
            for _, batch in reader:
                if wanted is not None:
                    batch = batch.filter(pc.is_in(batch.column("session_id"), wanted))
                if batch.num_rows:
                    yield batch
            reader.warn_of_damage()


def read_rows(run: Path, table: str, sessions: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of `read_batches`, one by one."""
    for batch in read_batches(run, table, sessions):
        yield from batch_rows(batch)


def batch_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch, with lists of tokens made the quick way."""
    tokens = {name: batch.column(name) for name in _TOKEN_COLUMNS if name in batch.schema.names}
    rows: list[dict[str, Any]] = batch.drop_columns(list(tokens)).to_pylist()
    for name, column in tokens.items():
        for row, values in zip(rows, column, strict=True):
            row[name] = values.values.to_numpy().tolist() if values.is_valid else None
    return rows
