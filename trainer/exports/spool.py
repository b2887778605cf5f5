"""Rows of any number as a dataset, in bounded memory."""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pyarrow as pa
from datasets import Dataset, Features, disable_progress_bars

SHARD_BYTES = 500 * 1024 * 1024
"""Of columns in memory; the size of a shard of `Dataset.save_to_disk` and `push_to_hub`."""
_ROWS_AT_ONCE = 64


class Spool:
    """Takes rows of `features` and holds them in a temporary file beside `folder`; a context manager.

    `Dataset.from_generator` would put errors of the generator into one of its own, and takes no generator without rows.
    Raises `OSError`.
    """

    def __init__(self, features: Features, folder: Path) -> None:
        disable_progress_bars()
        self._schema = features.arrow_schema
        self._temporary = TemporaryDirectory(prefix=".rows-", dir=folder.parent)
        self._path = f"{self._temporary.name}/rows.arrow"
        self._writer = pa.ipc.new_stream(self._path, self._schema)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; further keys than the features' are left out."""
        rows = iter(rows)
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            self._writer.write_batch(pa.RecordBatch.from_pylist(some, self._schema))

    def dataset(self) -> tuple[Dataset, int]:
        """All rows, until the block ends, and into how many shards they should go; no row can be added any more."""
        self._writer.close()
        dataset = Dataset.from_file(self._path)
        return dataset, dataset.data.nbytes // SHARD_BYTES + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._temporary.cleanup()
