"""The completed calls of a session by their ids. Rows are read as far as a request needs them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.dialects.stored import StoredCall
from rolltap.addons.endpoint.recovery import undamaged
from rolltap.addons.store.index import Place, SessionIndex
from rolltap.addons.store.records import CALL_SCHEMA, DIGEST

_COLUMNS = ("call_id", "parent_id", "messages", "reply", "sampling")


class Archive:
    """The calls of a run. Thread-safe. Its files are read when a request first names a reply."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._index: SessionIndex | None = None

    def new_places(self, session_id: str, known: dict[str, int]) -> list[Place]:
        """Return the places of rows that were committed since: see `SessionIndex`. Raises `OSError` and `RunError`."""
        with self._lock:
            if self._index is None:
                self._index = SessionIndex(self._run, "calls")
            else:
                self._index.close()  # `row` leaves segments mapped for the rows that the same request names
                self._index.refresh()
            return list(self._index.new_places(session_id, known))

    def row(self, session_id: str, place: Place) -> pa.RecordBatch:
        """Return one row of `new_places`. Raises `OSError`."""
        with self._lock:
            assert self._index is not None
            return self._index.row(session_id, place)


class SessionCalls:
    """The completed calls of one session. Not thread-safe: one worker at a time."""

    def __init__(self, archive: Archive, session_id: str) -> None:
        self._archive = archive
        self._session_id = session_id
        self._checked: set[str] = set()
        """Digests of the rows that are known to be undamaged: to check one takes a millisecond."""
        self._known: dict[str, int] = {}
        """Segment -> the number of the session's rows that were indexed."""
        self._places: dict[str, Place] = {}

    def refresh(self) -> None:
        """Index the rows that are new since the last time. Raises `OSError` and `RunError`."""
        for place in self._archive.new_places(self._session_id, self._known):
            row = self._row(place, ("call_id",), check=False)
            if row is not None:
                self._places.setdefault(row["call_id"], place)
            self._known[place[0]] = place[1] + 1

    def find(self, call_id: str) -> StoredCall | None:
        """Return a completed call; None for a damaged one too. Raises `OSError`."""
        if call_id not in self._places:
            return None
        row = self._row(self._places[call_id], (*_COLUMNS, "status"))
        if row is None or row["status"] != "completed" or row["reply"] is None:
            return None
        return StoredCall(**{name: row[name] for name in _COLUMNS})

    def _row(self, place: Place, columns: Sequence[str], *, check: bool = True) -> dict[str, Any] | None:
        """Return columns of a row, or None when it is damaged. A row is checked once."""
        batch = self._archive.row(self._session_id, place)
        try:
            values: dict[str, Any]
            (values,) = batch.select([*columns, DIGEST]).to_pylist()
        except (ValueError, OverflowError):  # values that Python does not have
            return None
        if check and values[DIGEST] not in self._checked:
            if undamaged(batch, CALL_SCHEMA) is None:
                return None
            self._checked.add(values[DIGEST])
        return values
