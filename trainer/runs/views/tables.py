"""Tables of views, and numbers as text."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TypeVar

from rich.table import Table
from rich.text import Text

MOST_ROWS = 50
"""Most rows that a printed table of sessions, tasks or steps has."""

AnyTable = TypeVar("AnyTable", bound=Table)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table of text, which is not markup. Without names of columns it has no header."""
    return add_rows(Table(*columns, title=title, show_header=any(columns)), rows)


def add_rows(table: AnyTable, rows: Iterable[Iterable[object]]) -> AnyTable:
    """Add rows of text, which is not markup, and return the table."""
    for row in rows:
        table.add_row(*[Text(str(cell), overflow="fold") for cell in row])
    return table


def cut_note(rows: Sized, note: str, end: str = "first") -> str:
    """Return a `note` that a table shows one end of its rows, `{}` in it; empty when it shows
    all."""
    if len(rows) <= MOST_ROWS:
        return ""
    return note.format(f"the {end} {MOST_ROWS} of {len(rows)}")


def number(value: float | None, unknown: str = "none") -> str:
    """Return a mean or a reward as text."""
    if value is None:
        return unknown
    return f"{value:.3f}"


def named_counts(numbers: Mapping[str, int]) -> str:
    """Return numbers by name as text."""
    texts = [f"{count} {name}" for name, count in sorted(numbers.items())]
    return ", ".join(texts) or "none"
