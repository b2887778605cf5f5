"""The two ways through a run folder: file by file with each row checked, and session by session."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa

from rolltap.addons.errors import RunError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.rows import Row, row_digest
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import checked_rows, named_fault, run_files
from rolltap.trainer.console import Advance
from rolltap.trainer.traces.tables import TABLES


def open_files(
    runs: Sequence[Path], what: str, advance: Advance
) -> Iterator[tuple[str, SegmentReader]]:
    """Yield the table and the reader of each file of some runs, which is open until the next one.

    `advance` is told `what`, and the bytes of the files that were read.
    """
    files: list[tuple[str, Path]] = []
    for run in runs:
        for table in TABLES:
            for path in run_files(run, table):
                files.append((table, path))
    total = sum(path.lstat().st_size for _, path in files)
    done = 0
    for table, path in files:
        with SegmentReader(path, TABLES[table]) as reader:
            yield table, reader
        done += path.lstat().st_size
        advance(what, done, total)


def check_rows(table: str, batch: pa.RecordBatch) -> Iterator[tuple[Row | None, str | None]]:
    """Yield (row, fault) for each row of a batch. The fault is None for a sound row.

    The row is None when no writer writes such a row, and when one of its values cannot be converted
    to Python.
    """
    for number in range(batch.num_rows):
        try:
            [(row, faults)] = checked_rows(batch.slice(number, 1))
        except RunError as error:
            yield None, f"a row has an invalid value: {error.__cause__}"
            continue
        is_written = not faults
        if row[DIGEST] != row_digest(row, TABLES[table]):
            faults[DIGEST] = "its digest does not match, the row was changed after it was written"
        fault = None
        if faults:
            fault = named_fault(row, faults)
        yield row if is_written else None, fault


@contextmanager
def index_tables(run: Path, names: Iterable[str]) -> Iterator[dict[str, SessionIndex]]:
    """Index tables of a run by session: table -> its rows. Raises `RunError` when the folder cannot
    be read."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(SessionIndex(run, name)) for name in names}
