"""The sessions of a run that have ended."""

from pathlib import Path

import pyarrow.compute as pc

from rolltap.addons.store.scan import Skip, TableScan, nothing


class EndedSessions:
    """The ids of sessions with an event `ended` or a row in `sessions`. Not thread-safe."""

    def __init__(self, run: Path) -> None:
        self._scans = {table: TableScan(run, table) for table in ("events", "sessions")}
        self._ids: set[str] = set()

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._ids

    def add(self, session_id: str) -> None:
        """Add a session that has just ended."""
        self._ids.add(session_id)

    def refresh(self, skip: Skip = nothing) -> None:
        """Add what was committed since. Reads only new commits. Raises `OSError`."""
        for table, scan in self._scans.items():
            for new in scan.new(skip):
                for _, batch in new.batches:
                    rows = batch if table == "sessions" else batch.filter(pc.equal(batch.column("kind"), "ended"))
                    self._ids.update(rows.column("session_id").drop_null().to_pylist())
