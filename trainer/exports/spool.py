"""A dataset of any number of rows, written in bounded memory."""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pyarrow as pa
from datasets import Dataset, Features, disable_progress_bars

SHARD_BYTES = 500 * 1024 * 1024
"""Size of a shard's columns in memory; the default of `Dataset.save_to_disk` and `push_to_hub`."""
_ROWS_AT_ONCE = 64


class Spool:
    """A buffer of rows in a temporary Arrow file beside `folder`. A context manager, which removes the file.

    Used instead of `Dataset.from_generator`, which wraps errors of the generator and refuses a generator without rows.
    Raises `OSError`.
    """

    def __init__(self, features: Features, folder: Path) -> None:
        disable_progress_bars()
        self._schema = features.arrow_schema
        self._temporary = TemporaryDirectory(prefix=".rows-", dir=folder.parent)
        self._path = f"{self._temporary.name}/rows.arrow"
        self._writer = pa.ipc.new_stream(self._path, self._schema)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows. Keys that are not columns are ignored."""
        rows = iter(rows)
        while some := list(islice(rows, _ROWS_AT_ONCE)):
            self._writer.write_batch(pa.RecordBatch.from_pylist(some, self._schema))

    def dataset(self) -> tuple[Dataset, int]:
        """Return the rows, and into how many shards to split them. Rows cannot be added any more.

        The dataset maps the temporary file, so it is valid only inside the `with` block.
        """
        self._writer.close()
        dataset = Dataset.from_file(self._path)
        return dataset, dataset.data.nbytes // SHARD_BYTES + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._temporary.cleanup()
