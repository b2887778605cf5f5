"""Replies and conversations that a session stored. Rows are read as far as a request needs them."""

import json
import threading
import time
import uuid
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.images import refuse_hidden
from rolltap.addons.dialects.model_call import DialectError, Usage, dump_json
from rolltap.addons.dialects.stored import Entry, Stored, StoredAnswer, StoredCall, StoredRequest
from rolltap.addons.endpoint.recovery import undamaged, usage_of
from rolltap.addons.endpoint.request import ClientRequest
from rolltap.addons.errors import RunError
from rolltap.addons.options import Images
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.store.records import DIGEST, json_text
from rolltap.addons.store.sessions import Place, SessionIndex
from rolltap.addons.store.tables import TABLES, RunWriter

_SERVE: dict[str, Callable[[StoredRequest, Stored], StoredAnswer]] = {
    openai_responses.NAME: openai_responses.serve,
}
"""Functions that answer requests about what is stored, by the name of the API."""

STORED_BYTES = 4 * 1024 * 1024
"""Maximum bytes of the entries that a session stores, deleted ones too: a request may name the object that has all."""
ENTRY_BYTES = 4096
"""Bytes that an entry counts besides its text, so that a session has a thousand at most."""
_TEXTS = ("call_id", "parent_id", "model", "messages", "reply", "sampling", "finish_reason")
_CALL_COLUMNS = (*_TEXTS, "status", "prompt_length", "cached_tokens", "started_at", "finished_at", "completion_ids")
_ENTRY_COLUMNS = ("call_id", "path", "detail")


class Archive:
    """The rows of the sessions of a run. Thread-safe. Its files are read when something in them is first named."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._indices: dict[str, SessionIndex] = {}

    def new_places(self, session_id: str, table: str, known: dict[str, int]) -> list[Place]:
        """Return the places of rows that were committed since: see `SessionIndex`. Raises `OSError` and `RunError`."""
        with self._lock:
            index = self._indices.get(table)
            if index is None:
                index = self._indices[table] = SessionIndex(self._run, table)
            else:
                index.close()  # `row` leaves segments mapped for the rows that the same request names
                index.refresh()
            return list(index.new_places(session_id, known))

    def row(self, session_id: str, table: str, place: Place) -> pa.RecordBatch:
        """Return one row. Raises `OSError`."""
        with self._lock:
            return self._indices[table].row(session_id, place)

    def issue(self, session_id: str, answer: Callable[[str], StoredAnswer]) -> StoredAnswer:
        """Return what `answer` makes of an id for what a request of the session adds."""
        return answer(uuid.uuid4().hex)


class _Rows(UserDict[str, Any]):
    """Values that `read` returns for their keys, when they are first asked for; None for no value."""

    def __init__(self, places: dict[str, Any], read: Callable[[str], Any]) -> None:
        self.data, self._read = places, cache(read)

    def __getitem__(self, key: str) -> Any:
        return self._read(key)


class SessionStore:
    """The replies and objects that one session stored. Not thread-safe: one worker at a time."""

    def __init__(
        self, archive: Archive, writer: RunWriter, session_id: str, images: Images, rendering: Rendering
    ) -> None:
        self._archive, self._writer, self._session_id, self._images = archive, writer, session_id, images
        self._rendering = rendering
        self._checked: set[str] = set()
        """Digests of the rows that are known to be undamaged: to check one takes a millisecond."""
        self._known: dict[str, dict[str, int]] = {"calls": {}, "events": {}}
        """Table -> segment -> the number of the session's rows that were indexed."""
        self._calls: dict[str, Place] = {}
        self._entries: dict[str, list[Place]] = {}
        """Path of an object -> the rows of its entries."""
        self._damaged = False
        self.num_bytes = 0
        """Bytes of the entries, as of the last request."""

    def read(self) -> Stored:
        """Return what is stored now. A damaged call is left out, so that it is not found; an entry is not.

        It indexes the rows that are new since the last request. A call or an entry is read when it is looked at.
        Raises `OSError` and `RunError`. Call it, and look at what it returns, in a worker thread.
        """
        for place in self._new("calls"):
            if (row := self._row("calls", place, ("call_id",), check=False)) is not None:
                self._calls.setdefault(row["call_id"], place)
        for place in self._new("events"):
            row = self._row("events", place, ("kind",), check=False)
            if row is None or row["kind"] != "stored":
                continue
            if (row := self._row("events", place, _ENTRY_COLUMNS)) is None:
                self._damaged = True
                continue
            self.num_bytes += _size(row["detail"])
            self._entries.setdefault(row["path"], []).append(place)
        calls = _Rows(self._calls, self._call)
        return Stored(calls, _Rows(self._entries, lambda path: self._details(path, calls)), self._damaged)

    def answer(self, api: str, body: bytes, request: ClientRequest) -> tuple[bytes, int]:
        """Answer a request about what is stored, after a commit of what it adds. Also return how many parts that hides.

        Raises as `read`, and `DialectError` for an invalid request and for what is not stored.
        """
        stored, now = self.read(), int(time.time())
        answered = self._archive.issue(
            self._session_id,
            lambda new_id: _SERVE[api](StoredRequest(request.method, request.target, body, new_id, now), stored),
        )
        if self._images == "refuse":
            refuse_hidden(answered.hidden)
        if answered.entry is not None:
            self.add(request, answered.path, answered.entry)
        return dump_json(answered.body), answered.hidden

    def add(self, request: ClientRequest, path: str, entry: Entry, call_id: str | None = None) -> None:
        """Commit an entry, or one that counts once its call is completed. Call it in a worker thread, after `read`.

        Raises `DialectError` when the session would store too much, and `OSError`.
        """
        entry = entry if call_id is None else {**entry, "call": call_id}
        detail = json_text(entry)
        if self.num_bytes + _size(detail) > STORED_BYTES:
            raise DialectError(
                f"This session has stored {self.num_bytes:,} bytes of conversations, of which each "
                f"entry counts {ENTRY_BYTES:,} more than its text. More than {STORED_BYTES:,} are not kept. Send the "
                "items in the requests themselves."
            )
        self._writer.require_room()
        self._writer.add_event(replace(request.event("stored", detail, call_id), path=path))

    def _new(self, table: str) -> Iterator[Place]:
        """Yield the rows that were not yielded before."""
        known = self._known[table]
        for name, number in self._archive.new_places(self._session_id, table, known):
            yield name, number
            known[name] = number + 1

    def _call(self, call_id: str) -> StoredCall | None:
        row = self._row("calls", self._calls[call_id], _CALL_COLUMNS) if call_id in self._calls else None
        if row is None or row["status"] != "completed" or row["reply"] is None:
            return None
        return StoredCall(
            **{name: row[name] for name in _TEXTS},
            created=int(row["started_at"].timestamp()),
            usage=partial(self._usage, row),
        )

    def _usage(self, row: dict[str, Any]) -> Usage:
        reasoning = json.loads(row["reply"]).get("reasoning_content", "")
        return usage_of(row, row["completion_ids"], reasoning, self._rendering)

    def _details(self, path: str, calls: Mapping[str, StoredCall]) -> list[str] | None:
        """Return the texts of an object's entries that count."""
        rows = [self._row("events", place, _ENTRY_COLUMNS) for place in self._entries.get(path, ())]
        if None in rows:
            raise RunError(f"an entry of {path} is damaged")
        return [row["detail"] for row in rows if row and (row["call_id"] is None or calls[row["call_id"]])] or None

    def _row(self, table: str, place: Place, columns: Sequence[str], *, check: bool = True) -> dict[str, Any] | None:
        """Return columns of a row, or None when it is damaged. A row is checked once."""
        batch = self._archive.row(self._session_id, table, place)
        try:
            values: dict[str, Any]
            (values,) = batch.select([*columns, DIGEST]).to_pylist()
        except (ValueError, OverflowError):  # values that Python does not have
            return None
        if check and values[DIGEST] not in self._checked:
            if undamaged(batch, TABLES[table]) is None:
                return None
            self._checked.add(values[DIGEST])
        return values


def _size(detail: str) -> int:
    return len(detail.encode("utf-8", "replace")) + ENTRY_BYTES
