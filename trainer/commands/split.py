"""`rolltap split`: a run as several."""

from pathlib import Path
from typing import get_args

import click
from rich.console import Console

from rolltap.trainer.commands.options import RUN, new_folder_option
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.runs.parts import SplitBy, split_run


@click.command("split")
@click.argument("run", type=RUN)
@new_folder_option
@click.option("--by", type=click.Choice(get_args(SplitBy)), help="A run for each value of this field of the sessions.")
@click.option("--parts", type=click.IntRange(1), metavar="N", help="N runs of about as many sessions, groups whole.")
def split_command(run: Path, out: Path, by: SplitBy | None, parts: int | None) -> None:
    """Write the sessions of a RUN to several runs.

    They are folders in --out, named after their part.
    Events of no session go to the first part.
    """
    wanted = by or parts
    if wanted is None or (by and parts):
        raise click.UsageError("give either --by or --parts")
    with progress_bar(Console(stderr=True)) as advance:
        sessions = split_run(run, out, wanted, advance)
    for name, number in sessions.items():
        click.echo(f"{number} sessions in {out / name}")
