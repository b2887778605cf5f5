"""`rolltap tasks check`: tries tasks before a rollout."""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import rolltap
from rolltap.trainer.cli.options import examples, field_options, json_option
from rolltap.types import TaskCheck

_DIFF_LINES = 30


@click.group("tasks")
def tasks_group() -> None:
    """Work on tasks."""


@tasks_group.command(
    "check",
    epilog=examples(
        "rolltap tasks check tasks.jsonl",
        "rolltap tasks check harbor-tasks/ --runtime sandbox",
        "rolltap tasks check rows.parquet --repositories checkouts --runtime sandbox",
    ),
)
@click.argument("tasks", type=click.Path(path_type=Path, exists=True))
@field_options("repositories", "runtime", "tools", "container_engine", "container_arguments")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Maximum number of judgements that run at the same time.",
)
@json_option
def check_command(tasks: Path, as_json: bool, **given: Any) -> None:
    """Try TASKS before a rollout: with cheats.

    TASKS is as for `rolltap rollout`. The judge of each task judges its untouched start, which must earn less than the
    best reward, its own solution, which must earn the best, and the start with each of the standard cheats, which must
    earn no more than the untouched one. Use the runtime of the rollout: it decides what the judge protects.

    Exit status 0: all of this holds. Exit status 1: it does not, or a task could not be tried.
    """
    checks = rolltap.check_tasks(tasks, **given)
    if as_json:
        click.echo(json.dumps([check.to_json() for check in checks]))
    else:
        _print(checks)
    sys.exit(0 if all(check.passed for check in checks) else 1)


def _print(checks: list[TaskCheck]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    table = Table("task", "start", "solution", "cheats tried", "findings")
    for check in checks:
        solution = _reward(check.solution) if check.has_solution else "none"
        counts = (str(len(check.tried)), str(len(check.weaknesses) + len(check.wrong)))
        table.add_row(check.task or "(refused)", _reward(check.start), solution, *counts)
    console.print(table)
    for check in checks:
        for reason in check.wrong:
            console.print(f"\n{check.task}: {reason}", style="bold red")
        for weakness in check.weaknesses:
            console.print(f"\n{check.task}: {weakness.reward:g} for {weakness.cheat}", style="bold red")
            lines = weakness.diff.splitlines()
            more = [f"... {len(lines) - _DIFF_LINES} more lines; --json has all"] if len(lines) > _DIFF_LINES else []
            for line in [*lines[:_DIFF_LINES], *more]:
                console.print(f"    {line}", style="dim")
            console.print(f"  to mend it: {weakness.advice}")


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:g}"
