r"""Segment: one append-only file of a run, an Arrow IPC stream that can be read while it grows.

             +-------------------------+
    0        | schema message          |
             +-------------------------+
             | record batch message    |  commit 1
             | ...                     |
             | record batch message    |  commit N
             +-------------------------+
    size     | 00 00 00 00 00 00 00 00 |  prefix of commit N + 1, until step 3      \
    size + 8 | metadata, body          |  step 2                                  > uncommitted tail
    end - 1  | last byte               |  step 1                                 /
             +-------------------------+

A commit is one record batch message. Its prefix (8 bytes) is the marker ff ff ff ff and the length
of the metadata. It is written in three steps:

1. Write the last byte. The file then has its final length, so that a reader maps all bytes of the
   commit or none.
2. Write all other bytes after the prefix.
3. Write the prefix. This publishes the commit.

Before step 3 the prefix is zero, which Arrow readers take for the end of the stream (a length of 0
in the IPC format before 0.15). A process that is killed before step 3 leaves an uncommitted tail
from `size` on, which readers ignore. A machine that stops before `fdatasync` may lose any page of a
commit. The rows' digests show that, unless the prefix of the last commit is lost: then the commit
is taken for an uncommitted tail.
"""

import errno
import fcntl
import logging
import os
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from rolltap.addons.store.records import LATER_COLUMNS
from rolltap.addons.store.staging import hidden_name, new_file, sync_folder
from rolltap.addons.store.untrusted import check_batch, check_message, open_file

logger = logging.getLogger(__name__)

_PREFIX = 8
"""Bytes of a message's prefix: marker and length of the metadata (Arrow columnar format, IPC)."""
_MARKER = b"\xff\xff\xff\xff"
_SEARCHED = 1 << 20
"""Most places at which a marker is looked for at a time."""
_UNREADABLE = pa.ArrowException, OSError, EOFError, struct.error
MOST_FAILED = 10_000
"""Places of a file at which a message seems to begin and none can be read.

The rest of a file that has more is lost.
"""
_PLACE = b"rolltap.place"
_END = _MARKER + bytes(4)
"""End-of-stream marker. Compacted files have one, files that grow do not."""
_ROWS = b"rolltap.rows"
"""Key of the schema's metadata with the number of rows of a compacted file.

So a lost end is seen wherever it begins. A file that grows cannot say that.
"""
BATCH_ROWS = 8
BATCH_BYTES = 256 * 1024
"""Limits of a compacted batch, unless one commit is larger.

They bound the rows that one damaged byte can cost. Smaller batches would take more space: the
metadata of the 31 call columns is 2.4 KB a batch.
"""


class Segment:
    """A file with one writer. It gets its name with the first commit and is locked until `close`.

    Appends are not thread-safe. A commit that fails raises `OSError` and cannot be read. If the
    file has earlier commits, do not append to it again: a reader may have mapped it at the length
    of the failed commit.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.size = 0
        """Bytes of the schema and all commits, 0 before the first commit."""
        self._schema = schema
        self._descriptor: int | None = None
        self._unsynced = False
        self._named = False
        """True after the folder was fsynced, and with it the file's name."""

    def append(self, batch: pa.RecordBatch) -> None:
        """Commit the rows of a batch together. Raises `OSError`."""
        message = memoryview(batch.serialize())
        if self._descriptor is None:
            self._create(message)
            return
        end = self.size + len(message)
        try:
            _write(self._descriptor, message[-1:], end - 1)
            _write(self._descriptor, message[_PREFIX:], self.size + _PREFIX)
            _write(self._descriptor, message[:_PREFIX], self.size)
        except OSError:
            with suppress(OSError):
                # keep a zero prefix: a reader may have mapped these bytes
                os.ftruncate(self._descriptor, self.size + _PREFIX)
            raise
        self.size = end
        self._unsynced = True

    def sync(self) -> None:
        """Fsync all commits so far. May run in another thread than `append`. Raises `OSError`."""
        if not self._unsynced or self._descriptor is None:
            return
        # cleared first: a commit during fdatasync sets it again
        self._unsynced = False
        os.fdatasync(self._descriptor)
        if not self._named:
            sync_folder(self.path.parent)
            self._named = True

    def close(self) -> None:
        """Close and unlock the file, without an end marker: readers take its end for one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _create(self, message: memoryview) -> None:
        """Create the file with its first commit: readers fail without a schema."""
        hidden = hidden_name(self.path)
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            schema = memoryview(self._schema.serialize())
            _write(descriptor, schema, 0)
            _write(descriptor, message, len(schema))
            hidden.rename(self.path)
        except OSError:
            os.close(descriptor)
            hidden.unlink(missing_ok=True)
            raise
        self._descriptor = descriptor
        self.size = len(schema) + len(message)
        self._unsynced = True


def _earlier(expected: pa.Schema, found: Collection[str]) -> pa.Schema:
    """Return the columns of a table without the later ones that a file with the columns `found`
    lacks."""
    later = LATER_COLUMNS - {*found}
    return pa.schema([column for column in expected if column.name not in later])


def _widened(batch: pa.RecordBatch, expected: pa.Schema) -> pa.RecordBatch:
    columns = []
    for column in expected:
        if column.name in batch.schema.names:
            columns.append(batch.column(column.name))
        else:
            columns.append(pa.nulls(batch.num_rows, column.type))
    return pa.RecordBatch.from_arrays(columns, schema=expected)


class SegmentReader:
    """The commits of a segment, in file order; a context manager.

    Iterating yields (byte offset, batch) and skips damaged commits. A file whose schema differs
    from `expected` is damaged and yields no batch. After iterating, `damage` maps the byte offset
    of each unreadable range to its reason, `uncommitted` is the size in bytes of the uncommitted
    tail, and `end` is the offset at which the next commit would begin.

    A compacted file was written at once and is never appended to: it has no uncommitted tail. The
    end of one that has fewer rows than it says, and no other damage, is damage.
    """

    def __init__(self, path: Path, expected: pa.Schema | None = None) -> None:
        self.path = path
        self.damage: dict[int, str] = {}
        self.uncommitted = 0
        self.end = 0
        self.schema: pa.Schema | None = None
        self._expected: pa.Schema | None = None
        """Columns of the batches; None for those that the file has."""
        self._rows: int | None = None
        """Number of rows that a compacted file says it has."""
        self._begin = 0
        """Offset of the first commit."""
        self._source = pa.BufferReader(b"")
        try:
            with open_file(path.parent, path.name) as file:
                self.inode = os.fstat(file.fileno()).st_ino
                self._source = pa.memory_map(f"/dev/fd/{file.fileno()}")
        except FileNotFoundError:
            raise
        except OSError as error:
            self.inode = path.lstat().st_ino
            self.damage[0] = f"it cannot be read ({error.strerror})"
            return
        try:
            schema = pa.ipc.read_schema(self._next("schema"))
            names = schema.names  # decoded here: damaged ones may be no UTF-8
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            self.damage[0] = f"it has no schema ({error})"
            return
        if expected is not None and schema.equals(_earlier(expected, names)):
            self._expected = expected
        elif expected is not None:
            why = "another version of rolltap wrote it, or it is damaged"
            self.damage[0] = f"it does not have the columns of its table: {why}"
            return
        self.schema = schema
        self._begin = self._source.tell()
        rows = (schema.metadata or {}).get(_ROWS, b"")
        if rows.isdigit():
            self._rows = int(rows)

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        return self.batches_from(self._begin)

    def batches_from(self, start: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (byte offset, batch), from a commit's offset or an earlier reader's `end` on."""
        offset = None if self.schema is None else start
        in_damage = False
        num_rows = 0
        num_failed = 0
        # the end is checked before the read: a commit published in between is not damage then
        while offset is not None and not self._is_end(offset):
            try:
                batch = self.read(offset)
                # a flipped bit in an Arrow offset would make later reads leave the buffer
                batch.validate(full=True)
                check_batch(batch)
            except _UNREADABLE as error:
                if not in_damage:
                    self.damage[offset] = f"a commit cannot be read ({error})"
                in_damage = True
                num_failed += 1
                offset = self._find_marker(offset) if num_failed < MOST_FAILED else None
            else:
                next_offset = self._source.tell()
                in_damage = False
                num_rows += batch.num_rows
                yield offset, batch
                offset = next_offset
        whole = start == self._begin and not self.damage
        if whole and offset is not None and self._rows is not None and num_rows < self._rows:
            left = f"{num_rows} of its {self._rows} rows are left"
            self.damage[offset] = f"it lost its end: {left}"
        self.end = self._source.size() - self.uncommitted

    def warn_of_damage(self) -> None:
        """Log a warning for each entry of `damage`."""
        for offset, reason in self.damage.items():
            logger.warning("%s, byte %d: %s; see `rolltap verify`", self.path, offset, reason)

    def _next(self, kind: str) -> pa.Message:
        """Read the next message. Raises `pa.ArrowInvalid` for another type: pyarrow would crash."""
        message = pa.ipc.read_message(self._source)
        if message.type != kind:
            raise pa.ArrowInvalid(f"expected a message of type {kind}, found {message.type}")
        return message

    def read(self, offset: int) -> pa.RecordBatch:
        """Return the batch at an offset that iterating yielded; `place_of` says where it was.

        Raises `pa.ArrowException`, `OSError` or `EOFError`.
        """
        self._source.seek(offset)
        message = self._next("record batch")
        check_message(message)
        batch = pa.ipc.read_record_batch(message, self.schema)
        if self._expected is not None and batch.num_columns < len(self._expected):
            batch = _widened(batch, self._expected)
        return batch.replace_schema_metadata({_PLACE: f"{self.path}, byte {offset}"})

    def _is_end(self, offset: int) -> bool:
        """Return True at an end marker or an uncommitted tail, and set `uncommitted` for a tail."""
        rest = self._bytes(offset)
        # only the last commit can be incomplete: a zero prefix with a message behind it is damage.
        # Data of a tail may look like the start of a message: damage is then reported, but no rows
        # of the tail are returned
        if not any(rest[:_PREFIX]) and self._find_marker(offset) is None:
            self.uncommitted = len(rest) if self._rows is None else 0
            return True
        return rest == _END

    def _find_marker(self, offset: int) -> int | None:
        """Return the offset of the next marker after `offset`, or None. O(file size).

        Messages are aligned to 8 bytes, and a positive length follows the marker. Data may look
        like that too.
        """
        start = offset // 8 * 8 + 8
        rest = self._bytes(offset)[start - offset :]
        messages = np.frombuffer(rest, "<i4", count=len(rest) // 8 * 2).reshape(-1, 2)
        first = 0
        size = 64
        while first < len(messages):
            markers, lengths = messages[first : first + size].T
            found = np.flatnonzero((markers == -1) & (lengths > 0))
            if found.size:
                return start + 8 * (first + int(found[0]))
            first += size
            size = min(2 * size, _SEARCHED)
        return None

    def _bytes(self, offset: int) -> memoryview:
        self._source.seek(offset)
        return memoryview(self._source.read_buffer()).cast("B")


def compact(path: Path) -> None:
    """Rewrite a closed segment with the rows of a session together, in batches of bounded size.

    The new file replaces the old one atomically. Within a session, rows stay in commit order. An
    uncommitted tail is dropped. Does nothing for fewer than two batches, or when the file is
    damaged. Raises `OSError` and `pa.ArrowException`.
    """
    with SegmentReader(path) as reader:
        sessions: defaultdict[str | None, list[int]] = defaultdict(list)
        num_batches = 0
        num_rows = 0
        for offset, batch in reader:
            num_batches += 1
            num_rows += batch.num_rows
            for session_id in batch.column("session_id").unique().to_pylist():
                sessions[session_id].append(offset)
        if num_batches < 2 or reader.damage or reader.schema is None:
            return
        num_written = 0
        schema = reader.schema.with_metadata({_ROWS: str(num_rows)})
        with new_file(path, "xb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for batch in _regrouped(reader, sessions):
                    writer.write_batch(batch)
                    num_written += batch.num_rows
            if num_written != num_rows:
                why = f"{num_written} of {num_rows} rows were copied"
                raise OSError(errno.EIO, why, str(path))


def _regrouped(
    reader: SegmentReader,
    sessions: dict[str | None, list[int]],
) -> Iterator[pa.RecordBatch]:
    pending: list[pa.RecordBatch] = []
    num_rows = 0
    num_bytes = 0
    for session_id, offsets in sessions.items():
        for offset in offsets:
            batch = rows_of_session(reader.read(offset), session_id)
            num_rows += batch.num_rows
            num_bytes += batch.get_total_buffer_size()
            if pending and (num_rows > BATCH_ROWS or num_bytes > BATCH_BYTES):
                yield pa.concat_batches(pending)
                pending = []
                num_rows = batch.num_rows
                num_bytes = batch.get_total_buffer_size()
            pending.append(batch)
    if pending:
        yield pa.concat_batches(pending)


def place_of(batch: pa.RecordBatch) -> str:
    """Return the file and the offset of the commit that a batch or a part of it was read from."""
    metadata: dict[bytes, bytes] = batch.schema.metadata or {}
    return metadata.get(_PLACE, b"").decode()


def rows_of_session(batch: pa.RecordBatch, session_id: str | None) -> pa.RecordBatch:
    """Return the rows of one session, of which the batch has at least one."""
    if batch.num_rows == 1:
        return batch
    ids = batch.column("session_id")
    return batch.filter(ids.is_null() if session_id is None else pa.compute.equal(ids, session_id))


def _write(descriptor: int, data: Any, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written
