"""The lines of a check's table."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    result: Literal["passed", "failed", "skipped"]
    number: float | None = None
    limit: float | None = None
    """The number must not be larger."""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values. A number that JSON lacks is null."""
        finite = self.number is not None and math.isfinite(self.number)
        return asdict(self) | {"number": self.number if finite else None}


def measured(what: str, number: float, limit: float, note: str = "") -> Line:
    """Return the line of a number. One that is not a number fails."""
    return Line(what, "passed" if number <= limit else "failed", number, limit, note)


def failed(what: str, why: object) -> Line:
    """Return the line of a check that could not be made."""
    return Line(what, "failed", note=str(why))


def skipped(what: str, why: str) -> Line:
    """Return the line of a check that this machine cannot make."""
    return Line(what, "skipped", note=why)


def table(lines: list[Line]) -> Table:
    """Return the table of all lines."""
    shown = Table("what", "result", "number", "limit", "note")
    for line in lines:
        number, limit = ("" if value is None else f"{value:.3g}" for value in (line.number, line.limit))
        shown.add_row(Text(line.what), Text(line.result, STYLES[line.result]), number, limit, Text(line.note))
    return shown
