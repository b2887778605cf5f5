"""A training, step by step: the metrics that it wrote, and the tokens that its optimizer steps
trained.

Both are in the run folder of the training. A training from recorded runs has no sessions of its own
in it.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field
from rich.table import Table

from rolltap.addons.errors import RunError
from rolltap.addons.store.untrusted import parse_object, read_file
from rolltap.trainer.runs.views.tables import (
    MOST_ROWS,
    cut_note,
    make_table,
    named_counts,
    number,
)
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.trained import TrainedSession, read_trained

METRICS = "metrics.jsonl"
"""Name of the file in the folder. It has one JSON object a line, in the order of the steps: `step`,
the number of optimizer steps taken, and the metrics by name. A number that JSON lacks is null."""
EVALUATION = "evaluation"
"""Run folder in that of a training, with the sessions of its evaluations."""


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
    metrics = read_metrics(Path(folder, METRICS))
    steps = step_rows(read_trained(Path(folder)))
    if not metrics and not steps:
        return None
    return TrainingView(metrics, steps)


def step_rows(
    trained: Sequence[TrainedSession], sessions: Collection[str] | None = None
) -> list[StepRow]:
    """Return a row for each step. `trained` are by step; with `sessions`, only those of these ids
    count."""
    counted = [each for each in trained if sessions is None or each.session_id in sessions]
    rows = []
    for step, group in groupby(counted, key=attrgetter("step")):
        ledgers = [each.ledger for each in group]
        total = sum(ledgers, Ledger())
        rows.append(StepRow(step=step, sessions=len(ledgers), **asdict(total)))
    return rows


def session_step_table(steps: Sequence[TrainedSession]) -> Table:
    """Return the table of the steps of a session."""
    columns = ("step", "from the weights", "advantage", "tokens", "left out")
    cells = []
    for row in steps:
        left_out = named_counts(row.ledger.left_out)
        cells.append((row.step, row.version, number(row.advantage), row.trained, left_out))
    return make_table("trained steps", columns, cells)


def step_table(rows: Sequence[StepRow]) -> Table:
    """Return the table of the last steps."""
    title = "trained steps" + cut_note(rows, ": {}", "last")
    cells = []
    for row in rows[-MOST_ROWS:]:
        left_out = named_counts(row.left_out)
        cells.append((row.step, row.sessions, row.sampled, row.trained, left_out))
    return make_table(title, ("step", "sessions", "sampled", "trained", "left out"), cells)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines, oldest first; none when there is no file. A last line that is being written
    is left out.

    Raises `RunError` for a file that cannot be read, and for a line that is not a JSON object with
    a step.
    """
    try:
        content = read_file(path.parent, path.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(str(error)) from error
    read = []
    for place, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            read.append(parse_object(line, _Line))
        except ValueError as error:
            raise RunError(
                f"{path}, line {place} is not a step's metrics: correct or remove it ({error})"
            ) from error
    return read
