"""`rolltap rollout`: runs the tasks of a file, several sessions each."""

import sys
from collections import Counter
from pathlib import Path

import click

import rolltap
from rolltap.trainer.commands.options import FILE, harness_option, json_option, print_result, recorder_options


@click.command("rollout")
@recorder_options
@click.argument("tasks", type=FILE)
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
@json_option
def rollout_command(
    out: Path,
    engine: str,
    model: str,
    settings: dict[str, list[str]],
    tasks: Path,
    preset: str,
    sessions: int,
    concurrency: int,
    recorders: int,
    timeout: float,
    as_json: bool,
) -> None:
    """Run every task of a file several times and record it.

    TASKS is JSON Lines, one task a line. Each task's own evaluator gives the reward. A session that failed because of
    the engine, the recorder or the machine has the status infrastructure and no reward. Exit status 1: all failed so.
    """
    run = rolltap.rollout(
        tasks,
        harness=preset,
        engine=engine,
        model=model,
        out=out,
        sessions=sessions,
        concurrency=concurrency,
        recorders=recorders,
        timeout=timeout,
        options=settings,
    )
    print_result(run.summary(), as_json)
    _report_faults(run)


def _report_faults(run: rolltap.Run) -> None:
    """Say on stderr how many of the new sessions have no reward, and why. Exits with 1 when it is all of them."""
    new = [session for session in run.sessions() if session.session_id in set(run.new_session_ids)]
    faults = Counter(session.error or "" for session in new if session.status == "infrastructure")
    if not faults:
        return
    ((first, _),) = faults.most_common(1)
    click.echo(
        f"{faults.total()} of {len(new)} sessions have no reward, because the engine, the recorder or the machine "
        f"failed, or the harness made no call. The most frequent reason: {first}. See {run.path / 'logs'} and the "
        "recorder's log in the run; once it is mended, the same command adds new sessions.",
        err=True,
    )
    if faults.total() == len(new):
        sys.exit(1)
