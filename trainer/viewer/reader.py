"""Lazy reading of a run: the sessions' rows at once, their calls one session after the other behind
the page's back.

Memory is that of the rows and of a digest of each session. No tokens are kept but those of the last
sessions asked for.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.errors import InputError, RolltapError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import Session
from rolltap.addons.store.staging import locked
from rolltap.addons.store.tables import run_files
from rolltap.trainer.runs.suspicions.rules import EVENT_COLUMNS
from rolltap.trainer.runs.views.sessions import SessionDigest, digest_session
from rolltap.trainer.runs.views.text import TokenText, load_text
from rolltap.trainer.traces.build import classify_calls
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedSession, SessionTable, rebuild_calls
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from rolltap.trainer.traces.trained import TrainedSession, read_trained, trained_steps

LOOK_SECONDS = 1.0
"""Seconds between two looks at a folder in which nothing is left to read."""
_PAUSE_SECONDS = 0.01
"""Seconds between two looks at whether a request is still being answered."""
RECENT = 4
"""Sessions whose calls are kept, because the page asks for one of them again and again."""
_TABLES = ("calls", "events", "trained")
_EVENT = (*EVENT_COLUMNS, "call_id", "path", "detail")

RowCounts = tuple[int, ...]
"""How often a session's row has changed, and the numbers of its rows in `_TABLES`. They differ when
the session has grown."""


class UnknownError(InputError):
    """There is no session, call or path of this name."""


@dataclass
class LoadedSession:
    """A session with its calls and its events."""

    recorded: RecordedSession
    events: list[dict[str, Any]] = field(repr=False)
    trained: list[TrainedSession]
    """The session in the optimizer steps that took it, oldest first."""

    @cached_property
    def classified(self) -> tuple[list[int | None], list[LeftOut | None]]:
        """The parents and reasons of `classify_calls`."""
        return classify_calls(self.recorded.calls)

    def digest(self) -> SessionDigest:
        """Count the session. Raises `LedgerError`."""
        newest = self.trained[-1] if self.trained else None
        traced = trace_session(self.recorded, TraceOptions())
        return digest_session(traced, self.events, newest)


@dataclass(slots=True)
class Entry:
    """All that is known of a session without its calls."""

    session_id: str
    session: Session | None = None
    """Its row; None when only calls were recorded so far."""
    row_changes: int = 0
    row_counts: RowCounts | None = None
    """Counts when its calls were read; None before. With other counts they are read again."""
    digest: SessionDigest | None = None
    """None also when its calls cannot be read: `fault` says why."""
    fault: str = ""
    version: int = 0
    """The reader's version with which it changed."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All that is known of a run without reading a session."""

    entries: list[Entry]
    further: list[dict[str, Any]]
    """Events without a session, and of sessions that have events only."""
    faults: list[str]
    trained: list[TrainedSession]
    """The sessions of a training's optimizer steps, by step."""

    @property
    def progress(self) -> dict[str, int]:
        """How many sessions were read, or cannot be, of how many."""
        read = sum(entry.row_counts is not None for entry in self.entries)
        return {"sessions": read, "of": len(self.entries)}


class RunReader:
    """Reads a run that may still be written. Thread-safe.

    `step` reads the next session. `start` does so in a thread, which waits while a request is
    answered.
    """

    def __init__(self, run: Path, only: Collection[str] | None = None) -> None:
        """With `only`, the run is read as if it had these sessions alone."""
        self.run = run
        self.version = 0
        """Grows with each change of what the page shows."""
        self.known_text: TokenText | str | None = None
        """None until `text` was called."""
        self._only = only
        self._once = threading.Lock()
        """Held while the first index is made, and the tokenizer is loaded. Both take seconds."""
        self._lock = threading.RLock()
        """Guards all else."""
        self._answering = 0
        """Number of requests that are being answered."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._sessions = SessionTable(run)
        self._indexes: dict[str, SessionIndex] = {}
        """Table -> its index, of `_TABLES`; empty until `_make_indexes`."""
        self._entries: dict[str, Entry] = {}
        self._stale: deque[Entry] = deque()
        """Entries whose calls are to be read."""
        self._recent = lru_cache(RECENT)(self._load)
        self._further: list[dict[str, Any]] = []
        self._trained: list[TrainedSession] = []
        self._trained_files: list[tuple[str, int]] = []
        """Names and sizes of the files that `_trained` was read from."""
        self._fault = ""
        """Why the thread cannot read on."""

    def start(self) -> None:
        """Begin to read the sessions, in a thread of its own; does nothing the second time."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rolltap view", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def pause_reading(self) -> Iterator[None]:
        """Keep the thread from reading on while a request is answered."""
        with self._lock:
            self._answering += 1
        try:
            yield
        finally:
            with self._lock:
                self._answering -= 1

    def _work(self) -> None:
        while not self._closed.is_set():
            if self._answering:
                self._closed.wait(_PAUSE_SECONDS)
            elif not self._try_step():
                self._closed.wait(LOOK_SECONDS)

    def _try_step(self) -> bool:
        """Read one session as `step`. What keeps it from that is shown as a fault of the run."""
        has_read = False
        fault = ""
        try:
            has_read = self.step()
            self.text()
        except (RolltapError, OSError, pa.ArrowException) as error:
            fault = str(error)
        if fault != self._fault:
            self._fault = fault
            self._change()
        return has_read

    def step(self) -> bool:
        """Read one session that is new or has new rows. Return False when there was none."""
        self._make_indexes()
        with self._lock:
            if not self._stale:
                self._look()
                for entry in self._entries.values():
                    if entry.row_counts != self._row_counts(entry):
                        self._stale.append(entry)
            if not self._stale:
                return False
            self._read(self._stale.popleft())
        return True

    def _read(self, entry: Entry) -> None:
        entry.row_counts = self._row_counts(entry)
        entry.fault = ""
        try:
            entry.digest = self._load(entry.session_id, entry.row_counts).digest()
        except Exception as error:  # the rows may hold anything; the other sessions are read
            reason = repr(error)
            if isinstance(error, RolltapError | OSError):
                reason = str(error)
            entry.fault = f"session {entry.session_id} cannot be read: {reason}"
        self._change(entry)

    def _make_indexes(self) -> None:
        with self._once:
            if not self._indexes:
                with self._lock:
                    self._look()  # the first answers need the rows alone
                self._indexes = {table: SessionIndex(self.run, table) for table in _TABLES}

    def _look(self) -> None:
        """Read what is new in all tables that have an index, and the rows of the sessions."""
        rows = self._sessions.refresh()
        self._add_entries(rows)
        for index in self._indexes.values():
            index.refresh()
        if self._indexes:
            self._add_entries(self._indexes["calls"].session_ids)
        for entry in self._entries.values():
            row = rows.get(entry.session_id)
            # a row that was only read again, after a compaction, is another object
            if row is not entry.session and row != entry.session:
                entry.session = row
                entry.row_changes += 1
                self._change(entry)

    def _add_entries(self, session_ids: Collection[str | None]) -> None:
        for session_id in session_ids:
            if session_id is None or session_id in self._entries:
                continue
            if self._only is None or session_id in self._only:
                self._entries[session_id] = Entry(session_id)

    def _change(self, entry: Entry | None = None) -> None:
        with self._lock:
            self.version += 1
            if entry is not None:
                entry.version = self.version

    def changes(self, since: int) -> list[str]:
        """Return the sessions that changed since the version `since`."""
        with self._lock:
            return [entry.session_id for entry in self._entries.values() if entry.version > since]

    def _row_counts(self, entry: Entry) -> RowCounts:
        counts = [index.count(entry.session_id) for index in self._indexes.values()]
        return (entry.row_changes, *counts)

    def _load(self, session_id: str, _: RowCounts) -> LoadedSession:
        """Read a session. The counts are for the cache: with others it is read again."""
        try:
            recorded = RecordedSession(
                session_id=session_id,
                session=self._sessions.rows.get(session_id),
                calls=rebuild_calls(
                    self.run, session_id, self._indexes["calls"].batches(session_id)
                ),
            )
            trained = trained_steps(self._indexes["trained"], session_id)
            return LoadedSession(recorded, self._events(session_id), trained)
        finally:
            self._close_files()

    def _events(self, session_id: str | None) -> list[dict[str, Any]]:
        return list(self._indexes["events"].rows(session_id, _EVENT))

    def _close_files(self) -> None:
        for index in self._indexes.values():
            index.close()

    def session(self, session_id: str) -> LoadedSession:
        """Return a session as it is now. Raises `UnknownError`, and `RunError` when it cannot be
        read."""
        self._make_indexes()
        with self._lock:
            self._look()
            entry = self._entries.get(session_id)
            if entry is None:
                raise UnknownError(
                    f"the run has no session {session_id[:200]!r}: go back to the list of sessions"
                )
            return self._recent(session_id, self._row_counts(entry))

    def overview(self) -> Overview:
        """Return what is known of all sessions. Reads no calls."""
        with self._lock:
            self._look()
            self._read_trained()
            self._read_further()
            entries = list(self._entries.values())
            return Overview(entries, self._further, self._faults(), self._trained)

    def _faults(self) -> list[str]:
        faults = []
        for scan in (self._sessions.scan, *(index.scan for index in self._indexes.values())):
            for name, damage in scan.damage.items():
                for offset, reason in damage.items():
                    faults.append(f"{name}, byte {offset}: {reason}; see `rolltap verify`")
        changed = self._sessions.changed
        if changed:
            faults.append(
                f"the rows of {len(changed)} sessions were changed after they were written "
                f"({min(changed)}, ...): their rewards are not used"
            )
        further = [self._fault, *(entry.fault for entry in self._entries.values())]
        return [*faults, *filter(None, further)]

    def _read_trained(self) -> None:
        files = [(path.name, path.lstat().st_size) for path in run_files(self.run, "trained")]
        if files != self._trained_files:
            self._trained = read_trained(self.run)
            self._trained_files = files

    def _read_further(self) -> None:
        if not self._indexes or self._only is not None:
            return
        events = self._indexes["events"]
        others = [each for each in events.session_ids if each not in self._entries]
        if sum(map(events.count, others)) != len(self._further):
            self._further = []
            for other in others:
                self._further += self._events(other)
            self._close_files()

    def text(self) -> TokenText | str:
        """Return the text of the run's tokens, or why it is not known. The first time takes
        seconds."""
        with self._once:
            if self.known_text is None:
                self.known_text = load_text(self.run)
                self._change()
            return self.known_text

    def recording(self) -> bool:
        """Return True when a process has a segment of the run open."""
        for table in ("sessions", *_TABLES):
            for path in run_files(self.run, table):
                try:
                    with locked(path) as lock:
                        is_open = lock is None
                except OSError:  # compacted, or on a file system without locks
                    continue
                if is_open:
                    return True
        return False
