"""The traces of a run, session by session, as somebody selects them."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rolltap.addons.store.records import CallRole
from rolltap.trainer.traces.build import TRAINED_ROLES, Strategy, Trace, build_traces, label
from rolltap.trainer.traces.ledger import Ledger, LedgerError
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions


@dataclass(frozen=True, slots=True)
class Selection:
    """Which traces to build: the arguments of `build_traces`."""

    strategy: Strategy = "prefix_merging"
    roles: Collection[CallRole] = TRAINED_ROLES
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TracedSession:
    """A session, its traces with their labels, and their ledger."""

    recorded: RecordedSession
    traces: list[Trace]
    ledger: Ledger


@dataclass(slots=True)
class Totals:
    """What went out, counted."""

    sessions: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0
    harnesses: Counter[str] = field(default_factory=Counter)
    """Sessions of each."""
    tasks: set[str] = field(default_factory=set)
    calls: int = 0
    traces: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def add(self, traced: TracedSession) -> None:
        """Count a session."""
        self.sessions += 1
        self.calls += len(traced.recorded.calls)
        self.traces += len(traced.traces)
        self.ledger += traced.ledger
        if session := traced.recorded.session:
            self.harnesses.update(filter(None, [session.harness]))
            self.tasks.update(filter(None, [session.task_id]))
            if session.reward is not None:
                self.rewarded += 1
                self.reward_sum += session.reward


def iter_traces(run: Path, selection: Selection, sessions: Collection[str] | None = None) -> Iterator[TracedSession]:
    """Every session of a run with its traces, one at a time. Traces of a session without a reward have none.

    With `sessions`, only those of these session ids.

    Raises `RunError` when the folder cannot be read, and `LedgerError`.
    """
    for recorded in iter_sessions(run, sessions):
        try:
            traces, ledger = build_traces(
                recorded.calls, selection.strategy, roles=selection.roles, max_tokens=selection.max_tokens
            )
        except LedgerError as error:
            raise LedgerError(f"session {recorded.session_id}: {error}; this is a bug of rolltap") from error
        if recorded.session is not None:
            label(traces, recorded.session)
        yield TracedSession(recorded, traces, ledger)
