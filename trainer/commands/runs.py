"""The commands that write run folders, `rolltap import`, `merge`, `split` and `filter`; and `rolltap verify`."""

import json
import sys
from pathlib import Path
from typing import BinaryIO, get_args

import click
from rich.console import Console

from rolltap.addons.store.records import CallRole, SessionStatus
from rolltap.trainer.errors import UserError
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.runs.combine import Filter, SplitBy, filter_run, merge_runs, split_run
from rolltap.trainer.runs.import_calls import import_calls
from rolltap.trainer.runs.verify import verify_run

_RUN = click.Path(path_type=Path, file_okay=False)
MOST_FAULTS = 20
"""Bad lines that are printed; the rest is counted."""
MOST_FINDINGS = 100
"""Findings that are printed; `--json` has all."""


@click.command("import")
@click.argument("file", type=click.File("rb"))
@click.argument("run", type=_RUN)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out and import the others.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def import_command(file: BinaryIO, run: Path, skip_bad: bool, as_json: bool) -> None:
    """Add calls that anything else made to a RUN.

    The folder may be new. FILE is JSON Lines, `-` the standard input.

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

    Bad lines are printed with their number, and then nothing is imported. Of lines that contradict each other the
    later is bad; so is one of a session that the run has already. A call whose tokens and log-probabilities do not
    match is no bad line: it is kept, marked and not trained on. Killed halfway, nothing was imported.
    """
    console = Console(stderr=True)
    faults = 0

    def report(number: int, fault: str) -> None:
        nonlocal faults
        faults += 1
        if faults <= MOST_FAULTS:
            console.print(f"line {number}: {fault}", markup=False, highlight=False, soft_wrap=True)

    try:
        with progress_bar(console) as advance:
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


_OUT = click.option("--out", type=_RUN, required=True, help="The folder to write. It must be new or empty.")
_SOURCE = click.Path(path_type=Path, file_okay=False, exists=True)


@click.command("merge")
@click.argument("runs", type=_SOURCE, nargs=-1, required=True)
@_OUT
def merge_command(runs: tuple[Path, ...], out: Path) -> None:
    """Write the sessions of several RUNS to one.

    They must have the same tokenizer and chat template, and no session in common.
    """
    with progress_bar(Console(stderr=True)) as advance:
        sessions = merge_runs(runs, out, advance)
    click.echo(f"{sessions} sessions in {out}")


@click.command("split")
@click.argument("run", type=_SOURCE)
@_OUT
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


@click.command("filter")
@click.argument("run", type=_SOURCE)
@_OUT
@click.option("--min-reward", type=float, help="The reward is at least this.")
@click.option("--max-reward", type=float, help="The reward is at most this.")
@click.option("--harness", "harnesses", multiple=True, help="The harness has this name.")
@click.option("--policy-version", "policy_versions", multiple=True, help="The session started with these weights.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(get_args(SessionStatus)), help="It ended so.")
@click.option("--session", "sessions", multiple=True, metavar="ID", help="The session has this id.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(get_args(CallRole)),
    help="Only calls of this role, and those that their prompts continue.",
)
def filter_command(
    run: Path,
    out: Path,
    min_reward: float | None,
    max_reward: float | None,
    harnesses: tuple[str, ...],
    policy_versions: tuple[str, ...],
    statuses: tuple[str, ...],
    sessions: tuple[str, ...],
    roles: tuple[CallRole, ...],
) -> None:
    """Write the sessions of a RUN that fit to a new run.

    They fit all that is asked for.
    An option that is given several times accepts each of its values. Sessions without a row in the run fit only
    --session and --role; those without a reward fit no --min-reward and --max-reward. Events of no session are left
    out.
    """
    criteria = Filter(min_reward, max_reward, harnesses, policy_versions, statuses, sessions, roles)
    with progress_bar(Console(stderr=True)) as advance:
        kept = filter_run(run, out, criteria, advance)
    click.echo(f"{kept} sessions in {out}")


@click.command("verify")
@click.argument("run", type=_SOURCE)
@click.option("--repair", is_flag=True, help="Cut off incomplete ends of files, and remove leftover files.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def verify_command(run: Path, repair: bool, as_json: bool) -> None:
    """Check every file, every row and every invariant of a RUN.

    Ends with status 0 when nothing is damaged, else with 1. A run that is being recorded can be verified. --repair
    does only what loses no row that can be read, leaves files alone that are being written, and says what it did.
    """
    try:
        with progress_bar(Console(stderr=True)) as advance:
            found = verify_run(run, advance, repair=repair)
    except OSError as error:
        raise UserError(f"{run} could not be read: {error}") from error
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
