"""`rolltap tasks check`: tries tasks before a rollout.

`rolltap judge`: judges recorded sessions again.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import rolltap
from rolltap.rollouts import judge_again
from rolltap.trainer.cli.options import (
    RUN,
    TASKS,
    command,
    examples,
    exit_unless,
    json_option,
    print_json,
    rollout_options,
)
from rolltap.trainer.console import IdTable
from rolltap.trainer.names import counted
from rolltap.types import TaskCheck

_FILES_SHOWN = 20
_DIFF_LINES = 30
_OPTIONS = (
    "repositories",
    "runtime",
    "tools",
    "container_engine",
    "container_arguments",
    "build",
    "ssh",
    "ssh_kind",
    "ssh_python",
    "ssh_arguments",
    "harbor_python",
    "harbor_environment",
)
"""Fields of `RolloutConfig` that say where judges run."""
_concurrency_option = click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Number of judgements at the same time.",
)
_EXAMPLES = examples("rolltap tasks check tasks.jsonl --runtime sandbox")


@click.group("tasks", epilog=_EXAMPLES)
def tasks_group() -> None:
    """Work on tasks before a rollout."""


@tasks_group.command("check", epilog=_EXAMPLES)
@click.argument("tasks", type=TASKS)
@partial(rollout_options, only=_OPTIONS)
@_concurrency_option
@json_option
def check_command(tasks: Path, as_json: bool, **given: Any) -> None:
    """Try TASKS with their solutions and with cheats.

    TASKS and the options are as for `rolltap rollout`. Each task is judged several times: its
    untouched start, which must earn less than the best reward; its own solution, if it has one,
    which must earn the best; and the standard cheats, which must earn no more than the untouched
    start. Use the runtime of the rollout.

    Exit status 1: not all of this holds, or a task could not be tried.
    """
    checks = rolltap.check_tasks(tasks, **given)
    if as_json:
        print_json([check.to_json() for check in checks])
    else:
        _print(checks)
    exit_unless(all(check.passed for check in checks))


@command(
    "judge",
    "rolltap judge runs/first --tasks tasks.jsonl --runtime sandbox",
)
@click.argument("run", type=RUN)
@click.option(
    "--tasks",
    type=TASKS,
    required=True,
    help="Tasks whose judges judge the sessions again.",
)
@click.option(
    "--session",
    "only",
    multiple=True,
    metavar="ID",
    help="Id of a session to judge. By default all sessions are judged. Repeatable.",
)
@partial(rollout_options, only=_OPTIONS)
@_concurrency_option
@json_option
def judge_command(run: Path, as_json: bool, **given: Any) -> None:
    """Judge recorded sessions of RUN again, without running them.

    Each is judged by the task with the id of its own: what its agent changed was kept, and is
    applied to a fresh start. The runtime must be the session's. The new reward counts, and the
    earlier ones stay in the run. The same command goes on after it was stopped.

    Exit status 1: a session could not be judged, or its judge gave no reward.
    """
    found = judge_again(run, **given)
    console = Console(
        soft_wrap=True,
        highlight=False,
        markup=False,
        quiet=as_json,
    )
    table = IdTable("session", "task", "old reward", "new reward", "status")
    for each in found:
        if each["reward"] != each["before"]:
            table.add_row(
                each["session"],
                each["task"],
                _reward(each["before"]),
                _reward(each["reward"]),
                each["status"],
            )
    changed = "no reward"
    if table.rows:
        console.print(table)
        changed = counted(len(table.rows), "reward")
    failed = [each for each in found if each["result"] in ("refused", "unjudged")]
    for each in failed:
        console.print("{session}: {result}: {why}".format_map(each))
    counts = Counter(each["result"] for each in found)
    told = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    console.print(f"{counted(len(found), 'session')}: {told}; {changed} changed")
    if as_json:
        print_json(found)
    exit_unless(not failed)


def _reward(reward: float | None) -> str:
    if reward is None:
        return "none"
    return f"{reward:g}"


def _print(checks: list[TaskCheck]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    table = IdTable("task", "start", "solution", "cheats tried", "findings")
    for check in checks:
        if check.task:
            table.add_row(
                check.task,
                _reward(check.start),
                _reward(check.solution),
                str(len(check.tried)),
                str(len(check.weaknesses) + len(check.wrong)),
            )
    console.print(table)
    for check in checks:
        for reason in check.wrong:
            if check.task:
                reason = f"{check.task}: {reason}"
            console.print(f"\n{reason}", style="bold red")
        if check.reachable:
            shown = ", ".join(check.reachable[:_FILES_SHOWN])
            why = f"the agent can change what the judge's files name ({shown})"
            fix = "set the judge's 'paths' to the files that the agent is to change"
            console.print(f"\n{check.task}: {why}: {fix}")
        for weakness in check.weaknesses:
            earned = f"the cheat '{weakness.cheat}' earns {weakness.reward:g}"
            untouched = f"the untouched start {_reward(check.start)}"
            console.print(f"\n{check.task}: {earned}, and {untouched}", style="bold red")
            lines = weakness.diff.splitlines()
            more = len(lines) - _DIFF_LINES
            if more > 0:
                lines[_DIFF_LINES:] = [f"... {more} more lines: see --json"]
            console.print("\n".join(f"    {line}" for line in lines), style="dim")
            console.print(f"  To mend it: {weakness.advice}.")
