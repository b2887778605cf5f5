"""Replies, conversations and cached contents that a session stored, read from its own rows at each request."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.dialects import google, openai_responses
from rolltap.addons.dialects.images import refuse_hidden
from rolltap.addons.dialects.model_call import DialectError, Usage, dump_json
from rolltap.addons.dialects.stored import Entry, Stored, StoredAnswer, StoredCall, StoredRequest
from rolltap.addons.endpoint.recovery import undamaged
from rolltap.addons.endpoint.request import ClientRequest
from rolltap.addons.options import Images
from rolltap.addons.store.records import CALL_SCHEMA, DIGEST, EVENT_SCHEMA, json_text
from rolltap.addons.store.sessions import SessionIndex
from rolltap.addons.store.tables import RunWriter

_SERVE: dict[str, Callable[[StoredRequest, Stored], StoredAnswer]] = {
    openai_responses.NAME: openai_responses.serve,
    google.NAME: google.serve,
}
"""Functions that answer requests about what is stored, by the name of the API."""

STORED_BYTES = 4 * 1024 * 1024
"""Maximum bytes of the entries that a session stores, deleted ones too: each request that names one reads them all."""
ENTRY_BYTES = 4096
"""Bytes that an entry counts besides its text, so that a session has a thousand at most."""
_TEXTS = ("call_id", "parent_id", "model", "messages", "reply", "sampling", "finish_reason")
_CALL_COLUMNS = (*_TEXTS, "status", "prompt_length", "cached_tokens", "started_at")
_ENTRY_COLUMNS = ("call_id", "path", "detail")


class Archive:
    """The rows of the sessions of a run. Thread-safe. Its files are read when something in them is first named."""

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

    def __init__(self, archive: Archive, writer: RunWriter, session_id: str, images: Images) -> None:
        self._archive, self._writer, self._session_id, self._images = archive, writer, session_id, images
        self._checked: set[str] = set()
        """Digests of the rows that are known to be undamaged: to check one takes a millisecond."""
        self.num_bytes = 0
        """Bytes of the entries, as of the last request."""

    def read(self) -> Stored:
        """Return what is stored now. A damaged call is left out, so that it is not found; an entry is not.

        Raises `OSError` and `RunError`. Call it in a worker thread: it takes 60 µs a call of the session.
        """
        calls: dict[str, StoredCall] = {}
        for batch in self._archive.batches(self._session_id, "calls"):
            calls |= self._calls(batch)
        objects: dict[str, list[str]] = {}
        num_bytes, damaged = 0, False
        for batch in self._archive.batches(self._session_id, "events"):
            batch = batch.filter(pc.equal(batch.column("kind"), "stored"))
            for number in range(batch.num_rows):
                row = self._row(batch.slice(number, 1), EVENT_SCHEMA, _ENTRY_COLUMNS)
                if row is None:
                    damaged = True
                    continue
                num_bytes += _size(row["detail"])
                if row["call_id"] is None or row["call_id"] in calls:
                    objects.setdefault(row["path"], []).append(row["detail"])
        self.num_bytes = num_bytes
        return Stored(calls, objects, damaged)

    def answer(self, api: str, body: bytes, request: ClientRequest) -> tuple[bytes, int]:
        """Answer a request about what is stored, after a commit of what it adds. Also return how many parts that hides.

        Raises as `read`, and `DialectError` for an invalid request and for what is not stored.
        """
        stored = self.read()
        asked = StoredRequest(request.method, request.target, body, uuid.uuid4().hex, int(time.time()))
        answered = _SERVE[api](asked, stored)
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
                f"This session has stored {self.num_bytes:,} bytes of conversations and cached contents, of which each "
                f"entry counts {ENTRY_BYTES:,} more than its text. More than {STORED_BYTES:,} are not kept. Send the "
                "items in the requests themselves."
            )
        self._writer.require_room()
        self._writer.add_event(replace(request.event("stored", detail, call_id), path=path))

    def _calls(self, batch: pa.RecordBatch) -> dict[str, StoredCall]:
        found: dict[str, StoredCall] = {}
        for number in range(batch.num_rows):
            row = self._row(batch.slice(number, 1), CALL_SCHEMA, _CALL_COLUMNS)
            if row is None or row["status"] != "completed" or row["reply"] is None:
                continue
            length = pc.list_value_length(batch.column("completion_ids")[number]).as_py()
            found[row["call_id"]] = StoredCall(
                **{name: row[name] for name in _TEXTS},
                created=int(row["started_at"].timestamp()),
                usage=Usage(row["prompt_length"], length, row["cached_tokens"] or 0),
            )
        return found

    def _row(self, row: pa.RecordBatch, schema: pa.Schema, columns: Sequence[str]) -> dict[str, Any] | None:
        """Return columns of a batch of one row, or None when it is damaged. A row is checked once."""
        try:
            values: dict[str, Any]
            (values,) = row.select([*columns, DIGEST]).to_pylist()
        except (ValueError, OverflowError):  # values that Python does not have
            return None
        if values[DIGEST] not in self._checked:
            if undamaged(row, schema) is None:
                return None
            self._checked.add(values[DIGEST])
        return values


def _size(detail: str) -> int:
    return len(detail.encode("utf-8", "replace")) + ENTRY_BYTES
