"""The lines of a check's table.

The first ones are made before anything is installed, so this needs nothing but Python.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Result = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    """The stage and what it says, such as `serve: seconds to start`."""
    result: Result
    measured: float | None = None
    planned: float | None = None
    """The number by the plan of the training (`rolltap train --dry-run`)."""
    limit: float | None = None
    """The largest number that passes, or the smallest one with `at_least`."""
    at_least: bool = False
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the line as JSON values. A number that JSON lacks is null."""
        finite = self.measured is not None and math.isfinite(self.measured)
        return asdict(self) | {"measured": self.measured if finite else None}

    def cells(self) -> list[str]:
        """Return the columns of the table."""
        limit = number(self.limit)
        if limit and self.at_least:
            limit = f">= {limit}"
        return [
            self.what,
            self.result,
            number(self.measured),
            number(self.planned),
            limit,
            self.note,
        ]


COLUMNS = ("what", "result", "measured", "planned", "limit", "note")


def number(value: float | None) -> str:
    """Return a number for people; nothing for none."""
    return "" if value is None else f"{value:.3g}"


def at_most(
    what: str,
    value: float,
    limit: float,
    note: str = "",
    planned: float | None = None,
) -> Line:
    """Return the line of a number that must not be larger. One that is not a number fails."""
    result = passed(value <= limit)
    return Line(what, result, value, planned, limit, note=note)


def at_least(
    what: str,
    value: float,
    limit: float,
    note: str = "",
    planned: float | None = None,
) -> Line:
    """Return the line of a number that must not be smaller. One that is not a number fails."""
    result = passed(value >= limit)
    return Line(what, result, value, planned, limit, at_least=True, note=note)


def passed(is_within: bool) -> Result:
    """Return the result of a comparison."""
    return "passed" if is_within else "failed"


def fact(what: str, value: float | None = None, note: str = "") -> Line:
    """Return a line without a limit."""
    return Line(what, "passed", value, note=note)


def failed(what: str, why: object) -> Line:
    """Return the line of a check that could not be made, or of something that is missing."""
    return Line(what, "failed", note=str(why))


def skipped(what: str, why: str) -> Line:
    """Return the line of a check that this machine cannot make."""
    return Line(what, "skipped", note=why)
