"""Rows of any number, written as shards of bounded size in bounded memory."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

BATCH_BYTES = 32 * 1024 * 1024
"""Of columns in memory: what is held back to be written at once, as one record batch or row group."""
SHARD_BYTES = 500 * 1024 * 1024
"""The same for a shard; that of `Dataset.save_to_disk` and `push_to_hub`."""
_ROWS_AT_ONCE = 64

_OPEN = {
    "arrow": pa.ipc.new_stream,
    # chunks by content let the Hub store only what changed when a run is pushed again
    "parquet": partial(pq.ParquetWriter, compression="zstd", write_page_index=True, use_content_defined_chunking=True),
}


class ShardWriter:
    """Writes rows to `STEM-00000-of-00003.SUFFIX` and so on in a folder; at least one shard, also of no rows.

    Arrow shards are IPC streams. The Arrow schema carries the features, so that `datasets` and the Hub's viewer find
    them in every shard. The shards get their names when the block ends, as only then their number is known. Raises
    `OSError`.
    """

    def __init__(self, folder: Path, stem: str, suffix: Literal["arrow", "parquet"], features: Features) -> None:
        self.names: list[str] = []
        """Of the finished shards, in their order."""
        self.rows = 0
        self.folder = folder
        self._stem, self._suffix = stem, suffix
        self._schema = features.arrow_schema
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._shards = 0
        self._shard_bytes = 0
        self._writer: Any = None

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; further keys than the features' are left out."""
        rows = iter(rows)
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            batch = pa.RecordBatch.from_pylist(some, self._schema)
            self.rows += batch.num_rows
            self._pending.append(batch)
            self._pending_bytes += batch.nbytes
            if self._pending_bytes >= BATCH_BYTES:
                self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and (self._pending or not self._shards):
            self._flush()
        self._close_shard()
        if kind is None:
            for number in range(self._shards):
                name = f"{self._stem}-{number:05}-of-{self._shards:05}.{self._suffix}"
                self._path(number).rename(self.folder / name)
                self.names.append(name)

    def _flush(self) -> None:
        if self._writer is not None and self._shard_bytes + self._pending_bytes > SHARD_BYTES:
            self._close_shard()
        if self._writer is None:
            self._writer = _OPEN[self._suffix](str(self._path(self._shards)), self._schema)
            self._shards += 1
        self._writer.write_table(pa.Table.from_batches(self._pending, self._schema).combine_chunks())
        self._shard_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0

    def _close_shard(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._shard_bytes = None, 0

    def _path(self, number: int) -> Path:
        return self.folder / f".{self._stem}-{number:05}.{self._suffix}"
