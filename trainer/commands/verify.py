"""`rolltap verify`: is a run sound?"""

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from rolltap.addons.errors import InputError
from rolltap.trainer.commands.options import RUN, json_option
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.runs.verify import verify_run

MOST_FINDINGS = 100
"""Findings that are printed; `--json` has all."""


@click.command("verify")
@click.argument("run", type=RUN)
@click.option("--repair", is_flag=True, help="Remove what a crash left: commits that were not completed, hidden files.")
@json_option
def verify_command(run: Path, repair: bool, as_json: bool) -> None:
    """Check every file, every row and every invariant of a RUN.

    Ends with status 0 when nothing is damaged, else with 1. A run that is being recorded can be verified. --repair
    removes nothing that was ever a whole commit, leaves files alone that are being written, and says what it did. For
    a damaged run, `rolltap merge RUN --out NEW` saves the rows that can be read.
    """
    try:
        with progress_bar(Console(stderr=True)) as advance:
            found = verify_run(run, advance, repair=repair)
    except OSError as error:
        raise InputError(f"{run} could not be read: {error}") from error
    if as_json:
        click.echo(json.dumps(found.to_json()))
        sys.exit(0 if found.sound else 1)
    for done in found.repaired:
        click.echo(f"repaired: {done}")
    for finding in found.findings[:MOST_FINDINGS]:
        click.echo(f"{finding.grade}: {finding.where}: {finding.what}{finding.advice and f'; {finding.advice}'}")
    if len(found.findings) > MOST_FINDINGS:
        click.echo(f"and {len(found.findings) - MOST_FINDINGS} more: see --json")
    click.echo(", ".join(f"{number} {table}" for table, number in found.rows.items()))
    damage = sum(finding.grade == "damage" for finding in found.findings)
    click.echo(f"{damage} damaged" if damage else "nothing is damaged")
    sys.exit(0 if found.sound else 1)
