"""`rolltap rollout`: runs tasks, several sessions each."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import rolltap
from rolltap.trainer.cli.options import (
    TASKS,
    command,
    harness_option,
    json_option,
    next_line,
    print_result,
    recorder_options,
    rollout_options,
)
from rolltap.trainer.console import plain_console
from rolltap.trainer.names import SessionName, counted

MOST_REASONS = 3
"""Most reasons of sessions without a reward that are printed."""
_CALL_ID = re.compile(r"\b[0-9a-f]{16,}\b")


@command(
    "rollout",
    "rolltap rollout tasks.jsonl --harness pi \\",
    "    --model Qwen/Qwen3-4B --out runs/first",
    "rolltap rollout tasks.jsonl --harness codex --sessions 4 \\",
    "    --model Qwen/Qwen3-4B --out runs/first \\",
    "    --runtime sandbox --set rolltap_allow=pypi.org",
)
@recorder_options
@click.argument("tasks", type=TASKS)
@harness_option(required=True)
@rollout_options
@click.option(
    "--new-groups",
    is_flag=True,
    help="Begin further groups; the newest ones are completed first.",
)
@json_option
def rollout_command(
    tasks: Path,
    settings: dict[str, list[str]],
    preset: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Run every task several times and record it.

    TASKS is JSON Lines, one task a line; a Harbor task folder, or a folder of them; or rows of a
    SWE dataset: JSON Lines, Parquet, or a dataset on the disk. Each task's own judge gives the
    reward. A session that failed because of the engine, the recorder or the machine has the status
    infrastructure and no reward. The same command resumes a stopped rollout. Exit status 1: no
    session has a reward, or the rollout gave up.
    """
    run = rolltap.rollout(tasks, harness=preset, recorder=settings, **given)
    print_result(run.summary(), as_json)
    if not as_json:
        plain_console().print(next_line("view", run.path))
    report_rollout(run)


def report_rollout(run: rolltap.Run) -> None:
    """Say on stderr what was refused and what failed. Exits with 1 when no session has a reward."""
    _report_refused(run)
    _report_faults(run)


def _report_refused(run: rolltap.Run) -> None:
    """Say on stderr how many sessions changed files that are the judge's, and which: these changes
    were not applied."""
    sessions = 0
    files: Counter[str] = Counter()
    for session in run.sessions():
        if session.session_id in run.new_session_ids:
            refused = set(_refused(session.evidence))
            sessions += bool(refused)
            files.update(refused)
    if files:
        named = [f"{path} ({number})" for path, number in files.most_common(MOST_REASONS)]
        plain_console().print(
            f"{counted(sessions, 'session')} changed files of the judge, which it did not take: "
            f"{', '.join(named)}. If the task asks for such changes, list them in 'paths' of its "
            "judge",
        )


def _refused(evidence: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of the judge's own that a session changed, also from the evidence of several
    judges."""
    for entry in evidence.get("refused", []):
        path, _, why = entry.rpartition(": ")
        if why in ("protected", "planted", "settings"):
            yield path
    for part in evidence.get("judges", {}).values():
        yield from _refused(part)


def _report_faults(run: rolltap.Run) -> None:
    """Say on stderr how many of the sessions have no reward, and why. Exits with 1 when it is all
    of them."""
    rows = {session.session_id: session for session in run.sessions()}
    last = {}
    for name in run.new_session_ids:
        last[SessionName.parse(name).place] = rows[name]  # of several attempts
    without = [session for session in last.values() if session.reward is None]
    if not without:
        return
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for session in without:
        reason = session.error or "no reason was recorded"
        # without ids, so that equal reasons count together
        reasons[_CALL_ID.sub("", reason.replace(session.session_id, ""))].append(reason)
    statuses = Counter(session.status for session in without)
    named = ", ".join(f"{number} {status}" for status, number in statuses.most_common())
    console = plain_console()
    console.print(
        f"{len(without)} of {len(last)} sessions have no reward ({named})",
        style="bold red",
    )
    for alike in sorted(reasons.values(), key=len, reverse=True)[:MOST_REASONS]:
        console.print(f"  {len(alike)} of them: {alike[0]}", style="red")
    console.print(
        f"See {run.path / 'logs'} and the recorder's log in the run. Fix the cause and rerun the "
        "same command: it runs those that are infrastructure or unjudged."
    )
    if len(without) == len(last):
        sys.exit(1)
