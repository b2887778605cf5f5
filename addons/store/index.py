"""Incremental reading of a run: a scan of a table, and its rows by session."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.rows import Row, row_digest
from rolltap.addons.store.segment import SegmentReader, rows_of_session
from rolltap.addons.store.tables import TABLES, batch_rows, run_files

Skip = Callable[[str], bool] | None
"""Name of a segment -> True to leave it for a later time. None leaves none."""
OPEN_FILES = 64
"""Segments of a table that are mapped at the same time."""


class NewCommits(NamedTuple):
    """Commits of one segment that were not read before."""

    path: Path
    again: bool
    """True if the segment was compacted: these are all its rows, also those that were read."""
    batches: Iterator[tuple[int, pa.RecordBatch]]
    """(byte offset, batch), in file order. Read them before the next segment's."""


class TableScan:
    """Reads each commit of a table once. Not thread-safe."""

    def __init__(self, run: Path, table: str) -> None:
        self._run = run
        self._table = table
        self.inodes: dict[str, int] = {}
        """Name of a segment -> its inode."""
        self._ends: dict[str, int] = {}
        """Name of a segment -> the end of what was read."""
        self.damage: dict[str, dict[int, str]] = {}
        """Name of a segment -> byte offset -> why the commits there were skipped."""

    def new(self, skip: Skip = None) -> Iterator[NewCommits]:
        """Yield the segments that have commits since the last time, in the order of their writers.

        Damage is skipped with a warning. Raises `OSError`.
        """
        for path in run_files(self._run, self._table):
            name = path.name
            if skip is not None and skip(name):
                continue
            inode = self.inodes.get(name)
            file = path.lstat()
            if file.st_ino == inode and file.st_size == self._ends[name]:
                continue
            with SegmentReader(path, TABLES[self._table]) as reader:
                if inode == reader.inode:
                    batches = reader.batches_from(self._ends[name])
                    damage = self.damage[name]
                else:
                    batches = iter(reader)
                    damage = {}
                yield NewCommits(path, inode not in (None, reader.inode), batches)
                self.inodes[name] = reader.inode
                self._ends[name] = reader.end
                self.damage[name] = damage | reader.damage
                reader.warn_of_damage()


class SessionIndex:
    """An index of a table: session id -> places of its rows. A context manager; not thread-safe.

    It holds what was committed when it was built, and at the last `refresh`. Raises `RunError` when
    the folder cannot be read.
    """

    def __init__(self, run: Path, table: str, skip: Skip = None) -> None:
        read_metadata(run)
        self._run = run
        self._schema = TABLES[table]
        self.scan = TableScan(run, table)
        self._places: defaultdict[str | None, dict[str, array[int]]] = defaultdict(dict)
        """Session id, None for rows of nobody -> segment -> for each row its batch's offset."""
        self._open: dict[str, SegmentReader] = {}
        self.refresh(skip)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._places

    @property
    def session_ids(self) -> list[str | None]:
        """Ids of the sessions that have rows, in the order of their first ones.

        None stands for rows without a session.
        """
        return list(self._places)

    def count(self, session_id: str | None) -> int:
        """Return the number of rows of one session."""
        return sum(map(len, self._places.get(session_id, {}).values()))

    def close(self) -> None:
        """Close the segments that are mapped. `batches` maps them again."""
        while self._open:
            self._open.popitem()[1].close()

    def refresh(self, skip: Skip = None) -> None:
        """Add what was committed since. Reads only new commits. Raises `OSError`."""
        for new in self.scan.new(skip):
            name = new.path.name
            if name in self._open:  # mapped at its earlier length
                self._open.pop(name).close()
            if new.again:
                for places in self._places.values():
                    places.pop(name, None)
            for offset, batch in new.batches:
                for row in batch.column("session_id").value_counts().to_pylist():
                    offsets = self._places[row["values"]].setdefault(name, array("q"))
                    offsets.extend([offset] * row["counts"])

    def batches(
        self,
        session_id: str | None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one session, file by file, in the order of their commits.

        `columns` None means all.
        """
        for name in sorted(self._places.get(session_id, ())):
            reader = self._reader(name)
            for offset in dict.fromkeys(self._places[session_id].get(name, ())):
                rows = rows_of_session(reader.read(offset), session_id)
                yield rows if columns is None else rows.select(columns)

    def rows(self, session_id: str | None, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows of one session as `batch_rows` reads them, in commit order."""
        for batch in self.batches(session_id, columns):
            yield from batch_rows(batch)

    def sound_rows(self, session_id: str) -> Iterator[Row]:
        """Yield the rows of one session whose digests match."""
        for row in self.rows(session_id):
            if row[DIGEST] == row_digest(row, self._schema):
                yield row

    def _reader(self, name: str) -> SegmentReader:
        if name not in self._open:
            if len(self._open) == OPEN_FILES:
                oldest = next(iter(self._open))
                self._open.pop(oldest).close()
            reader = SegmentReader(self._run / name, self._schema)
            while reader.inode != self.scan.inodes[name]:
                # compacted since it was scanned: the same rows at other offsets
                reader.close()
                self.refresh(lambda other: other != name)
                reader = SegmentReader(self._run / name, self._schema)
            self._open[name] = reader
        return self._open[name]
