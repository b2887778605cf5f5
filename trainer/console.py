"""Output of commands: progress of long work, tables of ids. The processes of a launcher, of which
the first one prints.

Needs no torch.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from importlib.util import find_spec
from threading import Event, Thread

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

Advance = Callable[[str, int, int], None]
"""Progress callback. Arguments: a description with the unit, the amount done, the total amount."""
ASK_SECONDS = 5.0
"""Seconds between two questions whether the engines answer."""
SAY_SECONDS = 30.0
"""Longest time without a line."""
_PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def plain_console(*, quiet: bool = False) -> Console:
    """Return a console on stderr for plain text: without markup and highlights, and a line is not
    wrapped."""
    return Console(stderr=True, quiet=quiet, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def progress_bar(console: Console | None = None, *, show: bool = True) -> Iterator[Advance]:
    """Show a progress bar on `console` (default: stderr) until the block ends, if
    `can_show_bar`."""
    console = console or Console(stderr=True)
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    disable = not (show and can_show_bar(console))
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        bar = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(
            bar, description=what, completed=done, total=total
        )


def can_show_bar(console: Console) -> bool:
    """Return True for a terminal, and for a notebook that has ipywidgets, which rich needs
    there."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


class Watch:
    """Tells of the progress of work and of its engines. `bar` always shows it, and `say` gets it as
    a line when more is done, when an engine ceases to answer or answers again, and after
    `SAY_SECONDS`.

    `ask` returns the URLs of the engines that do not answer. Times are in seconds; `now` is the
    start.
    """

    def __init__(
        self,
        ask: Callable[[], Collection[str]],
        bar: Advance,
        say: Callable[[str], None],
        now: float,
    ) -> None:
        self._ask, self._bar, self._say = ask, bar, say
        self._progress, self._engines = ("", 0, 0), ""
        self._answered: dict[str, float] = {}
        self._said: tuple[int, Collection[str]] = (0, [])
        self._asked_at = self._said_at = now

    def advance(self, what: str, done: int, total: int) -> None:
        """Take the progress of the work."""
        self._progress = (what, done, total)
        self._show()

    def tick(self, now: float) -> None:
        """Ask the engines, and say what there is to say."""
        silent = self._ask()
        words = [
            f"the engine at {url} answers again" for url in self._answered if url not in silent
        ]
        self._answered = {url: self._answered.get(url, self._asked_at) for url in silent}
        words += [
            f"the engine at {url} has not answered for {now - at:.0f} s"
            for url, at in self._answered.items()
        ]
        self._engines, self._asked_at = "; ".join(words), now
        line, state = self._show(), (self._progress[1], silent)
        if line and (state != self._said or now - self._said_at >= SAY_SECONDS):
            self._said, self._said_at = state, now
            self._say(line)

    def _show(self) -> str:
        what, done, total = self._progress
        line = "; ".join(filter(None, [what, self._engines]))
        self._bar(line, done, total)
        return line


@contextmanager
def watched(
    ask: Callable[[], Collection[str]], console: Console, *, bar: bool = True
) -> Iterator[Advance]:
    """Show until the block ends what a `Watch` tells: in a progress bar, or as lines without `bar`
    or a terminal."""
    ended, lines = Event(), not (bar and can_show_bar(console))

    def say(line: str) -> None:
        if lines and not ended.is_set():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with progress_bar(console, show=bar) as show:
        watch = Watch(ask, show, say, time.monotonic())

        def run() -> None:
            while not ended.wait(ASK_SECONDS):
                watch.tick(time.monotonic())

        Thread(
            target=run, daemon=True
        ).start()  # nobody waits for its end: a dead engine may take seconds
        try:
            yield watch.advance
        finally:
            ended.set()


class IdTable(Table):
    """A table whose first column has ids. They are never broken: a table that is too wide loses its
    last columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table of the columns for which there is room; the caption names the others."""
        shown = copy(self)
        shown.columns = [*self.columns]
        left_out: list[str] = []
        while len(shown.columns) > 1 and _least_width(shown, console, options) > options.max_width:
            left_out.insert(0, str(shown.columns.pop().header))
        if left_out:
            named = f"no room for: {', '.join(left_out)}; --json has all columns"
            shown.caption = f"{self.caption}; {named}" if self.caption else named
        width = max(_least_width(shown, console, options), options.max_width)
        yield from Table.__rich_console__(shown, console, options.update(max_width=width))


def _least_width(table: Table, console: Console, options: ConsoleOptions) -> int:
    """Return the width in which no word of the table is broken."""
    return Table.__rich_measure__(table, console, options.update(max_width=100_000)).minimum


def processes_started() -> int:
    """Return the number of training processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1))


def nodes_started() -> int:
    """Return the number of machines on which the launcher started them."""
    return processes_started() // int(os.environ.get("LOCAL_WORLD_SIZE", processes_started()))


def end_with_launcher() -> None:
    """Let this process end when its launcher does, which may be killed. The first one alone has
    something to tidy."""
    number = signal.SIGTERM if runs_first() else signal.SIGKILL
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def runs_first() -> bool:
    """Return True in the process that prints: the first one of the launcher, or the only one."""
    return processes_started() == 1 or int(os.environ.get("RANK", 0)) == 0
