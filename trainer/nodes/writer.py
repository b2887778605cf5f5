"""The writer of a fleet's run: an actor beside the driver, so that tokens do not pass through the driver."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.errors import RunError
from rolltap.addons.store.metadata import RUN_FILE, add_engine, add_recorder, write_metadata
from rolltap.addons.store.records import DIGEST, Session, utc_now
from rolltap.addons.store.tables import RunWriter, read_batches
from rolltap.trainer.nodes.messages import Package, recorded
from rolltap.trainer.rollouts.resume import interrupted_sessions, place_of
from rolltap.trainer.traces.reader import load_sessions


class Writer:
    """Appends what nodes report to the run folder. Every method returns a `Failure` in place of raising."""

    def __init__(self, run: str) -> None:
        self.name = "of the driver"
        self._run = Path(run)
        self._writer = RunWriter(self._run)
        self._lost = ""

    @recorded
    async def append(self, package: Package, again: bool, node: str) -> None:
        """Write a package of a node. With `again`, rows that the run has already are left out."""
        metadata = dict(package.metadata)
        recorders, engines = metadata.pop("recorders", []), metadata.pop("engines", {})
        try:
            write_metadata(self._run, metadata)
        except RunError as error:
            raise RunError(f"node {node}: {error}, or give all nodes the same model") from error
        for recorder in recorders:
            add_recorder(self._run, recorder)
        for url, engine in engines.items():
            add_engine(self._run, url, engine)
        (self._run / "logs").mkdir(exist_ok=True)
        for name, text in package.logs.items():
            (self._run / "logs" / name).write_bytes(text)
        for table, stream in package.tables:
            batches = list(pa.ipc.open_stream(stream))
            for batch in self._unknown(table, batches) if again else batches:
                self._writer.add_batch(table, batch)
        self._writer.end_session()

    @recorded
    async def end_interrupted(self) -> None:
        """Give a row `cancelled` to the sessions that an earlier driver left."""
        if not (self._run / RUN_FILE).exists():
            return
        for session in interrupted_sessions(self._run):
            session.finished_at = utc_now()
            self._writer.add_session(session)

    @recorded
    async def end_lost(self, held: Collection[str], why: str, groups: Collection[str]) -> list[Session]:
        """Give a row `infrastructure` to sessions that began and whose places no node holds.

        Return them, after those of `groups` that have a row: it may have come before the report that tells of its end.
        """
        self._lost = f"lost: {why}"
        rows = load_sessions(self._run).values()
        ended = [row for row in rows if row.group_id in groups and place_of(row.session_id) not in held]
        lost = [each for each in interrupted_sessions(self._run) if place_of(each.session_id) not in held]
        for session in lost:
            session.status, session.error = "infrastructure", why
            session.finished_at = utc_now()
            self._writer.add_session(session)
        return [*ended, *lost]

    @recorded
    async def status(self) -> dict[str, Any]:
        """Return what `rolltap fleet status` shows of the driver: why it lost a node the last time."""
        return {"node": "driver", "error": self._lost}

    @recorded
    async def close(self) -> None:
        """Close the run's files."""
        self._writer.close()

    def _unknown(self, table: str, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        known = {digest for batch in read_batches(self._run, table) for digest in batch.column(DIGEST).to_pylist()}
        for batch in batches:
            new = [digest not in known for digest in batch.column(DIGEST).to_pylist()]
            if any(new):
                yield batch.filter(pa.array(new))
