"""The `rolltap` command."""

import asyncio
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rolltap.addons.store.errors import RunError
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.commands.export import export_command
from rolltap.trainer.commands.filter import filter_command
from rolltap.trainer.commands.import_calls import import_command
from rolltap.trainer.commands.inspect import check_command, inspect_command, print_run
from rolltap.trainer.commands.merge import merge_command
from rolltap.trainer.commands.split import split_command
from rolltap.trainer.commands.traces import traces_command
from rolltap.trainer.commands.verify import verify_command
from rolltap.trainer.engine.serve import EngineServer
from rolltap.trainer.errors import UserError
from rolltap.trainer.rollouts.environment import proxy_environment, proxy_url, write_bundle
from rolltap.trainer.rollouts.harness import harness_names, load_harness, require_program
from rolltap.trainer.rollouts.recorder import Recorder, addon_path
from rolltap.trainer.rollouts.scheduler import Plan, rollout
from rolltap.trainer.rollouts.task import load_tasks
from rolltap.trainer.traces.ledger import LedgerError

console = Console(stderr=True)

_RUN = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
_HARNESS_HELP = f"A preset: {', '.join(harness_names())}, or a .toml file of your own."


@click.group()
@click.version_option(package_name="rolltap")
def rolltap() -> None:
    """Taps agent rollouts off the wire, and trains on them."""


def main() -> None:
    """The console script."""
    run(rolltap)


def run(command: click.Command) -> None:
    """Run a command as a program: a user's error, a full disk and the like end it with status 1 and a message, Ctrl-C
    or SIGTERM with 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (UserError, RunError, LedgerError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        console.print("stopped; nothing that was recorded is lost")
        sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop as Ctrl-C does: while an event loop runs its own handler cancels the tasks in order."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(number, frame)
    else:  # Ctrl-C is ignored
        raise KeyboardInterrupt


def _recorder_options(command: Callable[..., None]) -> Callable[..., None]:
    """--out, --engine, --model and --set: what every recording command takes."""
    for option in (
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Further option of the recorder."),
        click.option("--model", required=True, help="Folder or name of the served model, for its tokenizer."),
        click.option(
            "--engine",
            default="http://127.0.0.1:8000",
            show_default=True,
            help="URL of vLLM; several by commas.",
        ),
        click.option("--out", type=_RUN, required=True, help="The run folder to record into."),
    ):
        command = option(command)
    return command


def _settings(settings: tuple[str, ...]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings]
    for name, equals, _ in pairs:
        if not equals:
            raise UserError(f"--set {name}: write it as NAME=VALUE")
    return {name: value for name, _, value in pairs}


@rolltap.command()
def addon() -> None:
    """Print the path of the recorder's mitmproxy script.

    For `mitmdump -s "$(rolltap addon)"`.
    """
    click.echo(addon_path())


@rolltap.command()
@click.argument("model")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on. Its routes have no password."
)
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@click.option("--vllm", default="vllm", show_default=True, help="The vllm program, in an environment of its own.")
@click.option("--max-model-len", type=click.IntRange(1), help="Context window in tokens; the model's own if not given.")
@click.option("--lora-rank", type=click.IntRange(0), default=0, help="Accept LoRA adapters up to this rank.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def serve(
    model: str, host: str, port: int, vllm: str, max_model_len: int | None, lora_rank: int, extra: tuple[str, ...]
) -> None:
    """Start vLLM for MODEL, with what recording and publishing need.

    On GPUs, or on the CPU without.
    Arguments after `--` go to `vllm serve` as they are.
    """
    server = EngineServer(
        model, vllm=vllm, host=host, port=port, max_model_len=max_model_len, lora_rank=lora_rank, extra=extra
    )
    server.start()
    with server:
        console.print(f"vLLM serves {model} at {server.url}", style="bold")
        sys.exit(server.wait())


@rolltap.command(context_settings={"ignore_unknown_options": True})
@_recorder_options
@click.option("--harness", "preset", metavar="NAME", help=_HARNESS_HELP)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def record(
    out: Path, engine: str, model: str, settings: tuple[str, ...], preset: str | None, command: tuple[str, ...]
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
    session = Session(f"record-{secrets.token_hex(4)}", name, "", name, "error")
    session.group_id = session.session_id
    with Recorder(out, engine=engine, model=model, options=_settings(settings)) as recorder:
        # the terminal sends Ctrl-C to the command as well: it decides what to do, and its status is ours
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        inherited = signal.SIG_IGN if before == signal.SIG_IGN else signal.SIG_DFL
        try:
            process = subprocess.Popen(
                command,
                env={**environment, **os.environ, **recorder.environment(session.session_id)},
                preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
            )
            session.exit_status = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        session.status = "completed" if session.exit_status == 0 else "failed"
        session.finished_at = utc_now()
        with RunWriter(out) as writer:
            writer.add_session(session)
        recorder.end(session.session_id)
    status = session.exit_status
    sys.exit(status if status >= 0 else 128 - status)


@rolltap.command("env")
@click.option("--proxy", required=True, metavar="URL", help="The recorder as the program reaches it: http://HOST:PORT.")
@click.option("--session", metavar="ID", help="Names the session in the dataset; a new name if not given.")
@click.option("--harness", "preset", metavar="NAME", help=_HARNESS_HELP)
@click.option("--engine", default="http://127.0.0.1:8000", show_default=True, help="URL of the vLLM server.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path),
    default="~/.mitmproxy/mitmproxy-ca-cert.pem",
    show_default=True,
    help="The recorder's CA certificate.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["shell", "docker", "json"]),
    default="shell",
    show_default=True,
    help="Lines for a shell's eval, for `docker run --env-file`, or JSON.",
)
def environment_command(proxy: str, session: str | None, preset: str | None, engine: str, ca: Path, form: str) -> None:
    """Print the variables that send a program through a recorder.

    The recorder runs already.
    ROLLTAP_SECRET holds the recorder's secret, if it has one. A file with the usual root certificates and the
    recorder's CA, rolltap-ca-bundle.pem, is written beside the CA. A container needs both files under the same paths.
    """
    address = urlsplit(proxy)
    if address.scheme != "http" or not address.hostname or "@" in address.netloc or address.path.strip("/"):
        raise UserError(f"--proxy {proxy}: write it as http://HOST:PORT")
    ca = ca.expanduser().absolute()
    if not ca.is_file():
        raise UserError(f"there is no CA certificate {ca}: the recorder makes it when it first starts; see --ca")
    session = session or f"session-{secrets.token_hex(4)}"
    environment = {}
    if preset is not None:
        harness = load_harness(preset)
        environment = harness.environment(engine)
        for line in (f"start it as: {shlex.join([harness.program, *harness.arguments])}", *harness.quirks):
            console.print(line, markup=False, soft_wrap=True)
    bundle = ca.with_name("rolltap-ca-bundle.pem")
    try:
        write_bundle(ca, bundle)
    except OSError as error:
        raise UserError(f"cannot write {bundle}: {error.strerror}; copy the CA elsewhere and see --ca") from error
    url = proxy_url(address.netloc, session, os.environ.get("ROLLTAP_SECRET", ""))
    environment = {**environment, **proxy_environment(url, ca, bundle)}
    console.print(f"session: {session}; certificates: {bundle}", markup=False, soft_wrap=True)
    if form == "json":
        click.echo(json.dumps(environment, indent=2))
        return
    for name, value in environment.items():
        click.echo(f"export {name}={shlex.quote(value)}" if form == "shell" else f"{name}={value}")


@rolltap.command("rollout")
@_recorder_options
@click.argument("tasks", type=_FILE)
@click.option("--harness", "preset", metavar="NAME", required=True, help=_HARNESS_HELP)
@click.option("-n", "--sessions", default=8, show_default=True, type=click.IntRange(1), help="Sessions of each task.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1), help="Sessions at the same time.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds after which a harness is stopped.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def rollout_command(
    out: Path,
    engine: str,
    model: str,
    settings: tuple[str, ...],
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
    columns = (
        TextColumn("sessions"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with (
        Recorder(out, engine=engine, model=model, options=_settings(settings)) as recorder,
        RunWriter(out) as writer,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("", total=len(task_list) * sessions)

        def done(session: Session) -> None:
            progress.update(bar, advance=1, description=f"{session.session_id} {session.status} {session.reward}")

        plan = Plan(harness, sessions, concurrency, timeout)
        asyncio.run(rollout(task_list, plan, recorder, writer, policy_version="default", done=done))
    print_run(out, as_json)


@rolltap.command()
@click.argument("recipe", type=_FILE)
@click.option("--out", type=_RUN, required=True, help="The run folder. A run that was stopped is resumed.")
@click.option("--engine", default="http://127.0.0.1:8000", show_default=True, help="URL of the vLLM server.")
@click.option("--seed", default=0, show_default=True, help="Seed of the trainer.")
def train(recipe: Path, out: Path, engine: str, seed: int) -> None:
    """Record, train, publish, repeat, as a RECIPE says.

    The new weights go to the running engine, which samples the next sessions.
    """
    # torch and TRL take seconds to import and are not needed by the other commands
    from rolltap.trainer.training.loop import FINISHED
    from rolltap.trainer.training.loop import train as run_recipe
    from rolltap.trainer.training.recipe import load_recipe
    from rolltap.trainer.views.report import plot_rewards

    if (out / FINISHED).exists():
        raise UserError(f"{out} holds a finished training: choose another --out")
    run_recipe(load_recipe(recipe), engine=engine, run=out, seed=seed, console=console)
    plot_rewards(out, out / "reward.png", f"{recipe.stem}, seed {seed}")
    print_run(out, as_json=False)
    console.print(f"reward plot: {out / 'reward.png'}   trained model: {out / FINISHED}")


rolltap.add_command(inspect_command)
rolltap.add_command(check_command)
rolltap.add_command(import_command)
rolltap.add_command(merge_command)
rolltap.add_command(split_command)
rolltap.add_command(filter_command)
rolltap.add_command(verify_command)
rolltap.add_command(traces_command)
rolltap.add_command(export_command)
