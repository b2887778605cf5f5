"""What lies behind the last commit of a segment, and whether it may be cut off.

A writer puts the bytes of a commit behind its first eight, and those last (see `rolltap.addons.store.segment`): what
begins with zeros was never committed. Anything else is cut off only if it is the beginning of one commit whose end the
file has lost, by its own account of its length. What holds a later commit that can be read is never touched.
"""

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pyarrow as pa

from rolltap.addons.store.digest import DIGEST, row_digest
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import batch_rows

TailKind = Literal["uncommitted", "cut", "headless", "unknown"]
"""`uncommitted`: no reader was ever shown it. `cut`: a commit without its end. `headless`: the file ends within its
schema, so that it has no commit. `unknown`: anything else, which is not to be touched."""

_MARKER = b"\xff\xff\xff\xff"
_END = _MARKER + bytes(4)
"""The proper end of a stream that is not appended to (Arrow columnar format, IPC)."""
_PREFIX = 8


@dataclass(frozen=True, slots=True)
class Tail:
    """The bytes of a segment from `start` on."""

    kind: TailKind
    start: int
    size: int
    later: int = 0
    """Commits in it that can still be read; such a tail is `unknown`."""


def find_tail(path: Path, schema: pa.Schema) -> Tail | None:
    """What follows the last commit that a reader of a segment reaches; None at a proper end. Raises `OSError`."""
    if path.stat().st_size == 0:
        return Tail("headless", 0, 0)
    with SegmentReader(path, schema) as reader:
        for _ in reader:
            pass
        start = reader.end
    with pa.memory_map(str(path)) as source:
        tail = memoryview(source.read_buffer()).cast("B")[start:]
        if len(tail) == 0 or tail == _END:
            return None
        if start == 0:
            # each file begins with the schema, and nothing in it can be read without
            headless = bytes(tail) == bytes(schema.serialize())[: len(tail)] or not any(tail)
            return Tail("headless" if headless else "unknown", 0, len(tail))
        later = _later_commits(tail, schema)
        if later:
            return Tail("unknown", start, len(tail), later)
        if not any(tail[:_PREFIX]):
            return Tail("uncommitted", start, len(tail))
        return Tail("cut" if _is_cut(tail, schema) else "unknown", start, len(tail))


def _later_commits(tail: memoryview, schema: pa.Schema) -> int:
    """Batches behind the first bytes of a tail that can be read and whose rows have their digests."""
    data, found = pa.py_buffer(tail), 0
    for position in range(_PREFIX, len(tail) - _PREFIX, 8):
        if tail[position : position + 4] != _MARKER:
            continue
        try:
            message = pa.ipc.read_message(data.slice(position))
            if message.type != "record batch":
                continue
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            found += any(row[DIGEST] == row_digest(row, schema) for row in batch_rows(batch))
        except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError):
            continue
    return found


def _is_cut(tail: memoryview, schema: pa.Schema) -> bool:
    """Whether a tail is the beginning of one commit, and not a whole commit whose length was damaged."""
    size = _metadata_size(schema)
    prefix = _MARKER + size.to_bytes(4, "little")
    if bytes(tail[:_PREFIX]) != prefix[: len(tail)]:
        return False
    if len(tail) < _PREFIX + size:
        return True
    try:
        body, needed = _body_sizes(tail[_PREFIX : _PREFIX + size])
    except struct.error:
        return False
    return body == -(-needed // 8) * 8 and len(tail) < _PREFIX + size + body


@cache
def _metadata_size(schema: pa.Schema) -> int:
    """Bytes between the prefix and the body of a commit: the same for every batch with rows of one schema."""
    row = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema=schema)
    return int.from_bytes(row.serialize().to_pybytes()[4:_PREFIX], "little")


def _body_sizes(metadata: memoryview) -> tuple[int, int]:
    """The length of its body that a record batch message states, a multiple of 8, and where its last buffer ends.

    Field numbers and layouts are those of Message.fbs. Raises `struct.error` for what is no such message.
    """

    def read(format: str, position: int) -> int:
        return int(struct.unpack_from(format, metadata, position)[0])

    def find(table: int, field: int) -> int:
        """The position of a field; that of the table itself if the field has its default."""
        return table + read("<H", table - read("<i", table) + 4 + 2 * field)

    message = read("<I", 0)
    header = find(message, 2)
    batch = header + read("<I", header)
    vector = find(batch, 2)
    vector += read("<I", vector)
    buffers = (vector + 4 + 16 * number for number in range(read("<I", vector)))
    return read("<q", find(message, 3)), max((read("<q", at) + read("<q", at + 8) for at in buffers), default=0)
