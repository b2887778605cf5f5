"""Output of commands: progress of long work, and which process of a launcher prints. Needs no torch."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[str, int, int], None]
"""Progress callback. Arguments: a description with the unit, the amount done, the total amount."""


@contextmanager
def progress_bar(console: Console | None = None, *, show: bool = True) -> Iterator[Advance]:
    """Show a progress bar on `console` (default: stderr) until the block ends.

    It is shown on a terminal, and in a notebook that has ipywidgets, which rich needs there.
    """
    console = console or Console(stderr=True)
    visible = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not (show and visible)) as progress:
        bar = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)


def processes_started() -> int:
    """Return the number of training processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def runs_first() -> bool:
    """Return True in the process that prints: the first one of the launcher, or the only one."""
    return processes_started() == 1 or int(os.environ.get("RANK", 0)) == 0
