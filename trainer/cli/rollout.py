"""`rolltap rollout`: runs tasks, several sessions each.

`rolltap addon`: the path of the recorder's script.

`rolltap env`: prints the variables that send a program through a recorder.

`rolltap record`: runs one command under the recorder.

`rolltap reward`: gives a recorded session its reward.
"""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import click

import rolltap
from rolltap.rollouts import (
    Engines,
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
    TASKS,
    command,
    engine_option,
    harness_option,
    json_option,
    next_line,
    print_result,
    recorder_options,
    rollout_options,
)
from rolltap.trainer.console import plain_console, watched
from rolltap.trainer.names import SessionName, counted


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
    help="Names the session in the dataset; a new name if not given.",
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
    recorder = rolltap.Proxy(proxy, ca=ca, secret=secret_file.read().strip() if secret_file else "")
    console = plain_console()
    session = session or f"session-{secrets.token_hex(4)}"
    environment = recorder.environment(session)
    if preset is not None:
        harness = rolltap.Harness.load(preset)
        environment = {**harness.environment(engine), **environment}
        for line in (
            f"start it as: {shlex.join([harness.program, *harness.arguments])}",
            *harness.quirks,
        ):
            console.print(line)
    console.print(f"session: {session}; certificates: {recorder.bundle}")
    if form == "json":
        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        click.echo(f"export {name}={shlex.quote(value)}" if form == "shell" else f"{name}={value}")


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
@click.option(
    "--task",
    default="",
    metavar="ID",
    help="Name of the task; the program's name if not given.",
)
@click.option(
    "--group",
    default="",
    metavar="ID",
    help="Sessions that are compared with each other.",
)
@click.option(
    "--evaluate",
    metavar="COMMAND",
    help="Runs here in a shell afterwards, and gives the reward.",
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
    module of this folder among its arguments, else the program's. With --harness, COMMAND is only
    the arguments of the harness's program, and variables that you have set yourself override the
    harness's. The program is then asked for its version first. SIGTERM ends the program, and the
    session is cancelled.

    With --evaluate, the reward is 1 for the evaluator's exit status 0 and 0 for status 1; others
    are no verdict. Give another reward with `rolltap reward`.

    With --json, stdout has the session and its counts alone: the output of the command is on
    stderr.
    """
    harness, command = program_of(preset, command)
    if evaluate is not None:
        require_evaluator(evaluate)
    environment = harness.environment(engine)
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
    console = plain_console()
    recorder = rolltap.Recorder(out, engine=engine, model=model, options=settings)
    check_engines(recorder, console.print)
    with recorder, watched(Engines(engine).silent, console, bar=False):
        address = recorder.proxy(session_id).address
        console.print(f"the recorder listens at {address}, for the model {model}")
        own = recorder.environment(session_id)
        if yours := _replaced_proxies(own):
            console.print(f"the program does not get your {yours}: the recorder sets its own")
        try:
            session.exit_status = run_program(
                command,
                {**environment, **os.environ, **own},
                stdout=sys.stderr.fileno() if as_json else None,
            )
            session.status = "failed" if session.exit_status else "completed"
            session.finished_at = datetime.now(UTC)
            facts = end_recorded(session, recorder, evaluate)
        except KeyboardInterrupt:
            session.status = "cancelled"
            session.reward = None
            session.error = "stopped by a signal while it ran"
            recorder.end(session)
            raise
    told = counted(facts.calls, "model call")
    if facts.uncaptured:
        told += f", requests that look like one and were not answered: {facts.uncaptured}"
    why = session.error or facts.fault
    if why and session.exit_status and not facts.calls:
        why = f"the program ended with status {session.exit_status}: see its output; {why}"
    _report_recorded(session, told, why, out)
    if not facts.calls:
        asked_past = on_loopback(model_places(command, {**environment, **os.environ}))
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
        click.echo(json.dumps(written))
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


def _report_recorded(session: rolltap.Session, calls: str, why: str | None, out: Path) -> None:
    """Say on stderr what became of a session of `record`."""
    reward = "no reward" if session.reward is None else f"reward {session.reward:g}"
    ended = session.evidence.get("exit_status")
    if ended is not None:
        reward += f" (exit status {ended} of the evaluator)"
    name = session.session_id
    console = plain_console()
    console.print(
        f"session {name}: {session.status}, {reward}, {calls}. "
        f"See: {shlex.join(['rolltap', 'inspect', str(out), name])}",
    )
    if why:
        console.print(why, style="bold red")


def exit_status(ended: int) -> int:
    """Return the status with which a shell says that a program ended."""
    return 128 - ended if ended < 0 else ended


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
    env = {name: value for name, value in env.items() if name != "ROLLTAP_ENGINE_KEY_FILE"}
    # the terminal sends Ctrl-C to the command as well, which decides what to do; this process waits
    # for its status
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = signal.SIG_IGN if before == signal.SIG_IGN else signal.SIG_DFL
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
            signal.signal(
                signal.SIGTERM,
                signal.SIG_IGN,
            )  # another one would leave the program running
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
@click.option(
    "--task",
    default="",
    metavar="ID",
    help="Name of the task. Sessions of a task are of one group.",
)
@click.option(
    "--group",
    default="",
    metavar="ID",
    help="Sessions that are compared with each other.",
)
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
        click.echo(json.dumps(opened.inspect_session(rewarded.session_id).to_json()["session"]))
        return
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
