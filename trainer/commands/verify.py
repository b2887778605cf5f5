"""`rolltap verify`: checks a run for damage."""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

import rolltap
from rolltap.trainer.commands.options import RUN, examples, json_option

MOST_FINDINGS = 100
"""Maximum number of findings that are printed. `--json` prints all."""


@click.command(
    "verify",
    epilog=examples(
        "rolltap verify runs/first",
        "rolltap verify runs/first --repair",
    ),
)
@click.argument("run", type=RUN)
@click.option("--repair", is_flag=True, help="Truncate uncommitted tails and remove temporary files.")
@json_option
def verify_command(run: Path, repair: bool, as_json: bool) -> None:
    """Check a RUN for damage.

    Checked are the table files, the digest of each row that can be read, and the token ids, prompts, values and times
    of calls and sessions. The calls of a session with an unreadable row are not rebuilt. A run that is being recorded
    can be verified.

    The first line is the verdict: ok, needs repair or damaged. Exit status 1: the run is damaged. Exit status 0: it is
    not.

    --repair truncates an uncommitted tail and removes temporary files. After a machine crash the tail may be a commit
    whose prefix was lost: copy the file first. Files that are being written are not changed.

    For a damaged run, `rolltap merge RUN --out NEW` saves the rows that can be read.
    """
    found = rolltap.verify_run(run, repair=repair)
    if as_json:
        click.echo(json.dumps(found.to_json()))
        sys.exit(0 if found.sound else 1)
    grades = Counter(finding.grade for finding in found.findings)
    findings = f"; findings: {_count(grades.items())}" if grades else ""
    click.echo(f"{found.verdict}: {_count(found.rows.items())}{findings}")
    for done in found.repaired:
        click.echo(f"repaired: {done}")
    for finding in found.findings[:MOST_FINDINGS]:
        click.echo(f"{finding.grade}: {finding.where}: {finding.what}{finding.advice and f'; {finding.advice}'}")
    if len(found.findings) > MOST_FINDINGS:
        click.echo(f"and {len(found.findings) - MOST_FINDINGS} more: see --json")
    sys.exit(0 if found.sound else 1)


def _count(numbers: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{number} {name}" for name, number in numbers)
