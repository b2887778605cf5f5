"""Rows on their way from a node to the run.

They are read on the node as they are committed, and written by an actor beside the driver, so that
tokens do not pass through the driver.
"""

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rolltap.addons.errors import RunError
from rolltap.addons.store.index import SessionIndex, TableScan
from rolltap.addons.store.metadata import (
    RUN_FILE,
    add_engine,
    add_recorder,
    read_metadata,
    write_metadata,
)
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import TABLES, RunWriter
from rolltap.trainer.judges.archive import SUFFIX
from rolltap.trainer.locks import share_recorders_lock
from rolltap.trainer.nodes.messages import Package, recorded
from rolltap.trainer.rollouts.resume import interrupted_sessions
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.traces.reader import load_sessions

PARTS = ("", EVALUATION)
"""Run folders in the folder of a run, from there."""
LOG_BYTES = 64 * 1024
"""Most bytes of each log that are sent, its last ones."""
_ORDER = ("sessions", "events", "calls", "routing")
"""Tables in the order in which they are read: a session's row is committed after its others."""


class Shard:
    """The rows of a run folder that grows, each once. Compaction gives no row again.

    `part` is the folder's place in the run of the driver; it is empty for the run itself.
    """

    def __init__(self, run: Path, part: str = "") -> None:
        self.run = run
        self._part = part
        self._scans = {table: TableScan(run, table) for table in _ORDER}
        self._given: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
        """Segment -> session -> number of its rows that were given."""
        self._metadata: dict[str, Any] = {}

    def package(self, ended: Collection[str] = ()) -> Package | None:
        """Return what is new, with the logs of sessions that `ended`; None if nothing is."""
        try:
            metadata = read_metadata(self.run)
        except RunError:
            return None  # the recorder is starting
        package = Package(self._tables(), metadata, self._logs(ended), self._part)
        if metadata == self._metadata and not package.tables and not package.logs:
            return None
        self._metadata = metadata
        return package

    def _tables(self) -> list[tuple[str, bytes]]:
        """Return tables and their new rows, in an order in which they may be written."""
        found = []
        for table, scan in self._scans.items():
            batches = list(self._new(scan))
            if batches:
                found.append((table, _stream(table, batches)))
        found.reverse()
        return found

    def _new(self, scan: TableScan) -> Iterator[pa.RecordBatch]:
        for commits in scan.new():
            given = self._given[commits.path.name]
            seen: Counter[str | None] = Counter()
            if not commits.again:
                seen.update(given)
            for _, batch in commits.batches:
                keep = []
                for session_id in batch.column("session_id").to_pylist():
                    seen[session_id] += 1
                    keep.append(seen[session_id] > given[session_id])
                if any(keep):
                    yield batch.filter(pa.array(keep))
            self._given[commits.path.name] = given | seen

    def _logs(self, ended: Collection[str]) -> dict[str, bytes]:
        logs = {}
        for session_id in ended:
            for path in (self.run / "logs").glob(f"{escape(session_id)}.*"):
                content = path.read_bytes()
                if not path.name.endswith(SUFFIX):
                    content = content[-LOG_BYTES:]
                logs[path.name] = content
        return logs


class LostSessions(NamedTuple):
    """Rows of sessions of a node that is gone: of those that had ended, and of those that ran."""

    ended: list[Session]
    running: list[Session]


class Writer:
    """Appends what nodes report to the run folder. Methods return a `Failure` in place of
    raising."""

    def __init__(self, run: str) -> None:
        self.name = "of the driver"
        self._run = Path(run)
        self._writers: dict[str, RunWriter] = {}
        """Part of the run -> its writer."""
        self._written: dict[str, int] = {}
        """Node -> the number of its last report that was written."""
        self._lost = ""
        self._lock: int | None = None
        """Descriptor of the lock for which the next start waits."""

    @recorded
    async def open(self) -> None:
        """Keep the next start waiting until this process has ended, or `close`.

        What is asked afterwards may be in work when the driver is killed.
        """
        self._run.mkdir(parents=True, exist_ok=True)
        self._lock = share_recorders_lock(self._run)

    @recorded
    async def end_interrupted(self) -> None:
        """Give a row `cancelled` to the sessions that an earlier driver left."""
        for part in PARTS:
            for session in self._interrupted(part):
                self._end(part, session)

    @recorded
    async def append(self, packages: Sequence[Package], node: str, number: int) -> None:
        """Write the report of a number of a node, once."""
        if number <= self._written.get(node, 0):
            return  # the driver was interrupted while it waited
        for package in packages:
            self._append(package, node)
        self._written[node] = number

    @recorded
    async def end_node(self, node: str, why: str, sessions: Collection[str]) -> LostSessions:
        """Forget a node, and return the rows of its `sessions` that have begun.

        Those that ran get a row `infrastructure`, which says why.
        """
        self._written.pop(node, None)
        if why:
            self._lost = f"lost: {why}"
        lost = LostSessions([], [])
        if not sessions:
            return lost
        for part in PARTS:
            if (self._run / part / RUN_FILE).exists():
                rows = load_sessions(self._run / part)
                lost.ended.extend(rows[name] for name in sessions if name in rows)
            for session in self._interrupted(part):
                if session.session_id in sessions:
                    session.status = "infrastructure"
                    session.error = why
                    self._end(part, session)
                    lost.running.append(session)
        return lost

    @recorded
    async def status(self) -> dict[str, Any]:
        """Return what `rolltap fleet status` shows of the driver: why it lost a node last."""
        return {"node": "driver", "error": self._lost}

    @recorded
    async def close(self) -> None:
        """Close the run's files."""
        for writer in self._writers.values():
            writer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _interrupted(self, part: str) -> list[Session]:
        run = self._run / part
        if not (run / RUN_FILE).exists():
            return []
        return interrupted_sessions(run)

    def _end(self, part: str, session: Session) -> None:
        session.finished_at = utc_now()
        self._writer(part).add_session(session)

    def _append(self, package: Package, node: str) -> None:
        run = self._run / package.part
        metadata = dict(package.metadata)
        recorders = metadata.pop("recorders", [])
        engines = metadata.pop("engines", {})
        try:
            write_metadata(run, metadata)
        except RunError as error:
            raise RunError(f"node {node}: {error}, or give all nodes the same model") from error
        for recorder in recorders:
            add_recorder(run, recorder)
        for url, engine in engines.items():
            add_engine(run, url, engine)
        (run / "logs").mkdir(exist_ok=True)
        for name, text in package.logs.items():
            (run / "logs" / name).write_bytes(text)
        writer = self._writer(package.part)
        for table, batch in _batches(package):
            writer.add_batch(table, batch)
        writer.end_session()

    def _writer(self, part: str) -> RunWriter:
        if part not in self._writers:
            self._writers[part] = RunWriter(self._run / part)
        return self._writers[part]


class ForkedCalls:
    """Calls of sessions of a run, which reads each commit once. Thread-safe.

    Raises `RunError` and `OSError` when the run cannot be read.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._index: SessionIndex | None = None

    def of(self, session_id: str) -> Package:
        """Return the calls of a session."""
        with self._lock:
            if self._index is None:
                self._index = SessionIndex(self._run, "calls")
            else:
                self._index.refresh()
            with self._index:
                stream = _stream("calls", self._index.batches(session_id))
        return Package([("calls", stream)], read_metadata(self._run), {})


def keep_calls(package: Package, folder: Path) -> None:
    """Write the calls of a forked session into a run of their own. Raises `RunError`, `OSError`."""
    with new_folder(folder) as staged:
        write_metadata(staged, dict(package.metadata))
        with RunWriter(staged, "never") as writer:
            for table, batch in _batches(package):
                writer.add_batch(table, batch)


def _stream(table: str, batches: Iterable[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLES[table]) as stream:
        for batch in batches:
            stream.write_batch(pa.record_batch(batch.columns, TABLES[table]))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _batches(package: Package) -> Iterator[tuple[str, pa.RecordBatch]]:
    for table, stream in package.tables:
        for batch in pa.ipc.open_stream(stream):
            yield table, batch
