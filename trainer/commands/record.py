"""`rolltap record`: runs one command under the recorder."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console

import rolltap
from rolltap.rollouts import end_recorded, set_provenance
from rolltap.trainer.commands.options import examples, harness_option, recorder_options


@click.command(
    "record",
    epilog=examples(
        "rolltap record --model Qwen/Qwen3-4B --out runs/first -- python agent.py",
        "rolltap record --model Qwen/Qwen3-4B --out runs/first \\",
        '    --harness pi -- -p "Count the words."',
        "rolltap record --model Qwen/Qwen3-4B --out runs/first \\",
        '    --evaluate "pytest -q" --task words -- python agent.py',
    ),
    context_settings={"ignore_unknown_options": True},
)
@recorder_options
@harness_option()
@click.option("--task", default="", metavar="ID", help="Name of the task; the harness's name if not given.")
@click.option("--group", default="", metavar="ID", help="Sessions that are compared with each other.")
@click.option("--evaluate", metavar="COMMAND", help="Runs here afterwards, and gives the session its reward.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def record_command(
    out: Path,
    engine: str,
    model: str,
    settings: dict[str, list[str]],
    preset: str | None,
    task: str,
    group: str,
    evaluate: str | None,
    command: tuple[str, ...],
) -> None:
    """Run one COMMAND under the recorder and exit with its status.

    The command keeps its own configuration. With --harness, COMMAND is only the arguments of the harness's program, and
    variables that you have set yourself override the harness's. The program is then asked for its version first.

    With --evaluate, the reward is the number alone on the last line of the evaluator's output, or the JSON object there
    (the keys reward and parts). Without one it is 1 for status 0 and 0 for status 1; other statuses are no verdict.
    """
    if preset is not None:
        harness = rolltap.Harness.load(preset)
        command = (harness.program, *harness.arguments, *command)
    elif command:
        harness = rolltap.Harness(name=command[0], program=command[0], headless=[])
    else:
        raise click.UsageError("give a COMMAND after --, or --harness")
    harness.require_program()
    environment = harness.environment(engine)
    own = {name: value for name, value in os.environ.items() if name != "ROLLTAP_ENGINE_KEY_FILE"}
    session_id = f"record-{secrets.token_hex(4)}"
    session = rolltap.Session(
        session_id=session_id,
        task_id=task or harness.name,
        group_id=group or task or session_id,
        harness=harness.name,
        status="infrastructure",
    )
    if preset is not None:
        set_provenance(session, harness)
    with rolltap.Recorder(out, engine=engine, model=model, options=settings) as recorder:
        # the terminal sends Ctrl-C to the command as well, which decides what to do; this process waits for its status
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        inherited = signal.SIG_IGN if before == signal.SIG_IGN else signal.SIG_DFL
        try:
            process = subprocess.Popen(
                command,
                env={**environment, **own, **recorder.environment(session_id)},
                preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
            )
            session.exit_status = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        session.status = "completed" if session.exit_status == 0 else "failed"
        session.finished_at = datetime.now(UTC)
        facts = end_recorded(session, recorder, evaluate)
    reward = "no reward" if session.reward is None else f"reward {session.reward:g}"
    counts = [f"{facts.calls} model call{'s' * (facts.calls != 1)}"]
    counts += [f"requests that look like one and were not answered: {facts.uncaptured}"] if facts.uncaptured else []
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(
        f"session {session_id}: {session.status}, {reward}, {', '.join(counts)}. "
        f"See: {shlex.join(['rolltap', 'inspect', str(out), session_id])}",
        markup=False,
    )
    if why := session.error or facts.fault:
        console.print(why, markup=False, style="bold red")
    status = session.exit_status
    sys.exit(status if status >= 0 else 128 - status)
