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
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

logger = logging.getLogger(__name__)

BATCH_BYTES = 1024 * 1024
"""About the size of a compacted batch: a session or two."""
_PREFIX = 8
"""Bytes of a message that say where it ends: continuation marker and length (Arrow columnar format, IPC)."""


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
    """The commits of a segment, in order; a context manager. What a crash left behind the last one is not read, and
    nothing of a file that has another schema than `expected`.

    Iterating yields the byte offset of each batch and the batch. Afterwards `end` is where the last of them ended,
    `damage` says what could not be read, None if all could, and `invalid` holds the offsets of the batches in which
    a bit has changed, which are not yielded, each with what is wrong.
    """

    def __init__(self, path: Path, expected: pa.Schema | None = None) -> None:
        self.path = path
        self.end = 0
        self.damage: str | None = None
        self.invalid: list[tuple[int, str]] = []
        self.schema: pa.Schema | None = None
        while True:
            self.inode = path.stat().st_ino
            self._source = pa.memory_map(str(path))
            if path.stat().st_ino == self.inode:
                break
            self._source.close()  # compacted in between
        self._messages = pa.ipc.MessageReader.open_stream(self._source)
        try:
            schema = pa.ipc.read_schema(self._next("schema"))
        except (pa.ArrowException, OSError, StopIteration) as error:
            self.damage = f"it has no schema ({str(error) or 'it is empty'})"
        else:
            if expected is None or schema.equals(expected):
                self.schema = schema
            else:
                self.damage = "it does not have the columns of its table"

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        if self.schema is None:
            return
        rows = 0
        while True:
            self.end = self._source.tell()
            try:
                batch = pa.ipc.read_record_batch(self._next("record batch"), self.schema)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                self.damage = f"the last commit is incomplete and was skipped after {rows} rows ({error})"
                return
            try:
                # a flipped bit in an offset would have a reader look outside of the file
                batch.validate(full=True)
            except pa.ArrowInvalid as error:
                self.damage = f"the commit at byte {self.end} is damaged and was skipped ({error})"
                self.invalid.append((self.end, str(error)))
                continue
            rows += batch.num_rows
            yield self.end, batch

    def _next(self, kind: str) -> pa.Message:
        """The next message; pyarrow takes it for what it is asked for, and crashes if it is not."""
        message = self._messages.read_next_message()
        if message.type != kind:
            raise pa.ArrowInvalid(f"a message of type {message.type} where a {kind} belongs")
        return message

    def read(self, offset: int) -> pa.RecordBatch:
        """The batch at an offset that iterating yielded."""
        self._source.seek(offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(self._source), self.schema)


def compact(path: Path) -> None:
    """Rewrite a segment that nobody appends to: rows of a session together, about `BATCH_BYTES` a batch.

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
        hidden = hidden_name(path)
        with open(hidden, "xb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                written = 0
                with pa.ipc.new_stream(file, reader.schema) as writer:
                    for batch in _regrouped(reader, sessions):
                        writer.write_batch(batch)
                        written += batch.num_rows
                if written != rows:
                    raise OSError(errno.EIO, f"{written} of {rows} rows were copied", str(path))
                file.flush()
                os.fsync(file.fileno())
                hidden.rename(path)
            except OSError:
                hidden.unlink(missing_ok=True)
                raise
    sync_folder(path.parent)


def rows_of_session(batch: pa.RecordBatch, session_id: str | None) -> pa.RecordBatch:
    """The rows of one session, of a batch that holds some."""
    if batch.num_rows == 1:
        return batch
    ids = batch.column("session_id")
    return batch.filter(ids.is_null() if session_id is None else pa.compute.equal(ids, session_id))


def hidden_name(path: Path) -> Path:
    """The name of a file that is not complete yet."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _regrouped(reader: SegmentReader, sessions: dict[str | None, list[int]]) -> Iterator[pa.RecordBatch]:
    pending: list[pa.RecordBatch] = []
    size = 0
    for session_id, offsets in sessions.items():
        for offset in offsets:
            batch = rows_of_session(reader.read(offset), session_id)
            pending.append(batch)
            size += batch.get_total_buffer_size()
            if size >= BATCH_BYTES:
                yield _joined(pending)
                pending, size = [], 0
    if pending:
        yield _joined(pending)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


def _write(descriptor: int, data: Any, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
