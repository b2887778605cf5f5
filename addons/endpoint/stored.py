"""Replies, conversations and cached contents that a session stored, read from its rows.

Nothing of it is kept in memory: a restart, and the end of a state that nobody used, change nothing. A session finds
only what is its own.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.dialects import google, openai_responses
from rolltap.addons.dialects.stored import Entry, NamesStored, Stored, StoredAnswer, StoredCall, StoredRequest
from rolltap.addons.dialects.types import DialectError, ModelCall, Usage, dump_json
from rolltap.addons.endpoint.body import BODY_LIMIT
from rolltap.addons.endpoint.client_request import ClientRequest
from rolltap.addons.endpoint.recovery import undamaged
from rolltap.addons.store.records import Event
from rolltap.addons.store.schemas import CALL_SCHEMA, EVENT_SCHEMA
from rolltap.addons.store.session_index import SessionIndex
from rolltap.addons.store.tables import RunWriter

_SERVE: dict[str, Callable[[StoredRequest, Stored], StoredAnswer]] = {
    openai_responses.NAME: openai_responses.serve,
    google.NAME: google.serve,
}
"""Functions that answer requests about what is stored, by the name of the API."""

STORED_BYTES = BODY_LIMIT
"""Maximum bytes of the entries that a session stores, deleted ones too."""
_ENTRY_BYTES = 1024
"""Bytes that an entry takes besides its text."""
_TEXTS = ("call_id", "parent_id", "model", "messages", "reply", "sampling", "finish_reason")
_COLUMNS = (*_TEXTS, "status", "prompt_length", "cached_tokens", "started_at")


class Archive:
    """The rows of the sessions of a run. Thread-safe; its files are read once something in them is named.

    After that, only what was committed since is read.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._indices: dict[str, SessionIndex] = {}

    def batches(self, session_id: str, table: str) -> list[pa.RecordBatch]:
        """Return the rows of a session as of now. Raises `OSError` and `RunError`."""
        with self._lock:
            index = self._indices.get(table)
            if index is None:
                index = self._indices[table] = SessionIndex(self._run, table)
            else:
                index.refresh()
            try:
                return list(index.batches(session_id))
            finally:
                index.close()


class SessionStore:
    """The replies and objects that one session stored. Not thread-safe: one worker at a time."""

    def __init__(self, archive: Archive, writer: RunWriter, session_id: str) -> None:
        self._archive, self._writer, self._session_id = archive, writer, session_id
        self._checked: set[str] = set()
        """Ids of the calls whose rows are known to be undamaged: to check one takes a millisecond."""

    def read(self) -> Stored:
        """Return what is stored now. Damaged rows are left out, so that what they stand for is not found.

        Raises `OSError` and `RunError`. Call it in a worker thread: it takes 60 µs a call of the session.
        """
        calls: dict[str, StoredCall] = {}
        for batch in self._archive.batches(self._session_id, "calls"):
            calls |= self._calls(batch)
        objects: dict[str, list[str]] = {}
        num_bytes = 0
        for batch in self._archive.batches(self._session_id, "events"):
            batch = batch.filter(pc.equal(batch.column("kind"), "stored"))
            for number in range(batch.num_rows):
                row = undamaged(batch.slice(number, 1), EVENT_SCHEMA)
                if row is None:
                    continue
                num_bytes += len(row["detail"]) + _ENTRY_BYTES
                if row["call_id"] is None or row["call_id"] in calls:
                    objects.setdefault(row["path"], []).append(row["detail"])
        return Stored(calls, objects, num_bytes)

    def complete(self, named: NamesStored) -> ModelCall:
        """Return a request decoded with what it names. Raises as `read`, and `DialectError` for what is not stored."""
        stored = self.read()
        model_call = named.complete(stored)
        if model_call.stores is not None:
            self._require_room(stored, model_call.stores[1])
        return model_call

    def answer(self, api: str, body: bytes, request: ClientRequest) -> bytes:
        """Answer a request of an API about what is stored. What it adds is committed before.

        Raises as `read`, and `DialectError` for an invalid request and for what is not stored.
        """
        stored = self.read()
        asked = StoredRequest(request.method, request.target, body, uuid.uuid4().hex, int(time.time()))
        answered = _SERVE[api](asked, stored)
        if answered.entry is not None:
            self._require_room(stored, answered.entry)
            self.add(request, answered.path, answered.entry)
        return dump_json(answered.body)

    def add(self, request: ClientRequest, path: str, entry: Entry, call_id: str | None = None) -> None:
        """Commit an entry of an object. One with `call_id` counts once that call is completed. Raises `OSError`."""
        detail = _text(entry if call_id is None else {**entry, "call": call_id})
        self._writer.add_event(
            Event(
                kind="stored",
                session_id=self._session_id,
                host=request.host,
                method=request.method,
                path=path,
                detail=detail,
                call_id=call_id,
            )
        )

    def _require_room(self, stored: Stored, entry: Entry) -> None:
        """Raise `DialectError` when a session would store too much, and `OSError` when the disk has no room."""
        if stored.num_bytes + len(_text(entry)) + _ENTRY_BYTES > STORED_BYTES:
            raise DialectError(
                f"This session has stored {stored.num_bytes:,} bytes of conversations and cached contents, and more "
                f"than {STORED_BYTES:,} are not kept. Send the items in the requests themselves."
            )
        self._writer.require_room()

    def _calls(self, batch: pa.RecordBatch) -> dict[str, StoredCall]:
        columns = {name: batch.column(name).to_pylist() for name in _COLUMNS}
        lengths = pc.list_value_length(batch.column("completion_ids")).to_pylist()
        found: dict[str, StoredCall] = {}
        for number, call_id in enumerate(columns["call_id"]):
            row: dict[str, Any] = {name: values[number] for name, values in columns.items()}
            if row["status"] != "completed" or row["reply"] is None:
                continue
            if call_id not in self._checked and undamaged(batch.slice(number, 1), CALL_SCHEMA) is None:
                continue
            self._checked.add(call_id)
            usage = Usage(row["prompt_length"], lengths[number], row["cached_tokens"] or 0)
            created = int(row["started_at"].timestamp())
            found[call_id] = StoredCall(**{name: row[name] for name in _TEXTS}, created=created, usage=usage)
        return found


def _text(entry: Entry) -> str:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))
