"""Compaction: a closed segment is rewritten with the rows of a session together, in batches of bounded size.

The schema of the new file says how many rows it has (`compacted_schema`), so that a lost end is seen wherever it
begins. A file that grows cannot say that.
"""

import errno
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from rolltap.addons.store.segment import SegmentReader, compacted_schema, rows_of_session
from rolltap.addons.store.staging import new_file

BATCH_ROWS = 8
BATCH_BYTES = 256 * 1024
"""Limits of a compacted batch, unless one commit is larger. They bound the rows that one damaged byte can cost. Smaller
batches would take more space: the metadata of the 31 call columns is 2.4 KB a batch."""


def compact(path: Path) -> None:
    """Rewrite a closed segment with the rows of a session together, in batches of bounded size.

    The new file replaces the old one atomically. Within a session, rows stay in commit order. An uncommitted tail is
    dropped. Does nothing for fewer than two batches, or when the file is damaged. Raises `OSError` and
    `pa.ArrowException`.
    """
    with SegmentReader(path) as reader:
        sessions: defaultdict[str | None, list[int]] = defaultdict(list)
        num_batches, num_rows = 0, 0
        for offset, batch in reader:
            num_batches, num_rows = num_batches + 1, num_rows + batch.num_rows
            for session_id in batch.column("session_id").unique().to_pylist():
                sessions[session_id].append(offset)
        if num_batches < 2 or reader.damage:
            return
        num_written = 0
        with new_file(path, "xb") as file:
            with pa.ipc.new_stream(file, compacted_schema(reader.schema, num_rows)) as writer:
                for batch in _regrouped(reader, sessions):
                    writer.write_batch(batch)
                    num_written += batch.num_rows
            if num_written != num_rows:
                raise OSError(errno.EIO, f"{num_written} of {num_rows} rows were copied", str(path))


def _regrouped(reader: SegmentReader, sessions: dict[str | None, list[int]]) -> Iterator[pa.RecordBatch]:
    pending: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for session_id, offsets in sessions.items():
        for offset in offsets:
            batch = rows_of_session(reader.read(offset), session_id)
            batch_bytes = batch.get_total_buffer_size()
            if pending and (num_rows + batch.num_rows > BATCH_ROWS or num_bytes + batch_bytes > BATCH_BYTES):
                yield _joined(pending)
                pending, num_rows, num_bytes = [], 0, 0
            pending.append(batch)
            num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch_bytes
    if pending:
        yield _joined(pending)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch
