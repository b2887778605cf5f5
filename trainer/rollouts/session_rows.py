"""The rows of the sessions of a run that is being recorded."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolltap.addons.store.session_index import SessionIndex
from rolltap.addons.store.versions import FIRST_VERSION_COLUMNS, first_version


class SessionRows:
    """The rows of each session of a run. Reads each commit once. Thread-safe."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._indexes: dict[str, SessionIndex] = {}

    def of(self, table: str, session_id: str, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return the values of some columns of the session's rows.

        Raises `RunError` and `OSError` when the folder cannot be read.
        """
        with self._lock:
            if table in self._indexes:
                self._indexes[table].refresh()
            else:
                self._indexes[table] = SessionIndex(self._run, table)
            index = self._indexes[table]
            batches = [batch.to_pydict() for batch in index.batches(session_id, columns)]
            index.close()
        return [row for batch in batches for row in zip(*batch.values(), strict=True)]

    def first_version(self, session_id: str) -> str | None:
        """Return the weights that sampled the first token of a session's calls, or None without one. Raises as `of`."""
        return first_version(self.of("calls", session_id, FIRST_VERSION_COLUMNS))
