"""Progress of a long command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[str, int, int], None]
"""Progress callback. Arguments: a description with the unit, the amount done, the total amount."""


@contextmanager
def progress_bar(console: Console) -> Iterator[Advance]:
    """Show a progress bar until the block ends, if `console` is a terminal."""
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)
