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
    return Console(
        stderr=True,
        quiet=quiet,
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


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

        def advance(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        yield advance


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
        self._ask = ask
        self._bar = bar
        self._say = say
        self._what = ""
        self._done = 0
        self._total = 0
        self._engines = ""
        """Sentences on the engines."""
        self._answered: dict[str, float] = {}
        """URL of an engine that does not answer -> the time of its last answer."""
        self._asked_at = now
        self._said_at = now
        self._said_done = 0
        """Amount done in the last line."""
        self._said_silent: Collection[str] = []
        """Engines that were silent at the last line."""

    def advance(self, what: str, done: int, total: int) -> None:
        """Take the progress of the work."""
        self._what = what
        self._done = done
        self._total = total
        self._show()

    def tick(self, now: float) -> None:
        """Ask the engines, and say what there is to say."""
        silent = self._ask()
        told = []
        for url in self._answered:
            if url not in silent:
                told.append(f"the engine at {url} answers again")
        self._answered = {url: self._answered.get(url, self._asked_at) for url in silent}
        for url, at in self._answered.items():
            told.append(f"the engine at {url} has not answered for {now - at:.0f} s")
        self._engines = "; ".join(told)
        self._asked_at = now
        line = self._show()
        is_news = self._done != self._said_done or silent != self._said_silent
        if line and (is_news or now - self._said_at >= SAY_SECONDS):
            self._said_done = self._done
            self._said_silent = silent
            self._said_at = now
            self._say(line)

    def _show(self) -> str:
        line = "; ".join(filter(None, [self._what, self._engines]))
        self._bar(line, self._done, self._total)
        return line


@contextmanager
def watched(
    ask: Callable[[], Collection[str]], console: Console, *, bar: bool = True
) -> Iterator[Advance]:
    """Show until the block ends what a `Watch` tells: in a progress bar, or as lines without `bar`
    or a terminal."""
    ended = Event()
    shows_bar = bar and can_show_bar(console)

    def say(line: str) -> None:
        if not shows_bar and not ended.is_set():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    with progress_bar(console, show=bar) as show:
        watch = Watch(ask, show, say, time.monotonic())

        def run() -> None:
            while not ended.wait(ASK_SECONDS):
                watch.tick(time.monotonic())

        # nobody waits for its end: a dead engine may take seconds
        Thread(target=run, daemon=True).start()
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
            shown.caption = f"no room for: {', '.join(left_out)}; --json has all columns"
            if self.caption:
                shown.caption = f"{self.caption}; {shown.caption}"
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
    processes = processes_started()
    return processes // int(os.environ.get("LOCAL_WORLD_SIZE", processes))


def end_with_launcher() -> None:
    """Let this process end when its launcher does, which may be killed. The first one alone has
    something to tidy."""
    number = signal.SIGKILL
    if runs_first():
        number = signal.SIGTERM
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def runs_first() -> bool:
    """Return True in the process that prints: the first one of the launcher, or the only one."""
    return processes_started() == 1 or int(os.environ.get("RANK", 0)) == 0
