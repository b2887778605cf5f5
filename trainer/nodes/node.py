"""A node of a fleet: an actor that runs a worker on its machine, and tells the driver what is new.

The worker records into a folder of this machine. All rows that it commits go to the run of the driver, those of
sessions that still run too: a node that dies takes no recorded session with it. The driver asks, and acknowledges what
it has written: a question that is asked again gets the last report again. A node ends with its driver.
"""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.engine.policy import POLICY_FILE, UNPUBLISHED
from rolltap.addons.errors import RunError
from rolltap.addons.store.index import TableScan
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.staging import write_atomically
from rolltap.addons.store.tables import TABLES
from rolltap.trainer.judges.archive import SUFFIX
from rolltap.trainer.nodes.facts import Examined, examine, require_alike
from rolltap.trainer.nodes.messages import Failure, Package, Report, Setup, recorded, require_ray
from rolltap.trainer.rollouts.mitmdump import workplace
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.tasks.task import Task

WAIT_SECONDS = 1.0
"""Longest wait for something new to report."""
LOG_BYTES = 64 * 1024
"""Most bytes of each log that are sent, its last ones."""
_ORDER = ("sessions", "events", "calls", "routing")
"""Tables in the order in which they are read: a session's row is committed after its others."""


class Shard:
    """The rows of a run that grows, each once. Compaction of a segment does not give its rows again."""

    def __init__(self, run: Path) -> None:
        self._scans = {table: TableScan(run, table) for table in _ORDER}
        self._given: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
        """Segment -> session -> number of its rows that were given."""

    def new(self) -> list[tuple[str, bytes]]:
        """Return tables and Arrow IPC streams of their new rows, in an order in which they may be written."""
        found = []
        for table, scan in self._scans.items():
            if batches := list(self._new(scan)):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, TABLES[table]) as stream:
                    for batch in batches:
                        stream.write_batch(pa.record_batch(batch.columns, TABLES[table]))
                found.append((table, sink.getvalue().to_pybytes()))
        return found[::-1]

    def _new(self, scan: TableScan) -> Iterator[pa.RecordBatch]:
        for commits in scan.new():
            given = self._given[commits.path.name]
            seen: Counter[str | None] = Counter() if commits.again else given.copy()
            for _, batch in commits.batches:
                keep = []
                for session_id in batch.column("session_id").to_pylist():
                    seen[session_id] += 1
                    keep.append(seen[session_id] > given[session_id])
                if any(keep):
                    yield batch.filter(pa.array(keep))
            self._given[commits.path.name] = given | seen


class Node:
    """The actor. Every method returns a `Failure` in place of raising. It has ended when `close` has returned."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self._setup = setup
        self._stack = ExitStack()
        self._schedule: GroupRunner | None = None
        self._running: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        """Set when the worker takes groups, or has ended."""
        self._closing = asyncio.Event()
        self._news = asyncio.Event()
        self._failure: Failure | None = None
        self._groups: dict[str, Group] = {}
        self._ended: list[tuple[Session, float]] = []
        self._closed: list[str] = []
        self._report: Report | None = None
        """The last one, until it is acknowledged."""
        self._number = 0
        self._polling = asyncio.Lock()
        """Held by one question at a time: one whose answer is lost may still wait for it."""
        self._metadata: dict[str, Any] = {}
        self._asked = time.monotonic()

    @recorded
    async def open(self, tasks: Sequence[Task], policy: str, fleet: Examined | None) -> None:
        """Start the worker, unless it runs. A node that joins a `fleet` is compared with what its nodes found."""
        if self._running is None:
            if fleet is not None:
                version = json.loads(policy)["version"] if policy else UNPUBLISHED.version
                found = await asyncio.to_thread(examine, self.name, self._setup, tasks, version, True)
                require_alike({"of the fleet": fleet, self.name: found})
            self._out = self._stack.enter_context(workplace()) / "run"
            self._out.mkdir()
            self._shard = Shard(self._out)
            self._publish(policy)
            self._running = asyncio.create_task(self._run(tasks))
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure.error()

    @recorded
    async def give(self, group: Group, policy: str, how: Mapping[str, Any]) -> None:
        """Run sessions of a group, by `GroupRunner.submit`. A group that it has is not taken twice."""
        self._publish(policy)
        if self._schedule is None or group.group_id in self._groups:
            return
        self._groups[group.group_id] = group
        result = await self._schedule.submit(group, **how)
        result.add_done_callback(partial(self._close_group, group.group_id))

    @recorded
    async def cancel(self, name: str, why: str) -> None:
        """Stop a session or a group."""
        if self._schedule is not None:
            self._schedule.cancel(name, why)

    @recorded
    async def poll(self, number: int, policy: str) -> Report:
        """Return what is new since the report of a number, the last that was written; after a while, if nothing is."""
        self._asked = time.monotonic()
        self._publish(policy)
        async with self._polling:
            if self._report is None or self._report.number == number:
                self._report = await self._next_report()
            return self._report  # the same again if its answer was lost

    async def _next_report(self) -> Report:
        if not self._news.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), WAIT_SECONDS)
        self._news.clear()
        # before the rows are read: they are at least as new as what is said of them
        (ended, self._ended), (closed, self._closed) = (self._ended, []), (self._closed, [])
        failure = self._failure
        package = await asyncio.to_thread(self._package, [session for session, _ in ended])
        self._number += 1
        return Report(
            self._number,
            None if package is None else require_ray().put(package),
            ended,
            closed,
            self._schedule.running_versions() if self._schedule else {},
            dict(self._schedule.counts) if self._schedule else {},
            failure,
        )

    @recorded
    async def status(self) -> dict[str, Any]:
        """Return what `rolltap fleet status` shows."""
        return {
            "node": self.name,
            "slots": self._setup.config.concurrency,
            "engine": self._setup.engine,
            "groups": len(self._groups),
            "phases": {phase: n for phase, n in self._schedule.counts.items() if n} if self._schedule else {},
            "asked_seconds_ago": time.monotonic() - self._asked,
            "error": self._failure.message if self._failure else "",
        }

    @recorded
    async def close(self) -> None:
        """Stop the sessions and the recorder. The reports after it have what this recorded."""
        self._closing.set()
        if self._running is not None:
            await asyncio.wait([self._running])

    @recorded
    async def leave(self) -> None:
        """Remove the folder: all was reported."""
        await asyncio.to_thread(self._stack.close)

    async def _run(self, tasks: Sequence[Task]) -> None:
        try:
            worker = await asyncio.to_thread(self._setup.worker, self._out)
            await asyncio.to_thread(worker.fit, tasks, self._setup.private)
            async with worker, worker.runner(lambda *_: None, ended=self._note) as self._schedule:
                self._ready.set()
                await self._closing.wait()
                raise asyncio.CancelledError  # the schedule would wait for its sessions
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._failure = Failure.of(error, self.name)
        finally:
            self._schedule = None
            self._ready.set()
            self._news.set()

    def _note(self, session: Session, judged: float) -> None:
        self._ended.append((session, judged))
        self._news.set()

    def _close_group(self, name: str, result: asyncio.Future[list[Session]]) -> None:
        if not result.cancelled():  # with the schedule
            del self._groups[name]
            self._closed.append(name)
            self._news.set()

    def _publish(self, policy: str) -> None:
        path = self._out / POLICY_FILE
        if policy and (not path.exists() or path.read_text() != policy):
            write_atomically(path, policy)

    def _package(self, ended: Sequence[Session]) -> Package | None:
        try:
            metadata = read_metadata(self._out)
        except RunError:
            return None  # the recorder is starting
        logs = {
            path.name: path.read_bytes()[0 if path.name.endswith(SUFFIX) else -LOG_BYTES :]
            for session in ended
            for path in (self._out / "logs").glob(f"{escape(session.session_id)}.*")
        }
        package = Package(self._shard.new(), metadata, logs)
        told, self._metadata = self._metadata == metadata, metadata
        return None if told and not (package.tables or package.logs) else package
