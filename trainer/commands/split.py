"""`rolltap split`: a run as several."""

from pathlib import Path
from typing import get_args

import click

import rolltap
from rolltap.trainer.commands.options import RUN, examples, new_folder_option
from rolltap.types import SplitBy


@click.command(
    "split",
    epilog=examples(
        "rolltap split runs/first --by harness --out runs/parts",
        "rolltap split runs/first --parts 4 --out runs/parts",
    ),
)
@click.argument("run", type=RUN)
@new_folder_option
@click.option("--by", type=click.Choice(get_args(SplitBy)), help="One run for each value of this session field.")
@click.option("--parts", type=click.IntRange(1), metavar="N", help="N runs of about as many sessions, groups whole.")
def split_command(run: Path, out: Path, by: SplitBy | None, parts: int | None) -> None:
    """Write the sessions of a RUN to several runs.

    They are folders in --out, named after their part. Events without a session go to the first part.
    """
    if (by is None) == (parts is None):
        raise click.UsageError("give either --by or --parts")
    for name, part in rolltap.open_run(run).split(out, by=by, parts=parts).items():
        click.echo(f"{len(part.sessions())} sessions in {out / name}")
