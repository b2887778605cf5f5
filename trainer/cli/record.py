"""`rolltap record`: runs one command under the recorder.

`rolltap env`: prints the variables that send a program through a recorder.

`rolltap addon`: the path of the recorder's script.

`rolltap reward`: gives a recorded session its reward.
"""

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import click

import rolltap
from rolltap.rollouts import (
    Engines,
    Facts,
    check_engines,
    end_program,
    end_recorded,
    model_places,
    on_loopback,
    require_evaluator,
    set_provenance,
)
from rolltap.trainer.cli.options import (
    RUN,
    command,
    engine_option,
    harness_option,
    json_option,
    print_json,
    recorder_options,
)
from rolltap.trainer.console import plain_console, watched
from rolltap.trainer.names import counted


def _comparison_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --task and --group, by which the session is compared with others."""
    task = click.option("--task", default="", metavar="ID", help="Name of the task.")
    group = click.option(
        "--group",
        default="",
        metavar="ID",
        help="Sessions that are compared with each other. By default those of --task.",
    )
    return task(group(command))


@command(
    "addon",
    'mitmdump -s "$(rolltap addon)" --set rolltap_out=runs/first \\',
    "    --set rolltap_engine=http://127.0.0.1:8000 \\",
    "    --set rolltap_model=Qwen/Qwen3-4B",
)
def addon_command() -> None:
    """Print the path of the recorder's mitmproxy script.

    For `mitmdump -s "$(rolltap addon)"`.
    """
    click.echo(rolltap.Recorder.script())


@command(
    "env",
    'eval "$(rolltap env --proxy http://127.0.0.1:8080 --harness pi)"',
    "rolltap env --proxy http://127.0.0.1:8080 --format docker > session.env",
)
@click.option(
    "--proxy",
    required=True,
    metavar="URL",
    help="The recorder as the program reaches it: http://HOST:PORT.",
)
@click.option(
    "--session",
    metavar="ID",
    help="Name of the session in the dataset. By default a new name.",
)
@harness_option()
@engine_option(help="URL of the vLLM server.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path),
    default="~/.mitmproxy/mitmproxy-ca-cert.pem",
    show_default=True,
    help="The recorder's CA certificate.",
)
@click.option(
    "--secret-file",
    type=click.File(),
    help="The file of the recorder's rolltap_secret_file, if it has one.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "docker", "json"]),
    default="shell",
    show_default=True,
    help="Lines for a shell's eval, for `docker run --env-file`, or JSON.",
)
def env_command(
    proxy: str,
    session: str | None,
    preset: str | None,
    engine: str,
    ca: Path,
    secret_file: TextIO | None,
    form: str,
) -> None:
    """Print the variables that send a program through a recorder.

    The recorder runs already: see `rolltap addon`. The file rolltap-ca-bundle.pem is written beside
    the CA, with the usual root certificates and the CA. A container needs both files under the same
    paths.
    """
    secret = ""
    if secret_file is not None:
        secret = secret_file.read().strip()
    recorder = rolltap.Proxy(proxy, ca=ca, secret=secret)
    console = plain_console()
    session = session or f"session-{secrets.token_hex(4)}"
    environment = recorder.environment(session)
    if preset is not None:
        harness = rolltap.Harness.load(preset)
        environment = {**harness.environment(engine), **environment}
        console.print(f"start it as: {shlex.join([harness.program, *harness.arguments])}")
        for quirk in harness.quirks:
            console.print(quirk)
    console.print(f"session: {session}; certificates: {recorder.bundle}")
    if form == "json":
        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        line = f"{name}={value}"
        if form == "shell":
            line = f"export {name}={shlex.quote(value)}"
        click.echo(line)


@command(
    "record",
    "rolltap record --model Qwen/Qwen3-4B --out runs/first -- python agent.py",
    "rolltap record --model Qwen/Qwen3-4B --out runs/first \\",
    '    --harness pi -- -p "Count the words."',
    "rolltap record --model Qwen/Qwen3-4B --out runs/first \\",
    '    --evaluate "pytest -q" --task words -- python agent.py',
    context_settings={"allow_interspersed_args": False},
)
@recorder_options
@harness_option()
@_comparison_options
@click.option(
    "--evaluate",
    metavar="COMMAND",
    help="Command that runs here in a shell after COMMAND, and gives the reward.",
)
@json_option
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
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run one COMMAND under the recorder, and exit with its status.

    The status is 3 if that of COMMAND is 0 and no model call came.

    The command keeps its own configuration. Its name in the dataset is that of the first file or
    module of this folder among its arguments, else the program's. Without --task the task has the
    same name. With --harness, COMMAND is only the arguments of the harness's program, and variables
    that you have set yourself override the harness's. The program is then asked for its version
    first. SIGTERM ends the program, and the session is cancelled.

    With --evaluate, the reward is 1 for the evaluator's exit status 0 and 0 for status 1; others
    are no verdict. Give another reward with `rolltap reward`.

    With --json, stdout has the session and its counts alone: the output of the command is on
    stderr.
    """
    harness, command = program_of(preset, command)
    if evaluate is not None:
        require_evaluator(evaluate)
    environment = {**harness.environment(engine), **os.environ}
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
    stdout = None
    if as_json:
        stdout = sys.stderr.fileno()
    console = plain_console()
    recorder = rolltap.Recorder(out, engine=engine, model=model, options=settings)
    check_engines(recorder, console.print)
    with recorder, watched(Engines(engine).silent, console, bar=False):
        address = recorder.proxy(session_id).address
        console.print(f"the recorder listens at {address}, for the model {model}")
        own = recorder.environment(session_id)
        replaced = _replaced_proxies(own)
        if replaced:
            console.print(f"the program does not get your {replaced}: the recorder sets its own")
        try:
            session.exit_status = run_program(command, {**environment, **own}, stdout)
            session.status = "failed" if session.exit_status else "completed"
            session.finished_at = datetime.now(UTC)
            facts = end_recorded(session, recorder, evaluate)
        except KeyboardInterrupt:
            session.status = "cancelled"
            session.reward = None
            session.error = "stopped by a signal while it ran"
            recorder.end(session)
            raise
    _report_recorded(session, facts, out)
    if not facts.calls:
        asked_past = on_loopback(model_places(command, environment))
        if asked_past:
            advice = "give any other host, such as http://model.rolltap/v1"
            console.print(f"{asked_past}: {advice}", style="bold red")
    if as_json:
        view = rolltap.open_run(out).inspect_session(session_id)
        written = {
            "run": str(out),
            "calls": len(view.calls),
            "sampled_tokens": view.ledger.sampled,
            **view.to_json()["session"],
        }
        print_json(written)
    if session.exit_status == 0 and not facts.calls:
        sys.exit(3)
    sys.exit(exit_status(session.exit_status))


def _replaced_proxies(own: Mapping[str, str]) -> str:
    """Return the names of a user's variables of a proxy that the recorder's replace."""
    names: list[str] = []
    for name in own:
        if name.lower().endswith("_proxy") and name != "NODE_USE_ENV_PROXY" and name in os.environ:
            names.append(name)
    return ", ".join(names)


def _report_recorded(session: rolltap.Session, facts: Facts, out: Path) -> None:
    """Say on stderr what became of a session of `record`."""
    reward = "no reward"
    if session.reward is not None:
        reward = f"reward {session.reward:g}"
    ended = session.evidence.get("exit_status")
    if ended is not None:
        reward += f" (exit status {ended} of the evaluator)"
    calls = counted(facts.calls, "model call")
    if facts.uncaptured:
        ignored = counted(facts.uncaptured, "unanswered request")
        calls += f", {ignored} to a path like that of a model call"
    name = session.session_id
    console = plain_console()
    console.print(
        f"session {name}: {session.status}, {reward}, {calls}. "
        f"See: {shlex.join(['rolltap', 'inspect', str(out), name])}",
    )
    why = session.error or facts.fault
    if why and session.exit_status and not facts.calls:
        why = f"the program ended with status {session.exit_status}: see its output; {why}"
    if why:
        console.print(why, style="bold red")


def exit_status(ended: int) -> int:
    """Return the status with which a shell says that a program ended."""
    if ended < 0:  # by a signal
        return 128 - ended
    return ended


def program_of(
    preset: str | None,
    command: tuple[str, ...],
) -> tuple[rolltap.Harness, tuple[str, ...]]:
    """Return the harness of a command line and its whole command. With a preset, `command` is only
    its arguments."""
    if preset is not None:
        harness = rolltap.Harness.load(preset)
        command = (harness.program, *harness.arguments, *command)
    elif any(command[:1]):
        harness = rolltap.Harness(name=name_of(command), program=command[0], headless=[])
    else:
        raise click.UsageError("give a COMMAND after --, or --harness")
    harness.require_program()
    return harness, command


def name_of(command: Sequence[str]) -> str:
    """Return the name of a command: of its first argument that is a file or a module here, else of
    its program."""
    for argument in command[1:]:
        module = argument.replace(".", "/")
        if any(map(os.path.isfile, (argument, f"{module}.py", f"{module}/__main__.py"))):
            return Path(argument).name
    return Path(command[0]).name or command[0]


def run_program(command: Sequence[str], env: Mapping[str, str], stdout: int | None = None) -> int:
    """Run a program on this terminal, and return its status. A signal that ends this process ends
    it, too.

    It does not see the variable of the engine's key.
    """
    env = dict(env)
    env.pop("ROLLTAP_ENGINE_KEY_FILE", None)
    # the terminal sends Ctrl-C to the command as well, which decides what to do; this process waits
    # for its status
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = signal.SIG_DFL
    if before == signal.SIG_IGN:
        inherited = signal.SIG_IGN
    try:
        process = subprocess.Popen(
            command,
            env=env,
            stdout=stdout,
            preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
        )
        try:
            return process.wait()
        except KeyboardInterrupt:
            # another one would leave the program running
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_program(process.pid)
            raise
    finally:
        signal.signal(signal.SIGINT, before)


@command(
    "reward",
    "rolltap reward runs/first record-1a2b 0.5",
    "rolltap reward runs/first record-1a2b 1 --task words --part style=0.5",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("run", type=RUN)
@click.argument("session")
@click.argument("value", type=float)
@_comparison_options
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="NAME=VALUE",
    help="A part of the reward. Repeatable.",
)
@click.option("--change", is_flag=True, help="Replace the reward that the session has.")
@json_option
def reward_command(
    run: Path,
    session: str,
    value: float,
    parts: tuple[str, ...],
    as_json: bool,
    **how: Any,
) -> None:
    """Give SESSION of RUN a reward.

    VALUE is a finite number. For sessions that `rolltap rollout` did not start: of `rolltap
    record`, or of programs of your own. A reward that was given before stays in the run, the newest
    counts. A session without a completed call has none. Unique prefixes of ids are accepted.
    """
    opened = rolltap.open_run(run)
    rewarded = opened.reward(session, value, parts=dict(map(_part, parts)), **how)
    if as_json:
        view = opened.inspect_session(rewarded.session_id)
        return print_json(view.to_json()["session"])
    where = f"task {rewarded.task_id or '-'}, group {rewarded.group_id or '-'}"
    revision = f"revision {rewarded.revision}"
    click.echo(f"{rewarded.session_id}: {rewarded.reward:g} ({where}, {revision})")


def _part(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if not (name and equals):
            raise ValueError
        return name, float(value)
    except ValueError:
        raise click.BadParameter(f"--part {text!r} is not written as NAME=NUMBER") from None
