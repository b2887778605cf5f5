"""One append-only file of a run: an Arrow IPC stream that any Arrow reader may read while it grows.

A commit is one record batch, written in three steps: its last byte, all but its first eight bytes, those eight. Until
the third they are zero, which Arrow's readers take for the end of the stream: a process that is killed at any
instruction leaves no half of a batch that somebody could read. The first makes the file as long as it will be, so that
whoever maps a file maps a commit whole or not at all.
"""

import errno
import fcntl
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from rolltap.addons.store.staging import hidden_name, new_file, sync_folder

logger = logging.getLogger(__name__)

BATCH_ROWS = 32
BATCH_BYTES = 256 * 1024
"""The most that a compacted batch holds, unless one commit is larger: what one damaged place costs. The 31 columns of a
call take 2.4 KB a batch."""
_PREFIX = 8
"""Bytes of a message that say where it ends: continuation marker and length (Arrow columnar format, IPC)."""
_MARKER = b"\xff\xff\xff\xff"
_MARKED = re.compile(rb"(?=\xff{4})")
"""Every place of the marker; other bytes before it may be 0xff too."""
_END = _MARKER + bytes(4)
"""A message of no length: the end of a stream that is not appended to."""


class Segment:
    """A file that this process alone appends to. It appears with its first commit and is locked (`flock`) until it is
    closed.

    Raises `OSError` when a commit could not be written, in which case nothing of it can be read. A file that has
    commits takes no more then: a reader may have mapped it at the length of the one that failed.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.size = 0
        """Bytes of all commits."""
        self._schema = schema
        self._descriptor: int | None = None
        self._unsynced = False
        self._named = False
        """Its name is on the disk too."""

    def append(self, batch: pa.RecordBatch) -> None:
        """Commit the rows of a batch together."""
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
                # all but a prefix of zeros, where a reader may look
                os.ftruncate(self._descriptor, self.size + _PREFIX)
            raise
        self.size = end
        self._unsynced = True

    def sync(self) -> None:
        """Bring all commits so far to the disk. May run in another thread than `append`. Raises `OSError`."""
        if not self._unsynced or self._descriptor is None:
            return
        # before the call: what is committed while it runs is synced by the next one
        self._unsynced = False
        os.fdatasync(self._descriptor)
        if not self._named:
            sync_folder(self.path.parent)
            self._named = True

    def close(self) -> None:
        """Let go of the file. It needs no end marker: a stream ends where its bytes end."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _create(self, message: memoryview) -> None:
        """A file without a schema would stop its readers: the name appears when the first commit is complete."""
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
        self._descriptor, self.size = descriptor, len(schema) + len(message)
        self._unsynced = True


class SegmentReader:
    """The commits of a segment, in order; a context manager. Nothing is read of a file that has another schema than
    `expected`.

    Iterating yields the byte offset of each batch and the batch, and goes on at the next commit behind damage.
    Afterwards `damage` says what could not be read, by the byte where it begins, and `uncommitted` is the size of an
    end that was never a whole commit.
    """

    def __init__(self, path: Path, expected: pa.Schema | None = None) -> None:
        self.path = path
        self.damage: dict[int, str] = {}
        self.uncommitted = 0
        self.schema: pa.Schema | None = None
        while True:
            self.inode = path.stat().st_ino
            self._source = pa.memory_map(str(path))
            if path.stat().st_ino == self.inode:
                break
            self._source.close()  # compacted in between
        try:
            schema = pa.ipc.read_schema(self._next("schema"))
        except (pa.ArrowException, OSError, EOFError) as error:
            self.damage[0] = f"it has no schema ({error})"
        else:
            if expected is None or schema.equals(expected):
                self.schema = schema
            else:
                self.damage[0] = "it does not have the columns of its table"

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        offset = None if self.schema is None else self._source.tell()
        lost = False
        # before it is read: what is committed meanwhile is no damage
        while offset is not None and not self._is_end(offset):
            try:
                batch = self.read(offset)
                # a flipped bit in an offset would have a reader look outside of the file
                batch.validate(full=True)
            except (pa.ArrowException, OSError, EOFError) as error:
                if not lost:
                    self.damage[offset] = f"a commit cannot be read ({error})"
                lost = True
                offset = self._find_marker(offset)
            else:
                following = self._source.tell()
                lost = False
                yield offset, batch
                offset = following

    def warn_of_damage(self) -> None:
        """Log a warning when iterating found damage."""
        for offset, what in self.damage.items():
            logger.warning("%s, byte %d: %s; see `rolltap verify`", self.path, offset, what)

    def _next(self, kind: str) -> pa.Message:
        """The next message; pyarrow takes it for what it is asked for, and crashes if it is not."""
        message = pa.ipc.read_message(self._source)
        if message.type != kind:
            raise pa.ArrowInvalid(f"a message of type {message.type} where a {kind} belongs")
        return message

    def read(self, offset: int) -> pa.RecordBatch:
        """The batch at an offset that iterating yielded."""
        self._source.seek(offset)
        return pa.ipc.read_record_batch(self._next("record batch"), self.schema)

    def _is_end(self, offset: int) -> bool:
        """Whether the stream ends here: properly, or with a commit that was not completed and has none behind it."""
        rest = self._bytes(offset)
        # only one commit at a time can be incomplete: zeros before another message are damage, also when in doubt
        if not any(rest[:_PREFIX]) and self._find_marker(offset) is None:
            self.uncommitted = len(rest)
            return True
        return rest == _END

    def _find_marker(self, offset: int) -> int | None:
        """Where the next message behind an offset may begin: messages lie at multiples of 8."""
        places = (offset + found.start() for found in _MARKED.finditer(self._bytes(offset)))
        return next((place for place in places if place > offset and place % 8 == 0), None)

    def _bytes(self, offset: int) -> memoryview:
        self._source.seek(offset)
        return memoryview(self._source.read_buffer()).cast("B")


def compact(path: Path) -> None:
    """Rewrite a segment that nobody appends to: rows of a session together, in batches of bounded size.

    The new file takes the place of the old one in one step, so that a reader sees one of them and a crash leaves one
    of them. Rows stay in the order of their commits within a session. Does nothing when there is nothing to gain.
    Raises `OSError`.
    """
    with SegmentReader(path) as reader:
        sessions: defaultdict[str | None, list[int]] = defaultdict(list)
        offsets, rows = 0, 0
        for offset, batch in reader:
            offsets, rows = offsets + 1, rows + batch.num_rows
            for session_id in batch.column("session_id").unique().to_pylist():
                sessions[session_id].append(offset)
        if offsets < 2 or reader.damage:
            return
        written = 0
        with new_file(path, "xb") as file:
            with pa.ipc.new_stream(file, reader.schema) as writer:
                for batch in _regrouped(reader, sessions):
                    writer.write_batch(batch)
                    written += batch.num_rows
            if written != rows:
                raise OSError(errno.EIO, f"{written} of {rows} rows were copied", str(path))


def rows_of_session(batch: pa.RecordBatch, session_id: str | None) -> pa.RecordBatch:
    """The rows of one session, of a batch that holds some."""
    if batch.num_rows == 1:
        return batch
    ids = batch.column("session_id")
    return batch.filter(ids.is_null() if session_id is None else pa.compute.equal(ids, session_id))


def _regrouped(reader: SegmentReader, sessions: dict[str | None, list[int]]) -> Iterator[pa.RecordBatch]:
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for session_id, offsets in sessions.items():
        for offset in offsets:
            batch = rows_of_session(reader.read(offset), session_id)
            more = batch.get_total_buffer_size()
            if pending and (rows + batch.num_rows > BATCH_ROWS or size + more > BATCH_BYTES):
                yield _joined(pending)
                pending, rows, size = [], 0, 0
            pending.append(batch)
            rows, size = rows + batch.num_rows, size + more
    if pending:
        yield _joined(pending)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


def _write(descriptor: int, data: Any, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
