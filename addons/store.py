"""The crash-safe Arrow store: a run folder of append-only IPC stream files.

One commit is one record batch, handed to the operating system in a single `write`. Killing the process at any
instruction therefore loses at most the batch being written; readers skip a truncated tail and say so. Every writer
process has its own files, so several may record into one run.
"""

import json
import logging
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.calls import CALL_SCHEMA, EVENT_SCHEMA, SCHEMA_VERSION, SESSION_SCHEMA, Call, Event, Session

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
TABLES = {"calls": CALL_SCHEMA, "sessions": SESSION_SCHEMA, "events": EVENT_SCHEMA}
_ROWS = {table: pa.struct(list(schema)) for table, schema in TABLES.items()}
"""A row as one value, which pyarrow makes in half the time that it takes for a list of columns."""


class RunError(Exception):
    """A run folder that cannot be read or written; the message says what to do."""


def read_metadata(run: Path) -> dict[str, Any]:
    """The contents of `run.json`.

    Raises `RunError` when there is none, when it is damaged, and when another schema wrote it.
    """
    path = run / RUN_FILE
    try:
        metadata: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{run} is not a run folder: it has no {RUN_FILE}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    version = metadata.get("schema_version") if isinstance(metadata, dict) else None
    if not isinstance(version, int):
        raise RunError(f"{path} names no schema_version")
    if version != SCHEMA_VERSION:
        other = "a newer" if version > SCHEMA_VERSION else "an older"
        raise RunError(f"{run} has schema {version}, this rolltap reads {SCHEMA_VERSION}: read it with {other} rolltap")
    return metadata


def write_metadata(run: Path, metadata: dict[str, Any]) -> None:
    """Create the run folder and its `run.json`, or check that the folder belongs to the same model.

    A run holds token ids of one tokenizer: raises `RunError` when `run.json` names another tokenizer or template.
    """
    run.mkdir(parents=True, exist_ok=True)
    if (run / RUN_FILE).exists():
        known = read_metadata(run)
        for key in ("tokenizer_sha256", "chat_template_sha256"):
            if key in known and known[key] != metadata.get(key):
                raise RunError(f"{run} was recorded with another {key.removesuffix('_sha256')}: choose a new folder")
        return
    write_atomically(run / RUN_FILE, json.dumps({"schema_version": SCHEMA_VERSION, **metadata}, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old contents or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


class RunWriter:
    """Appends calls, sessions and events to a run folder; one instance per process.

    Files appear with their first row. Raises `OSError` when a commit could not be written, in which case nothing
    of it is readable either.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._suffix = f"{time.time_ns():x}-{os.getpid()}"
        self._files: dict[str, int] = {}

    def add_call(self, call: Call) -> None:
        """Commit one call."""
        self._commit("calls", call.to_row())

    def add_session(self, session: Session) -> None:
        """Commit one session."""
        self._commit("sessions", session.to_row())

    def add_event(self, event: Event) -> None:
        """Commit one event."""
        self._commit("events", event.to_row())

    def close(self) -> None:
        """Close the files. They need no end marker: a stream ends where its bytes end."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _commit(self, table: str, row: dict[str, Any]) -> None:
        schema = TABLES[table]
        batch = pa.RecordBatch.from_struct_array(pa.array([row], _ROWS[table]))
        if table not in self._files:
            path = self.run / f"{table}-{self._suffix}.arrow"
            self._files[table] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        descriptor = self._files[table]
        if os.fstat(descriptor).st_size == 0:  # new, or its first write failed
            _write_all(descriptor, schema.serialize())
        _write_all(descriptor, batch.serialize())


def _write_all(descriptor: int, buffer: pa.Buffer) -> None:
    """Append all of `buffer`, or take back what part of it was written and raise."""
    start = os.lseek(descriptor, 0, os.SEEK_END)
    view = memoryview(buffer)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, start)
        raise


def read_batches(run: Path, table: str, sessions: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of one table (`calls`, `sessions` or `events`) in the order they were committed, file by file.

    With `sessions`, only the rows of these session ids. A truncated tail, which a crash leaves behind, is skipped
    with a warning.
    """
    read_metadata(run)
    wanted = None if sessions is None else pa.array(list(sessions), pa.string())
    for path in sorted(run.glob(f"{table}-*.arrow")):
        yield from _read_file(path, wanted)


def read_rows(run: Path, table: str, sessions: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of `read_batches`, one by one."""
    for batch in read_batches(run, table, sessions):
        yield from batch.to_pylist()


def _read_file(path: Path, sessions: pa.Array | None) -> Iterator[pa.RecordBatch]:
    rows = 0
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                rows += batch.num_rows
                if sessions is not None:
                    batch = batch.filter(pc.is_in(batch.column("session_id"), sessions))
                yield batch
    except (pa.ArrowInvalid, OSError) as error:
        logger.warning("%s: the last commit is incomplete and was skipped after %d rows (%s)", path, rows, error)
