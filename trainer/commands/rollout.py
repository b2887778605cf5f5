"""`rolltap rollout`: runs tasks, several sessions each."""

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import (
    FOLDER,
    examples,
    harness_option,
    json_option,
    print_result,
    recorder_options,
)

MOST_REASONS = 3
"""Most reasons of sessions without a reward that are printed."""
_CALL_ID = re.compile(r"\b[0-9a-f]{16,}\b")


@click.command(
    "rollout",
    epilog=examples(
        "rolltap rollout tasks.jsonl --harness pi \\",
        "    --model Qwen/Qwen3-4B --out runs/first",
        "rolltap rollout tasks.jsonl --harness codex --sessions 4 \\",
        "    --model Qwen/Qwen3-4B --out runs/first \\",
        "    --runtime sandbox --set rolltap_allow=pypi.org",
    ),
)
@recorder_options
@click.argument("tasks", type=click.Path(path_type=Path, exists=True))
@harness_option(required=True)
@click.option("-n", "--sessions", default=8, show_default=True, type=click.IntRange(1), help="Sessions of each task.")
@click.option(
    "--concurrency",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Maximum number of sessions that run at the same time.",
)
@click.option(
    "--recorders",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Processes of the recorder. Each uses one core.",
)
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds after which a harness is stopped.")
@click.option(
    "--runtime",
    default="process",
    show_default=True,
    type=click.Choice(["process", "sandbox", "container", "apptainer"]),
    help="Where sessions run.",
)
@click.option(
    "--tools",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Folder of installed programs that a box shows, read-only, under the same path. Repeatable.",
)
@click.option(
    "--container-engine",
    type=click.Choice(["podman", "docker"]),
    help="Program of the runtime container. By default the first that is installed.",
)
@click.option(
    "--container-argument",
    "container_arguments",
    multiple=True,
    help="Argument between the name of that program and its commands. Repeatable.",
)
@click.option("--repositories", type=FOLDER, help="Folder with the checkouts of SWE tasks, as OWNER__NAME.")
@click.option("--max-calls", type=click.IntRange(1), help="Most model calls of a session.")
@click.option("--max-sampled-tokens", type=click.IntRange(1), help="Most tokens that a session samples.")
@click.option("--max-prompt-tokens", type=click.IntRange(1), help="Most tokens of the prompt of one call.")
@click.option(
    "--retries",
    default=2,
    show_default=True,
    type=click.IntRange(0),
    help="Retries of a session that failed because of the engine, the recorder or the machine.",
)
@click.option(
    "--give-up-after",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Stop after so many such sessions in a row.",
)
@click.option("--new-groups", is_flag=True, help="Begin further groups; the newest ones are completed first.")
@json_option
def rollout_command(tasks: Path, settings: dict[str, list[str]], preset: str, as_json: bool, **arguments: Any) -> None:
    """Run every task several times and record it.

    TASKS is JSON Lines, one task a line; a Harbor task folder, or a folder of them; or rows of a SWE dataset: JSON
    Lines, Parquet, or a dataset on the disk. Each task's own judge gives the reward. A session that failed because of
    the engine, the recorder or the machine has the status infrastructure and no reward. The same command goes on where
    it was stopped. Exit status 1: no session has a reward, or the rollout gave up.
    """
    run = rolltap.rollout(tasks, harness=preset, options=settings, **arguments)
    print_result(run.summary(), as_json)
    _report_faults(run)


def _report_faults(run: rolltap.Run) -> None:
    """Say on stderr how many of the sessions have no reward, and why. Exits with 1 when it is all of them."""
    rows = {session.session_id: session for session in run.sessions()}
    last = {name.partition("~")[0]: rows[name] for name in run.new_session_ids}  # of several attempts
    without = Counter(session.status for session in last.values() if session.reward is None)
    if not without:
        return
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for session in last.values():
        if session.reward is None:
            reason = session.error or "no reason was recorded"
            # without ids, so that equal reasons count together
            reasons[_CALL_ID.sub("", reason.replace(session.session_id, ""))].append(reason)
    named = ", ".join(f"{number} {status}" for status, number in without.most_common())
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"{without.total()} of {len(last)} sessions have no reward ({named})", style="bold red", markup=False)
    for alike in sorted(reasons.values(), key=len, reverse=True)[:MOST_REASONS]:
        console.print(f"  {len(alike)} of them: {alike[0]}", style="red", markup=False)
    console.print(
        f"See {run.path / 'logs'} and the recorder's log in the run. Once it is mended, the same command tries again "
        "those that are infrastructure or unjudged.",
        markup=False,
    )
    if without.total() == len(last):
        sys.exit(1)
