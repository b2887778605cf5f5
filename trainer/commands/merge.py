"""`rolltap merge`: several runs as one, or what can be read of a damaged one."""

from pathlib import Path

import click
from rich.console import Console

from rolltap.trainer.commands.options import RUN, new_folder_option
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.runs.merge import merge_runs


@click.command("merge")
@click.argument("runs", type=RUN, nargs=-1, required=True)
@new_folder_option
def merge_command(runs: tuple[Path, ...], out: Path) -> None:
    """Write the sessions of several RUNS to one.

    They must have the same tokenizer and chat template, and no session in common. Rows that cannot be read or do not
    have their digest are left behind and counted: of a single damaged run, this saves the others.
    """
    with progress_bar(Console(stderr=True)) as advance:
        sessions, left_behind = merge_runs(runs, out, advance)
    for loss in left_behind:
        click.echo(
            f"left behind in {loss.file}: {loss.rows} rows that do not have their digest, "
            f"{loss.places} places that cannot be read"
        )
    click.echo(f"{sessions} sessions in {out}")
