"""The tokens of recorded sessions, counted while others are recorded."""

import threading
from pathlib import Path

from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import Session
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import RecordedSession, rebuild_calls
from rolltap.trainer.traces.sessions import TraceOptions, trace_session


class Ledgers:
    """The tokens of recorded sessions, also while others are recorded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Path, SessionIndex] = {}
        """Run folder -> its calls."""

    def of(self, run: Path, session: Session) -> Ledger:
        """Return the ledger of a session. Raises `RunError` and `OSError`."""
        with self._lock:
            if run not in self._calls:
                self._calls[run] = SessionIndex(run, "calls")
            with self._calls[run] as index:
                index.refresh()
                batches = index.batches(session.session_id)
                calls = rebuild_calls(run, session.session_id, batches, check_digests=False)
        recorded = RecordedSession(session_id=session.session_id, session=session, calls=calls)
        return trace_session(recorded, TraceOptions()).rewarded().ledger
