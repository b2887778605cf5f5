"""Recorded sessions -> labelled traces and their ledger, as somebody selects them."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.records import CallRole
from rolltap.trainer.traces.build import TRAINED_ROLES, GroupReward, Strategy, Trace, TraceBatch, build_traces
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Which traces to build: the arguments of `build_traces`."""

    strategy: Strategy = "prefix_merging"
    roles: Collection[CallRole] = TRAINED_ROLES
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSession:
    """A session, its traces with their labels, and the ledger of all that was sampled in it."""

    recorded: RecordedSession
    traces: list[Trace]
    ledger: Ledger

    @property
    def reward(self) -> float | None:
        """None when the session has none, or no row."""
        return self.recorded.session.reward if self.recorded.session else None

    def rewarded(self) -> "TracedSession":
        """The session for a trainer that needs a reward: without one it has no traces, and their tokens are left out as
        `no_reward`."""
        if self.reward is not None:
            return self
        moved = Ledger(trained=-self.ledger.trained, left_out={"no_reward": self.ledger.trained})
        return replace(self, traces=[], ledger=self.ledger + moved)


@dataclass(slots=True)
class Totals:
    """Counts of sessions and of what they became."""

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
        if traced.reward is not None:
            self.rewarded += 1
            self.reward_sum += traced.reward


def trace_session(recorded: RecordedSession, options: TraceOptions) -> TracedSession:
    """Build the traces of a session. Those of a session without a row have no labels.

    Raises `LedgerError` when the ledger does not have every sampled token of the session.
    """
    calls, session = recorded.calls, recorded.session
    sampled = sum(len(call.completion_ids) for call in calls)
    try:
        traces, ledger = build_traces(calls, options.strategy, roles=options.roles, max_tokens=options.max_tokens)
        if ledger.sampled != sampled:
            raise LedgerError(f"the calls hold {sampled} sampled tokens, the ledger says {ledger.sampled}")
    except LedgerError as error:
        raise LedgerError(f"session {recorded.session_id}: {error}; this is a bug of rolltap") from error
    if session is not None:
        for trace in traces:
            trace.task_id, trace.group_id = session.task_id, session.group_id
            trace.harness, trace.reward = session.harness, session.reward
    return TracedSession(recorded=recorded, traces=traces, ledger=ledger)


def iter_traces(run: Path, options: TraceOptions, sessions: Collection[str] | None = None) -> Iterator[TracedSession]:
    """Every session of a run with its traces, one at a time; with `sessions`, only those of these session ids.

    Raises `RunError` when the folder cannot be read, and `LedgerError`.
    """
    return (trace_session(recorded, options) for recorded in iter_sessions(run, sessions))


def load_batch(run: Path, sessions: Collection[str], options: TraceOptions) -> tuple[TraceBatch, Ledger]:
    """The batch of these session ids, and the ledger of all their tokens. Raises as `iter_traces`."""
    batch, ledger = TraceBatch(traces=[], rewards={}), Ledger()
    for traced in iter_traces(run, options, sessions):
        traced = traced.rewarded()
        ledger += traced.ledger
        batch.traces += traced.traces
        if (session := traced.recorded.session) is not None and session.reward is not None:
            batch.rewards[session.session_id] = GroupReward(group_id=session.group_id, reward=session.reward)
    ledger.check()
    return batch, ledger
