"""Tokens that the optimizer steps of a training learned from, and the trainer's values: the table `trained`.

A row is one session of one optimizer step, whether its tokens were trained or not. Lists of values are over the trained
tokens alone, in the order of `TrainedSession.spans`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rolltap.addons.errors import LedgerError
from rolltap.addons.store.records import DIGEST
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.sessions import SessionIndex, TableScan
from rolltap.addons.store.tables import RunWriter, batch_rows
from rolltap.addons.store.trained import TRAINED_SCHEMA
from rolltap.trainer.traces.build import Trace, TraceBatch
from rolltap.trainer.traces.ledger import Ledger, SessionAccount, TokenSpan

TABLE = "trained"

_VALUES = {"differences": np.float16, "weights": np.float32}
"""Columns with a value for each trained token. 16 bits round a difference by 0.05 %, and a log-probability of -4 by
0.002: most differences are smaller."""
Scored = tuple[Sequence[int], NDArray[np.float32]]
"""Places of traces in `StepAccount.computed`; log-probabilities and limited importance weights of their N trained
tokens, shape (2, N)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSession:
    """A session in an optimizer step; a row of the table.

    Attributes:
        step: Number of the optimizer step, counted from 1, as in `metrics.jsonl`.
        version: The weights that the step began with.
        reason: Why the whole session is left out (`LeftOut`).
        left_out: The sampled tokens that are not trained, each with its reason.
        spans: The trained tokens.
        differences: For each trained token, the trainer's log-probability before the step less the recorded one. None
            when it was not computed, because the advantage is 0, and when it was not read.
        weights: What the advantage is multiplied with at each trained token: the weight of the session times the
            limited importance weight.
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
        shown = {name: getattr(self, name) for name in ("step", "version", "advantage", "reason", "trained")}
        return {**shown, "left_out": self.ledger.left_out}


@dataclass(frozen=True, slots=True)
class StepAccount:
    """A generation batch as its optimizer steps learn from it.

    Attributes:
        batch: The batch, with what has no signal left out.
        advantages, weights: Session id -> its advantage; its weight in the loss.
        computed: The traces that the model is run on.
    """

    batch: TraceBatch = field(repr=False)
    advantages: dict[str, float] = field(repr=False)
    weights: dict[str, float] = field(repr=False)
    computed: Sequence[Trace] = field(repr=False)

    def rows(self, step: int, version: str, scored: Iterable[Scored]) -> Iterator[dict[str, Any]]:
        """Yield the rows of an optimizer step, without digests. `scored` are all micro-batches of all processes.

        Raises `LedgerError` when they do not add up to the ledger of the batch, or when a trained token of a computed
        trace has not one value.
        """
        values = self._values(scored)
        total = Ledger()
        for session_id, account in self.batch.accounts.items():
            ledger = account.ledger
            total += ledger
            row = {
                "step": step,
                "version": version,
                "session_id": session_id,
                "group_id": account.group_id,
                "reward": account.reward,
                "advantage": self.advantages.get(session_id),
                "reason": account.reason,
                "sampled": ledger.sampled,
                "trained": ledger.trained,
                "left_out": [asdict(span) for span in account.spans if span.reason is not None],
                "spans": [asdict(span) for span in account.spans if span.reason is None],
                "differences": None,
                "weights": None,
            }
            if session_id in values:
                trainer, engine, limited = values[session_id]
                if not len(trainer) == len(engine) == ledger.trained:
                    counts = f"{ledger.trained} tokens, {len(trainer)} were scored"
                    raise LedgerError(f"session {session_id} trains {counts}")
                row["differences"] = (trainer - engine).astype(np.float16)
                row["weights"] = limited * np.float32(self.weights.get(session_id, 0.0))
            yield row
        if total != self.batch.ledger:
            expected = self.batch.ledger
            raise LedgerError(f"the sessions of step {step} have the tokens {total}, their batch {expected}")

    def _values(self, scored: Iterable[Scored]) -> dict[str, list[NDArray[np.float32]]]:
        """Return session id -> values of the trained tokens of its computed traces.

        These are the log-probabilities of trainer and engine, and the limited importance weights.
        """
        by_trace = dict[int, NDArray[np.float32]]()
        for numbers, values in scored:
            sizes = [self.computed[number].completion_mask.count(1) for number in numbers]
            parts = np.split(values, np.cumsum(sizes)[:-1], axis=1)
            by_trace.update(zip(numbers, parts, strict=True))
        traces_of = defaultdict[str, list[int]](list)
        for number, trace in enumerate(self.computed):
            traces_of[trace.session_id].append(number)
        nothing = np.empty((2, 0), np.float32)
        found = dict[str, list[NDArray[np.float32]]]()
        for session_id, numbers in traces_of.items():
            parts = [by_trace.get(number, nothing) for number in numbers]
            trainer, limited = np.concatenate(parts, axis=1)
            engine = np.concatenate([_sampled_logprobs(self.computed[number]) for number in numbers])
            found[session_id] = [trainer, engine, limited]
        return found


def _sampled_logprobs(trace: Trace) -> NDArray[np.float32]:
    """Return the engine's log-probabilities of the trained tokens of a trace."""
    trained = np.array(trace.completion_mask, bool)
    logprobs = np.array(trace.logprobs, np.float32)
    sampled: NDArray[np.float32] = logprobs[trained]
    return sampled


def write_step(
    writer: RunWriter, version: Callable[[int], object], step: int, account: StepAccount, scored: Iterable[Scored]
) -> None:
    """Commit the sessions of the optimizer step after `step` others. `version` names the weights after so many steps.

    Raises `LedgerError` as `StepAccount.rows`, and `OSError`.
    """
    rows = list(account.rows(step + 1, str(version(step)), scored))
    if rows:
        writer.add_batch(TABLE, trained_batch(rows))
        writer.end_session()


def trained_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Return rows as a batch with their digests, which are those of the values as they are stored."""
    batch = pa.RecordBatch.from_pylist(rows, TRAINED_SCHEMA)
    digests = pa.array([row_digest(row, TRAINED_SCHEMA) for row in batch_rows(batch)])
    return batch.set_column(TRAINED_SCHEMA.get_field_index(DIGEST), DIGEST, digests)


def trained_steps(index: SessionIndex, session_id: str) -> list[TrainedSession]:
    """Return a session in all steps that took it, oldest first. `index` is of the table `trained`.

    Rows whose digest does not match are left out.
    """
    rows = [row for batch in index.batches(session_id) for row in batch_rows(batch)]
    return _newest(row for row in rows if row[DIGEST] == row_digest(row, TRAINED_SCHEMA))


def read_trained(folder: Path) -> list[TrainedSession]:
    """Return the sessions of all steps of a training, by step, without `spans` and values. Digests are not checked.

    `folder` need not be a run folder. Uncommitted tails and damage are skipped, with a warning for damage.
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
        for name in {"left_out", "spans"} & row.keys():
            row[name] = tuple(TokenSpan(**span) for span in row[name])
        for name, kind in _VALUES.items():
            if row.get(name) is not None:
                row[name] = np.array(row[name], kind)
        found[row["step"], row["session_id"]] = TrainedSession(**row)
    return sorted(found.values(), key=lambda session: session.step)
