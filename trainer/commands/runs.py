"""The commands that write run folders: `rolltap import`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from rolltap.trainer.errors import UserError
from rolltap.trainer.import_calls import Advance, import_calls

_RUN = click.Path(path_type=Path, file_okay=False)
MOST_FAULTS = 20
"""Bad lines that are printed; the rest is counted."""


@contextmanager
def _progress(console: Console) -> Iterator[Advance]:
    """A bar that says what is being done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(bar, description=what, completed=done, total=total)


@contextmanager
def _readable_errors(run: Path) -> Iterator[None]:
    """An error of the operating system as one of the user's: a full disk, a folder without permission."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {error.filename or run}: {error.strerror}") from error


@click.command("import")
@click.argument("file", type=click.File("rb"))
@click.argument("run", type=_RUN)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out and import the others.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def import_command(file: BinaryIO, run: Path, skip_bad: bool, as_json: bool) -> None:
    """Add calls that anything else made to a RUN folder, which may be new. FILE is JSON Lines, `-` the standard input.

    \b
    A line is a call, with the keys
      session_id, call_id   names of your own
      prompt_ids            token ids of the whole prompt
      completion_ids        sampled token ids, and their
      logprobs              natural-log probabilities, or null
      finish_reason         a text or null
    and, as far as they are known,
      task_id, group_id, harness, reward   of the session: the same in all its lines
      started_at            ISO 8601; without it calls are in the order of their prompts' lengths
      role                  agent, subagent, compaction or auxiliary
      status                completed, aborted or failed
      parent_id             decides between calls with the same tokens
      policy_version        the weights that sampled the call

    Bad lines are printed with their number, and then nothing is imported. A call whose tokens and log-probabilities
    do not match is no bad line: it is kept, marked and not trained on. Killed halfway, nothing was imported.
    """
    console = Console(stderr=True)
    faults = 0

    def report(number: int, fault: str) -> None:
        nonlocal faults
        faults += 1
        if faults <= MOST_FAULTS:
            console.print(f"line {number}: {fault}", markup=False, highlight=False, soft_wrap=True)

    with _readable_errors(run):
        try:
            with _progress(console) as advance:
                summary = import_calls(file, run, skip_bad=skip_bad, report=report, advance=advance)
        finally:
            if faults > MOST_FAULTS:
                console.print(f"and {faults - MOST_FAULTS} more bad lines", highlight=False)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
        return
    click.echo(f"{summary.calls} calls of {summary.sessions} sessions, {summary.sampled_tokens} sampled tokens")
    click.echo(f"{summary.bridged} calls continue another one")
    for count, what in (
        (summary.violations, "calls break an invariant: kept, marked and not trained on"),
        (summary.without_logprobs, "calls have no log-probabilities: kept and not trained on"),
        (summary.skipped, "bad lines were skipped"),
    ):
        if count:
            click.echo(f"{count} {what}")
