"""The traces of a run as a data set that `datasets.load_from_disk` opens."""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import DatasetInfo

from rolltap.addons.calls import CallRole
from rolltap.addons.store import read_batches
from rolltap.trainer.dataset import RecordedSession, iter_sessions, load_sessions
from rolltap.trainer.features import TRACE_FEATURES, trace_row
from rolltap.trainer.folders import new_folder
from rolltap.trainer.ledger import Ledger, LedgerError
from rolltap.trainer.shards import ShardWriter
from rolltap.trainer.traces import TRAINED_ROLES, Strategy, Trace, build_traces, label


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
            self.harnesses[session.harness] += 1
            self.tasks.add(session.task_id)
            if session.reward is not None:
                self.rewarded += 1
                self.reward_sum += session.reward


def iter_traces(run: Path, selection: Selection) -> Iterator[TracedSession]:
    """Every session of a run with its traces, one at a time. Traces of a session without a reward have none.

    Raises `RunError` when the folder cannot be read, and `LedgerError`.
    """
    for recorded in iter_sessions(run):
        try:
            traces, ledger = build_traces(
                recorded.calls, selection.strategy, roles=selection.roles, max_tokens=selection.max_tokens
            )
        except LedgerError as error:
            raise LedgerError(f"session {recorded.session_id}: {error}; this is a bug of rolltap") from error
        if recorded.session is not None:
            label(traces, recorded.session)
        yield TracedSession(recorded, traces, ledger)


def count_sessions(run: Path) -> int:
    """How many sessions `iter_traces` yields, without reading their tokens. Raises `RunError`."""
    found = set(load_sessions(run))
    for batch in read_batches(run, "calls"):
        found.update(batch.column("session_id").unique().to_pylist())
    return len(found)


def save_traces(sessions: Iterable[TracedSession], out: Path, card: Callable[[], str]) -> None:
    """Write the traces of `sessions` to the folder `out`, and at the end what `card` returns as its README.md.

    Raises as `new_folder`, and what `sessions` raises; then there is no `out`.
    """
    with new_folder(out) as folder:
        with ShardWriter(folder, "data", "arrow", TRACE_FEATURES) as shards:
            for traced in sessions:
                shards.add(map(trace_row, traced.traces))
        DatasetInfo(features=TRACE_FEATURES).write_to_directory(str(folder))
        # as Dataset.save_to_disk writes it; that would need all rows in a dataset first, and write them twice
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in shards.names],
            "_fingerprint": secrets.token_hex(8),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        (folder / "README.md").write_text(card())
