"""`rolltap rerun`: runs a program again against its record.

`rolltap fork`: runs a harness again up to a call, and samples from there.
"""

import os
import secrets
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

import rolltap
from rolltap.errors import InputError
from rolltap.rollouts import Record
from rolltap.trainer.cli.options import (
    RUN,
    TASKS,
    command,
    harness_option,
    json_option,
    print_result,
    recorder_options,
    rollout_options,
    set_option,
)
from rolltap.trainer.cli.record import exit_status, program_of, run_program
from rolltap.trainer.cli.rollout import report_rollout
from rolltap.trainer.console import plain_console
from rolltap.trainer.names import counted


@command(
    "rerun",
    "rolltap rerun runs/first record-1a2b -- python agent.py",
    "rolltap rerun runs/first record-1a2b \\",
    '    --harness pi -- -p "Count the words."',
)
@click.argument("run", type=RUN)
@click.argument("session")
@harness_option()
@click.option(
    "--model",
    help="The model's folder or name, if it is no longer where the run has it.",
)
@set_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def rerun_command(
    run: Path,
    session: str,
    preset: str | None,
    model: str | None,
    settings: dict[str, list[str]],
    command: tuple[str, ...],
) -> None:
    """Run a COMMAND again against SESSION of RUN, without an engine.

    A recorded call answers the request that has its conversation: the same tools and messages.
    Dates, times and ids that a program writes new at each start do not matter. The first request
    that differs is named with both sides, the program gets an error, and so does every later
    request. Nothing is recorded.

    Start it where the session was: in the same folder, with files as they were. With --harness,
    COMMAND is only the arguments, as in `rolltap record`. A unique prefix of the session's id is
    accepted.

    Exit status 3: a request differs, or the program did not ask for a recorded call that is no side
    question. Otherwise the exit status is the program's.
    """
    harness, command = program_of(preset, command)
    record = Record.of(run, session)
    session_id = f"rerun-{secrets.token_hex(4)}"
    environment = {**harness.environment(record.engine, record.context_window), **os.environ}
    with TemporaryDirectory() as folder:
        again = record.rerun(Path(folder) / "run", model, settings)
        with again:
            status = run_program(command, {**environment, **again.environment(session_id)})
            answered, difference = record.result(again, session_id)
    calls = counted(len(record.calls), "recorded call")
    console = plain_console()
    console.print(
        f"session {record.session_id}: {answered} of {calls} answered; exit status {status}",
    )
    if difference is not None:
        console.print(difference, style="bold red")
        sys.exit(3)
    sys.exit(exit_status(status))


@command(
    "fork",
    "rolltap fork runs/first words-1a2b.0-3 --at 4 -n 8 \\",
    "    --tasks tasks.jsonl --model Qwen/Qwen3-4B --out runs/forks",
)
@recorder_options
@click.argument("run", type=RUN)
@click.argument("session")
@click.option(
    "--at",
    "call",
    required=True,
    metavar="CALL",
    help="The first call that is sampled: its number or id.",
)
@click.option(
    "--tasks",
    type=TASKS,
    required=True,
    help="Task file or folder that has the session's task.",
)
@harness_option()
@rollout_options
@json_option
def fork_command(
    run: Path,
    session: str,
    call: str,
    tasks: Path,
    settings: dict[str, list[str]],
    preset: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Run the harness of SESSION of RUN again up to a call, and sample from there.

    Every fork works in a fresh start of the session's task. Calls that began before CALL are
    answered by the record; CALL and what comes after it are sampled, and judged as in a rollout.
    The forks are one group. A fork that differs from the record before CALL has the status diverged
    and no reward, and is not tried again.

    Options are those of `rolltap rollout`. The harness is that of the session unless --harness
    names another.
    """
    record = Record.of(run, session)
    task = record.task(tasks, given["repositories"])
    if preset is None:
        preset = ""
        if record.session is not None:
            preset = record.session.harness
    if not preset.endswith(".toml") and preset not in rolltap.Harness.names():
        own = f"the session's preset {preset!r} is not one of rolltap's"
        raise InputError(f"{own}: give its file with --harness")
    recorder = {**settings, **record.fork(call)}
    forks = rolltap.rollout([task], harness=preset, recorder=recorder, **given)
    print_result(forks.summary(), as_json)
    report_rollout(forks)
