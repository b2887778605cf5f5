"""The tables of a run folder: the writer of their segments, and functions that read them.

Each writer has its own segments, so that several processes can record into one run. Rows stay in
their file: a closed segment is compacted in place.
"""

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from rolltap.addons.errors import RunError
from rolltap.addons.options import Sync
from rolltap.addons.store import records
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, Event, Session
from rolltap.addons.store.routing import ROUTING_SCHEMA, Routing
from rolltap.addons.store.rows import empty_row, to_batch
from rolltap.addons.store.segment import Segment, SegmentReader, compact, place_of
from rolltap.addons.store.untrusted import ROWS, row_faults

logger = logging.getLogger(__name__)

TABLES = {
    "calls": records.CALL_SCHEMA,
    "sessions": records.SESSION_SCHEMA,
    "events": records.EVENT_SCHEMA,
    "routing": ROUTING_SCHEMA,
}
"""Name of a table -> its columns. The recorder writes these; `add_table` makes others known."""

SEGMENT_BYTES = 64 * 1024 * 1024
"""A segment of at least this size is closed and compacted when a session ends."""
ROOM_BYTES = 4 * 1024 * 1024
"""Free space in bytes that a new call requires: the record of a long call."""

MOST_LATE = 10_000
"""Number of faults that wait to be committed. Those over it are lost."""


def add_table(
    name: str,
    schema: pa.Schema,
    row: type[BaseModel],
    own_column: str,
) -> None:
    """Make a table known that no recorder writes.

    `row` is what its rows hold. No other table has a column of the name `own_column`.
    """
    TABLES[name] = schema
    ROWS[own_column] = row


class WriteOutage:
    """A time in which writes fail. Logs its begin and its end. Thread-safe."""

    def __init__(self, run: Path, what: str) -> None:
        self._run = run
        self._what = what
        """The things that fail, in the plural."""
        self._failures = 0
        self._lock = threading.Lock()

    def failed(self, error: OSError) -> None:
        """Count a failed write."""
        with self._lock:
            self._failures += 1
            if self._failures == 1:
                logger.error("cannot write to %s, until further notice: %s", self._run, error)

    def passed(self) -> None:
        """Note a write: the outage is over."""
        if not self._failures:
            return
        with self._lock:
            failures = self._failures
            self._failures = 0
        if failures:
            logger.warning("%s can be written again: %d %s", self._run, failures, self._what)


class RunWriter:
    """Appends rows to the tables of a run folder; a context manager.

    Files appear with their first row. A row is written whatever its values are, see `to_batch`. A
    commit that fails raises `OSError` and cannot be read. Thread-safe: `sync`, `end_session` and
    `close` may run in other threads than the commits.

    A commit is in the file when its method returns. It is synced with all others before it, by
    `sync_policy`:

    | policy | caller | moment |
    | --- | --- | --- |
    | `call` | `Generation._run` | a completed call is committed, its reply has not ended |
    | `call`, `session` | `add_session` | the row of a session is committed |
    | `call`, `session` | `end_session` | the recorder was told that a session has ended |
    | `call`, `session` | `close` | the writer ends |
    | `never` | nobody | the system writes back when it does |

    `Segment.sync` is the fdatasync. A file's first one syncs the folder too.
    """

    def __init__(self, run: Path, sync: Sync = "session") -> None:
        self.run = run
        self.sync_policy = sync
        self._suffix = f"{time.time_ns():x}-{os.getpid()}"
        self._segments: dict[str, Segment] = {}
        self._failed: list[Segment] = []
        """Segments whose last commit failed. They are not appended to again."""
        self._count = 0
        self._commits = threading.Lock()
        """Guards `_segments`, `_failed` and `_count`, and serialises commits."""
        self._syncs = threading.Lock()
        """Serialises fdatasync. A thread that waited skips segments without newer commits."""
        self._sync_error: OSError | None = None
        """The first error of fdatasync. All later commits and syncs raise."""
        self._no_room = WriteOutage(run, "calls were refused")
        self._late: deque[Event] = deque()
        """Faults that could not be committed."""
        self._lost = WriteOutage(run, "events and routings were lost")
        # pyarrow imports pandas at the first call, which takes a second: not during a model call
        pa.array([0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def owns(self, name: str) -> bool:
        """Return True for the name of a segment of this writer."""
        return f"-{self._suffix}-" in name

    def require_room(self) -> None:
        """Raise `OSError` unless the folder is writable and has `ROOM_BYTES` of free space.

        Logs when there is no room and when there is again, not each time.
        """
        try:
            if not os.access(self.run, os.W_OK):
                raise PermissionError(errno.EACCES, "the run folder is not writable", str(self.run))
            disk = os.statvfs(self.run)
            if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
                why = f"less than {ROOM_BYTES >> 20} MiB are free"
                raise OSError(errno.ENOSPC, why, str(self.run))
        except OSError as error:
            self._no_room.failed(error)
            raise
        self._no_room.passed()

    def add_call(self, call: Call) -> None:
        """Commit one call. Does not sync: with the policy `call` the caller does."""
        self._add_row("calls", call.to_row())

    def add_session(self, session: Session) -> None:
        """Commit one session, and sync unless the policy is `never`."""
        self._add_row("sessions", session.to_row())
        if self.sync_policy != "never":
            self.sync()

    def add_event(self, event: Event) -> None:
        """Commit one event, and the faults that could not be committed before."""
        self._add_row("events", event.to_row())
        while True:
            try:
                late = self._late.popleft()
            except IndexError:
                return
            try:
                self._add_row("events", late.to_row())
            except OSError:
                self._late.appendleft(late)
                return

    def note(self, row: Event | Routing) -> None:
        """Commit an event or a routing, unless that raises `OSError`: the reply comes all the same.

        A fault decides on a reward: it is committed later, after the next event that can be. Others
        are lost. The log says when rows begin to be lost, and how many were lost when one can be
        written again.
        """
        try:
            if isinstance(row, Event):
                self.add_event(row)
            else:
                self._add_row("routing", row.to_row())
        except OSError as error:
            may_wait = len(self._late) < MOST_LATE
            if may_wait and isinstance(row, Event) and row.kind == "fault":
                self._late.append(row)
            else:
                self._lost.failed(error)
        else:
            self._lost.passed()

    def add_batch(self, table: str, batch: pa.RecordBatch) -> None:
        """Commit a batch of rows, digest column included."""
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
                    self._failed.append(self._segments.pop(table))
                raise

    def sync(self) -> None:
        """Sync all commits so far. Concurrent calls share an fdatasync.

        Raises `OSError`. After that every commit and sync raises: the kernel reports a failed
        write-back once and may drop its pages, so that a later fdatasync would succeed without
        them.
        """
        with self._syncs:
            with self._commits:
                segments = [*self._failed, *self._segments.values()]
            self._sync(segments)

    def end_session(self) -> None:
        """Sync unless the policy is `never`; close and compact the large segments.

        Raises `OSError` as `sync` does.
        """
        self._close(SEGMENT_BYTES)

    def close(self) -> None:
        """Sync unless the policy is `never`; close and compact all segments.

        Commits are readable without `close`. Raises `OSError` as `sync` does.
        """
        self._close(0)

    def _close(self, min_bytes: int) -> None:
        closed: list[Segment] = []
        try:
            with self._syncs:
                with self._commits:
                    segments = [*self._failed, *self._segments.values()]
                    closed += self._failed
                    self._failed = []
                    for table, segment in list(self._segments.items()):
                        if segment.size >= min_bytes:
                            closed.append(self._segments.pop(table))
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
                self._sync_error = error
                self._check()

    def _check(self) -> None:
        if self._sync_error is not None:
            what = f"earlier commits may not be on the disk ({self._sync_error})"
            fix = "stop the recorder, check the disk, and run `rolltap verify`"
            raise OSError(errno.EIO, f"fdatasync failed, so that {what}: {fix}", str(self.run))

    def _add_row(self, table: str, row: dict[str, Any]) -> None:
        self.add_batch(table, to_batch(row, TABLES[table]))


def _compact(segments: list[Segment]) -> None:
    for segment in segments:
        try:
            if segment.size:
                compact(segment.path)
        except (OSError, pa.ArrowException) as error:
            what = "was not compacted and stays readable as it is"
            logger.warning("%s %s: %s", segment.path, what, error)
        finally:
            segment.close()


def run_files(run: Path, table: str) -> list[Path]:
    """Return the segments of a table, ordered by the start of their writers."""
    return sorted(run.glob(f"{table}-*.arrow"))


def read_batches(
    run: Path,
    table: str,
    sessions: Collection[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one table, file by file; with `sessions`, only those of these ids.

    Rows of a session that one writer committed are in commit order. Uncommitted tails are skipped.
    Damage is skipped with a warning. Raises `RunError` when `run` is not a run folder.
    """
    read_metadata(run)
    for path in run_files(run, table):
        with SegmentReader(path, TABLES[table]) as reader:
            for _, batch in reader:
                if sessions is not None:
                    wanted = pa.array(list(sessions), pa.string())
                    batch = batch.filter(pc.is_in(batch.column("session_id"), wanted))
                if batch.num_rows:
                    yield batch
            reader.warn_of_damage()


def read_rows(
    run: Path,
    table: str,
    sessions: Collection[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `read_batches` one by one."""
    for batch in read_batches(run, table, sessions):
        yield from batch_rows(batch)


def batch_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch.

    A value that no writer writes is read as that of an empty record, with a warning. The digest of
    such a row does not match any more. Of other tables than calls and sessions, the row is left
    out. Raises `RunError` as `checked_rows`.
    """
    rows: list[dict[str, Any]] = []
    for row, faults in checked_rows(batch):
        if faults:
            fault = named_fault(row, faults)
            logger.warning("%s: %s: see `rolltap verify`", place_of(batch), fault)
            if "messages" in row:
                empty = empty_row(records.CALL_SCHEMA)
            elif "revision" in row:
                empty = empty_row(records.SESSION_SCHEMA)
            else:
                continue
            for name in faults:
                row[name] = empty[name]
        rows.append(row)
    return rows


def named_fault(row: Mapping[str, Any], faults: Mapping[str, str]) -> str:
    """Return what is wrong with a row, which begins with its call and session."""
    call = f"call {row['call_id']} of " if row.get("call_id") is not None else ""
    return f"{call}session {row.get('session_id')}: {'; '.join(faults.values())}"


def checked_rows(batch: pa.RecordBatch) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield each row of a batch with its faults, see `row_faults`.

    Lists of numbers are converted through NumPy, which is faster than `to_pylist`. Raises
    `RunError` for a value that Python does not have, such as a year beyond 9999.
    """
    numbers = [field.name for field in batch.schema if _is_numbers(field.type)]
    try:
        rows: list[dict[str, Any]] = batch.drop_columns(numbers).to_pylist()
    except (ValueError, OverflowError) as error:
        why = f"{place_of(batch)}: a row cannot be read ({error})"
        raise RunError(f"{why}: see `rolltap verify`") from error
    for name in numbers:
        for row, values in zip(rows, batch.column(name), strict=True):
            whole = values.is_valid and not values.values.null_count
            row[name] = values.values.to_numpy().tolist() if whole else None
    for row in rows:
        yield row, row_faults(row)


def _is_numbers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type))
