"""Incremental reading of a table: each commit of each of its segments once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import TABLES, run_files

Skip = Callable[[str], bool]
"""Name of a segment -> True to leave it for a later time."""


def nothing(name: str) -> bool:
    """Skip no segment."""
    return False


@dataclass(slots=True)
class NewCommits:
    """Commits of one segment that were not read before."""

    path: Path
    inode: int
    again: bool
    """True when the segment was compacted: these are all its rows, those that were read before too."""
    batches: Iterator[tuple[int, pa.RecordBatch]]
    """(byte offset, batch), in file order. Read them before the next segment's."""


class TableScan:
    """Reads each commit of a table once. Not thread-safe."""

    def __init__(self, run: Path, table: str) -> None:
        self._run = run
        self._table = table
        self._read: dict[str, tuple[int, int]] = {}
        """Name of a segment -> its inode and the end of what was read."""

    def new(self, skip: Skip = nothing) -> Iterator[NewCommits]:
        """Yield the segments that have commits since the last time, ordered by the start of their writers.

        Damage is skipped with a warning. Raises `OSError`.
        """
        for path in run_files(self._run, self._table):
            if skip(path.name):
                continue
            inode, end = self._read.get(path.name, (0, 0))
            file = path.stat()
            if (file.st_ino, file.st_size) == (inode, end):
                continue
            with SegmentReader(path, TABLES[self._table]) as reader:
                again = 0 < inode != reader.inode
                batches = reader.batches_from(end) if inode == reader.inode else iter(reader)
                yield NewCommits(path, reader.inode, again, batches)
                self._read[path.name] = reader.inode, reader.end
                reader.warn_of_damage()
