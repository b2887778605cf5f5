"""`rolltap record`: one command under the recorder."""

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import click

from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.commands.options import harness_option, recorder_options
from rolltap.trainer.rollouts.harness import load_harness, require_program
from rolltap.trainer.rollouts.recorder import Recorder


@click.command("record", context_settings={"ignore_unknown_options": True})
@recorder_options
@harness_option()
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def record_command(
    out: Path, engine: str, model: str, settings: dict[str, str], preset: str | None, command: tuple[str, ...]
) -> None:
    """Run one COMMAND under the recorder and end with its status.

    The command keeps its own configuration. With --harness, COMMAND is only the arguments of its program; a variable
    that you have set yourself stays as it is.
    """
    name, environment = command[0] if command else "", {}
    if preset is not None:
        harness = load_harness(preset)
        require_program(harness.program, harness.install)
        name, environment = harness.name, harness.environment(engine)
        command = (harness.program, *harness.arguments, *command)
    elif command:
        require_program(command[0])
    else:
        raise click.UsageError("give a COMMAND after --, or --harness")
    session_id = f"record-{secrets.token_hex(4)}"
    session = Session(session_id=session_id, task_id=name, group_id=session_id, harness=name, status="error")
    with Recorder(out, engine=engine, model=model, options=settings) as recorder:
        # the terminal sends Ctrl-C to the command as well: it decides what to do, and its status is ours
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        inherited = signal.SIG_IGN if before == signal.SIG_IGN else signal.SIG_DFL
        try:
            process = subprocess.Popen(
                command,
                env={**environment, **os.environ, **recorder.environment(session_id)},
                preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
            )
            session.exit_status = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        session.status = "completed" if session.exit_status == 0 else "failed"
        session.finished_at = utc_now()
        with RunWriter(out) as writer:
            writer.add_session(session)
        recorder.end(session_id)
    status = session.exit_status
    sys.exit(status if status >= 0 else 128 - status)
