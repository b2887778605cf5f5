"""A training, step by step: the metrics that it wrote, and the tokens that its optimizer steps
trained.

Both are in the run folder of the training. A training from recorded runs has no sessions of its own
in it.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field
from rich.table import Table

from rolltap.addons.errors import RunError
from rolltap.addons.store.door import parse_object, read_file
from rolltap.trainer.runs.views.outcomes import make_table, named_counts, number
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.trained import TrainedSession, read_trained

METRICS = "metrics.jsonl"
"""Name of the file in the folder. It has one JSON object a line, in the order of the steps: `step`,
the number of optimizer steps taken, and the metrics by name. A number that JSON lacks is null."""
EVALUATION = "evaluation"
"""Run folder in that of a training, with the sessions of its evaluations."""
_MOST_STEPS = 50


class _Line(BaseModel):
    step: Annotated[float, Field(strict=True)]


@dataclass(slots=True, kw_only=True)
class StepRow(Ledger):
    """The ledger of an optimizer step, counted from 1."""

    step: int
    sessions: int


@dataclass(frozen=True, slots=True)
class TrainingView:
    """A training: the rows of its file of metrics, oldest first, and its steps."""

    metrics: list[dict[str, Any]] = field(repr=False)
    steps: list[StepRow] = field(repr=False)


def read_training(folder: str | Path) -> TrainingView | None:
    """Return what a training wrote into its run folder, or None if no training has.

    Raises `RunError` for a damaged file of metrics.
    """
    metrics, steps = read_metrics(Path(folder, METRICS)), step_rows(read_trained(Path(folder)))
    return TrainingView(metrics, steps) if metrics or steps else None


def step_rows(
    trained: Sequence[TrainedSession], sessions: Collection[str] | None = None
) -> list[StepRow]:
    """Return a row for each step. `trained` are by step; with `sessions`, only those of these ids
    count."""
    counted = [each for each in trained if sessions is None or each.session_id in sessions]
    rows = []
    for step, group in groupby(counted, key=lambda each: each.step):
        ledgers = [each.ledger for each in group]
        rows.append(StepRow(step=step, sessions=len(ledgers), **asdict(sum(ledgers, Ledger()))))
    return rows


def session_step_table(steps: Sequence[TrainedSession]) -> Table:
    """Return the table of the steps of a session."""
    cells = [
        (
            row.step,
            row.version,
            number(row.advantage),
            row.trained,
            named_counts(row.ledger.left_out),
        )
        for row in steps
    ]
    return make_table(
        "trained steps", ("step", "from the weights", "advantage", "tokens", "left out"), cells
    )


def step_table(rows: Sequence[StepRow]) -> Table:
    """Return the table of the last steps."""
    cells = [
        (row.step, row.sessions, row.sampled, row.trained, named_counts(row.left_out))
        for row in rows[-_MOST_STEPS:]
    ]
    cut = f": the last {_MOST_STEPS} of {len(rows)}" if len(rows) > _MOST_STEPS else ""
    return make_table(
        f"trained steps{cut}", ("step", "sessions", "sampled", "trained", "left out"), cells
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines, oldest first; none when there is no file. A last line that is being written
    is left out.

    Raises `RunError` for a file that cannot be read, and for a line that is not a JSON object with
    a step.
    """
    try:
        *lines, _ = read_file(path.parent, path.name).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(str(error)) from error
    read = []
    for place, line in enumerate(lines, 1):
        try:
            values = parse_object(line, _Line)
        except ValueError as error:
            raise RunError(
                f"{path}, line {place} is not a step's metrics: correct or remove it ({error})"
            ) from error
        read.append(values)
    return read
