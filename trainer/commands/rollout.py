"""`rolltap rollout`: the tasks of a file, several sessions each."""

import asyncio
from pathlib import Path

import click
from rich.console import Console

from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.commands.options import FILE, harness_option, json_option, print_result, recorder_options
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.rollouts.harness import load_harness, require_program
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.scheduler import Plan, rollout
from rolltap.trainer.rollouts.task import load_tasks
from rolltap.trainer.views.report import print_summary, summarize


@click.command("rollout")
@recorder_options
@click.argument("tasks", type=FILE)
@harness_option(required=True)
@click.option("-n", "--sessions", default=8, show_default=True, type=click.IntRange(1), help="Sessions of each task.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1), help="Sessions at the same time.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds after which a harness is stopped.")
@json_option
def rollout_command(
    out: Path,
    engine: str,
    model: str,
    settings: dict[str, str],
    tasks: Path,
    preset: str,
    sessions: int,
    concurrency: int,
    timeout: float,
    as_json: bool,
) -> None:
    """Run every task of a file several times and record it.

    TASKS is JSON Lines, a task a line. Rewards are those of each task's own evaluator.
    """
    task_list, harness = load_tasks(tasks), load_harness(preset)
    require_program(harness.program, harness.install)
    plan = Plan(harness, sessions, concurrency, timeout)
    with (
        Recorder(out, engine=engine, model=model, options=settings) as recorder,
        RunWriter(out) as writer,
        progress_bar(Console(stderr=True)) as advance,
    ):
        asyncio.run(rollout(task_list, plan, recorder, writer, policy_version="default", advance=advance))
    print_result(summarize(out), as_json, print_summary)
