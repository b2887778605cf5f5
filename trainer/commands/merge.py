"""`rolltap merge`: joins several runs, or saves what can be read of a damaged one."""

from pathlib import Path

import click

import rolltap
from rolltap.trainer.commands.options import RUN, examples, new_folder_option


@click.command(
    "merge",
    epilog=examples(
        "rolltap merge runs/first runs/second --out runs/both",
        "rolltap merge runs/damaged --out runs/saved",
    ),
)
@click.argument("runs", type=RUN, nargs=-1, required=True)
@new_folder_option
def merge_command(runs: tuple[Path, ...], out: Path) -> None:
    """Write the sessions of several RUNS to one.

    The runs must have the same tokenizer and chat template, and no session in common. Rows that cannot be read or
    whose digest does not match are not copied, and counted. With a single damaged run, this saves its sound rows.
    """
    run, left_behind = rolltap.merge_runs(runs, out)
    for loss in left_behind:
        click.echo(
            f"not copied from {loss.file}: {loss.rows} rows whose digest does not match, "
            f"{loss.places} unreadable byte ranges"
        )
    click.echo(f"{len(run.sessions())} sessions in {out}")
