"""`rolltap train`: the whole loop by a recipe, its training alone on recorded runs, or its plan.

`rolltap serve`: starts the engine.

`rolltap engine`: says what one serves, or resets it.
"""

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import rolltap
from rolltap.errors import RankError, RolltapError
from rolltap.rollouts import EngineAdmin, ending, engine_status, examine_model, reset_engine
from rolltap.trainer.cli.options import (
    FILE,
    OUT,
    RUN,
    command,
    engine_key_option,
    engine_option,
    exit_unless,
    json_option,
    next_line,
    print_json,
    print_result,
)
from rolltap.trainer.cli.record import exit_status
from rolltap.trainer.console import plain_console, runs_first


@command(
    "serve",
    "rolltap serve Qwen/Qwen3-4B --vllm ~/venvs/vllm/bin/vllm",
    "rolltap serve models/mine --lora-rank 16 -- --gpu-memory-utilization 0.5",
)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on.",
)
@click.option(
    "--vllm",
    default="vllm",
    show_default=True,
    help="The vllm program, in an environment of its own.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(1),
    help="Context window in tokens; the model's own if not given.",
)
@click.option(
    "--lora-rank",
    type=click.IntRange(0),
    default=0,
    help="Accept LoRA adapters up to this rank.",
)
@click.option(
    "--max-staleness",
    type=click.IntRange(0),
    default=0,
    help="The recipe's `max_staleness`. The engine holds so many more adapters.",
)
@click.option(
    "--routing",
    is_flag=True,
    help="Return the experts of each token, for `rolltap_routing`.",
)
@engine_key_option(
    "File with the key that the engine requires; made if it does not exist. By default a new file.",
)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def serve_command(
    model: str,
    lora_rank: int,
    max_staleness: int,
    **how: Any,
) -> None:
    """Start vLLM for recording and publishing.

    It serves MODEL with endpoints and flags that these and the model need, on GPUs, or on a CPU
    with vLLM's CPU build. Every route but /health requires a key. Arguments after `--` are passed
    on to `vllm serve`. They win over those that rolltap gives, such as `--max-num-seqs 64`. A
    start-up that takes more than two hours is stopped.
    """
    server = rolltap.EngineServer(model, lora_rank=lora_rank, max_staleness=max_staleness, **how)
    with server:
        console = plain_console()
        console.print(f"vLLM serves {model} at {server.url}", style="bold")
        if lora_rank:
            batch, memory = server.adapter_places
            places = f"{batch} adapters in a batch and {memory} in memory"
            console.print(f"It has places for {places}, as max_staleness = {max_staleness} needs.")
        console.print(f"export ROLLTAP_ENGINE_KEY_FILE={shlex.quote(str(server.key_file))}")
        with suppress(RolltapError):  # without the recorder's packages, the recorder says it
            for problem in examine_model(model, {}).problems:
                console.print(f"warning: {problem}", style="yellow")
        status = server.wait()
        console.print(ending(status), style="bold red")
        sys.exit(exit_status(status))


@command(
    "engine",
    "rolltap engine status http://127.0.0.1:8000",
    "rolltap engine reset http://127.0.0.1:8000",
)
@click.argument("action", type=click.Choice(["status", "reset"]))
@click.argument("url", envvar="ROLLTAP_ENGINE", default="http://127.0.0.1:8000")
@engine_key_option()
@click.option(
    "--steal",
    is_flag=True,
    help="Reset an engine that belongs to a training. If the training still runs, it fails.",
)
@json_option
def engine_command(
    action: str,
    url: str,
    steal: bool,
    as_json: bool,
) -> None:
    """Say what an engine serves, or reset it.

    The status has the model, the weights, the adapters, and the training that owns the engine at
    URL. A reset first unloads the adapters of trainings. An engine that is paused, or has other
    weights, loads those of its own model. Exit status 1: the engine does not answer, refuses, is
    not healthy, or belongs to a training.
    """
    if action == "reset":
        reset_engine(EngineAdmin(url), steal=steal)
    found = engine_status(EngineAdmin(url))
    if as_json:
        print_json(found._asdict())
    else:
        click.echo(str(found))
    exit_unless(found.healthy)


@command(
    "train",
    "rolltap train recipe.toml --dry-run",
    "rolltap train recipe.toml --out runs/training",
    "rolltap train recipe.toml --out runs/offline --from runs/first",
)
@click.argument("recipe", type=FILE)
@click.option(
    "--out",
    type=OUT,
    help="The run folder. A run that was stopped is resumed. --dry-run needs none.",
)
@engine_option(help="URL of the vLLM server, or several separated by commas.")
@click.option(
    "--ray",
    help="Address of a Ray cluster whose nodes run the sessions, in place of the recipe's.",
)
@click.option(
    "--steal",
    is_flag=True,
    help="Take engines that belong to another training, which then fails.",
)
@click.option(
    "--from",
    "runs",
    type=RUN,
    multiple=True,
    help="Train on this recorded run, without an engine and a recorder. Repeatable.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the trainer.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Start nothing: print the memory and the numbers of the training.",
)
@json_option
@click.pass_context
def train_command(
    context: click.Context,
    recipe: Path,
    out: Path | None,
    engine: str,
    ray: str | None,
    steal: bool,
    runs: tuple[Path, ...],
    seed: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Record, train, publish and repeat, as a RECIPE says.

    The new weights are published to the running engines, which sample the next sessions. torchrun
    and accelerate launch start several training processes, on one node or several: --dry-run prints
    the lines of each node.

    With --from, nothing is recorded and published: the groups of the recorded runs are trained on.

    With --dry-run, exit status 1 says that the training cannot work.
    """
    given = context.get_parameter_source("engine") is ParameterSource.COMMANDLINE
    if runs and (given or steal or ray):
        raise click.UsageError(
            "--from trains without an engine: leave out --engine, --ray and --steal, or --from",
        )
    if dry_run:
        named: str | None = engine
        if runs or context.get_parameter_source("engine") is ParameterSource.DEFAULT:
            named = None
        plan = rolltap.plan_training(recipe, engine=named, runs=runs, out=out)
        print_result(plan, as_json)
        exit_unless(plan.can_start)
        return
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    if as_json:
        raise click.UsageError("--json prints a plan: add --dry-run, or leave it out")
    try:
        _train(recipe, out, engine, ray, steal, runs, seed)
    except RankError:
        if runs_first():
            raise
        sys.exit(1)  # the first process says why


def _train(
    recipe: Path,
    out: Path,
    engine: str,
    ray: str | None,
    steal: bool,
    runs: tuple[Path, ...],
    seed: int,
) -> None:
    if runs:
        rolltap.train_offline(recipe, runs, out=out, seed=seed)
    else:
        rolltap.train(
            recipe,
            engine=engine,
            out=out,
            seed=seed,
            steal=steal,
            ray=ray,
        )
    console = plain_console(quiet=not runs_first())
    inspect = shlex.join(["rolltap", "inspect", str(out)])
    console.print(f"The trained model is in {out / 'model'}.")
    console.print(f"This command shows the groups, and the tokens of each step: {inspect}")
    console.print("The next command shows the plots.")
    console.print(next_line("view", out))
