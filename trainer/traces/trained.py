"""Tokens that the optimizer steps of a training learned from, and the trainer's values.

A row of the table `trained` is one session of one optimizer step, whether its tokens were trained
or not. Lists of values are over the trained tokens alone, in the order of `TrainedSession.spans`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.index import SessionIndex, TableScan
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.tables import RunWriter, batch_rows
from rolltap.trainer.traces.build import Trace, TraceBatch
from rolltap.trainer.traces.ledger import Ledger, SessionAccount, TokenSpan
from rolltap.trainer.traces.tables import TRAINED_SCHEMA

TABLE = "trained"

_VALUES = {"differences": np.float16, "weights": np.float32}
"""Columns with a value for each trained token. 16 bits round a difference by 0.05 %, and a
log-probability of -4 by 0.002: most differences are smaller."""
Scored = tuple[Sequence[int], NDArray[np.float32]]
"""Places of traces in `StepAccount.computed`; log-probabilities and limited importance weights of
their N trained tokens, shape (2, N)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSession:
    """A session in an optimizer step; a row of the table.

    Attributes:
        step: Number of the optimizer step, counted from 1, as in `metrics.jsonl`.
        version: The weights that the step began with.
        reason: Why the whole session is left out (`LeftOut`).
        left_out: The sampled tokens that are not trained, each with its reason.
        spans: The trained tokens.
        differences: For each trained token, the trainer's log-probability before the step less the
            recorded one. None when it was not computed, because the advantage is 0, and when it was
            not read.
        weights: The importance weight of each trained token, within its limits; 1 without a
            correction.
    """

    step: int
    version: str | None
    session_id: str
    group_id: str
    reward: float | None
    advantage: float | None
    reason: str | None
    sampled: int
    trained: int
    left_out: tuple[TokenSpan, ...] = field(repr=False)
    spans: tuple[TokenSpan, ...] = field(default=(), repr=False)
    differences: NDArray[np.float16] | None = field(default=None, repr=False, compare=False)
    weights: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)

    @property
    def ledger(self) -> Ledger:
        """The session's tokens in this step."""
        left_out = SessionAccount(spans=self.left_out).ledger.left_out
        return Ledger(sampled=self.sampled, trained=self.trained, left_out=left_out)

    def to_json(self) -> dict[str, Any]:
        """Return the session's numbers as JSON values."""
        return {
            "step": self.step,
            "version": self.version,
            "advantage": self.advantage,
            "reason": self.reason,
            "trained": self.trained,
            "left_out": self.ledger.left_out,
        }


@dataclass(frozen=True, slots=True)
class StepAccount:
    """A generation batch as its optimizer steps learn from it.

    Attributes:
        batch: The batch, with what has no signal left out.
        advantages: Session id -> its advantage.
        computed: The traces that the model is run on.
    """

    batch: TraceBatch = field(repr=False)
    advantages: dict[str, float] = field(repr=False)
    computed: Sequence[Trace] = field(repr=False)

    def rows(self, step: int, version: str, scored: Iterable[Scored]) -> Iterator[dict[str, Any]]:
        """Yield the rows of an optimizer step, without digests.

        `scored` are all micro-batches of all processes. Raises `LedgerError` when they do not add
        up to the ledger of the batch, or when a trained token of a computed trace has not one
        value.
        """
        values = self._values(scored)
        total = Ledger()
        for session_id, account in self.batch.accounts.items():
            ledger = account.ledger
            total += ledger
            left_out: list[dict[str, Any]] = []
            trained: list[dict[str, Any]] = []
            for span in account.spans:
                spans = left_out
                if span.reason is None:
                    spans = trained
                spans.append(asdict(span))
            row: dict[str, Any] = {
                "step": step,
                "version": version,
                "session_id": session_id,
                "group_id": account.group_id,
                "reward": account.reward,
                "advantage": self.advantages.get(session_id),
                "reason": account.reason,
                "sampled": ledger.sampled,
                "trained": ledger.trained,
                "left_out": left_out,
                "spans": trained,
            }
            own = values.get(session_id)
            if own is not None:
                if own.shape[1] != ledger.trained:
                    counts = f"{ledger.trained} tokens, {own.shape[1]} were scored"
                    raise LedgerError(f"session {session_id} trains {counts}")
                differences = own[0] - self._recorded_logprobs(session_id)
                row["differences"] = differences.astype(np.float16)
                row["weights"] = own[1]
            yield row
        expected = self.batch.ledger
        if total != expected:
            what = f"the sessions of step {step} have the tokens {total}"
            raise LedgerError(f"{what}, their batch {expected}")

    def _values(self, scored: Iterable[Scored]) -> dict[str, NDArray[np.float32]]:
        """Return session id -> the values of the trained tokens of its computed traces."""
        by_trace: dict[int, NDArray[np.float32]] = {}
        for numbers, values in scored:
            sizes = [self.computed[number].completion_mask.count(1) for number in numbers]
            *parts, rest = np.split(values, np.cumsum(sizes, dtype=int), axis=1)
            if rest.size:
                raise LedgerError(f"{rest.shape[1]} tokens were scored that no trace trains")
            by_trace.update(zip(numbers, parts, strict=True))
        by_session = defaultdict[str, list[NDArray[np.float32]]](list)
        for number, trace in enumerate(self.computed):
            part = by_trace.get(number, np.empty((2, 0), np.float32))
            by_session[trace.session_id].append(part)
        return {name: np.concatenate(parts, axis=1) for name, parts in by_session.items()}

    def _recorded_logprobs(self, session_id: str) -> NDArray[np.float32]:
        """Return the engine's log-probabilities of the same tokens."""
        logprobs: list[float] = []
        for trace in self.computed:
            if trace.session_id == session_id:
                logprobs += compress(trace.logprobs, trace.completion_mask)
        return np.array(logprobs, np.float32)


def write_step(
    writer: RunWriter,
    version: Callable[[int], object],
    step: int,
    account: StepAccount,
    scored: Iterable[Scored],
) -> None:
    """Commit the sessions of the optimizer step after `step` others.

    `version` names the weights after so many steps. Raises `LedgerError` as `StepAccount.rows`, and
    `OSError`.
    """
    rows = list(account.rows(step + 1, str(version(step)), scored))
    if rows:
        writer.add_batch(TABLE, trained_batch(rows))
        writer.end_session()


def trained_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Return rows as a batch with their digests, which are of the values as they are stored."""
    batch = pa.RecordBatch.from_pylist(rows, TRAINED_SCHEMA)
    digests = pa.array([row_digest(row, TRAINED_SCHEMA) for row in batch_rows(batch)])
    return batch.set_column(TRAINED_SCHEMA.get_field_index(DIGEST), DIGEST, digests)


def trained_steps(index: SessionIndex, session_id: str) -> list[TrainedSession]:
    """Return a session in all steps that took it, oldest first. `index` is of the table `trained`.

    Rows whose digest does not match are left out.
    """
    return _newest(index.sound_rows(session_id))


def read_trained(folder: Path) -> list[TrainedSession]:
    """Return the sessions of all steps of a training, by step, without `spans` and values.

    Digests are not checked. `folder` need not be a run folder. Uncommitted tails and damage are
    skipped, with a warning for damage.
    """
    rows: list[dict[str, Any]] = []
    for new in TableScan(folder, TABLE).new():
        for _, batch in new.batches:
            rows += batch_rows(batch.drop_columns(["spans", *_VALUES]))
    return _newest(rows)


def _newest(rows: Iterable[dict[str, Any]]) -> list[TrainedSession]:
    """Return the last row of each session and step, by step."""
    found: dict[tuple[int, str], TrainedSession] = {}
    for row in rows:
        del row[DIGEST]
        for name, kind in _VALUES.items():
            if row.get(name) is not None:
                row[name] = np.array(row[name], kind)
        for name in ("left_out", "spans"):
            row[name] = tuple(TokenSpan(**span) for span in row.get(name, ()))
        found[row["step"], row["session_id"]] = TrainedSession(**row)
    return sorted(found.values(), key=attrgetter("step"))
