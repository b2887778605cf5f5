"""`rolltap train`: the whole loop by a recipe, or its training alone, on recorded runs."""

from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import FILE, FOLDER, RUN, engine_option, print_result


@click.command("train")
@click.argument("recipe", type=FILE)
@click.option("--out", type=FOLDER, required=True, help="The run folder. A run that was stopped is resumed.")
@engine_option(help="URL of the vLLM server.")
@click.option(
    "--from",
    "runs",
    type=RUN,
    multiple=True,
    help="Train on this recorded run, without an engine and a recorder. Repeatable.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the trainer.")
@click.pass_context
def train_command(
    context: click.Context, recipe: Path, out: Path, engine: str, runs: tuple[Path, ...], seed: int
) -> None:
    """Record, train, publish and repeat, as a RECIPE says.

    The new weights are published to the running engine, which samples the next sessions.

    With --from, nothing is recorded and published: the groups of the recorded runs are trained on.
    """
    console = Console(stderr=True, soft_wrap=True)
    if runs:
        if context.get_parameter_source("engine") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--from trains without an engine: leave out --engine, or --from")
        model = rolltap.train_offline(recipe, runs, out=out, seed=seed)
        return console.print(f"trained model: {model}", markup=False)
    run = rolltap.train(recipe, engine=engine, out=out, seed=seed)
    print_result(run.summary(), as_json=False)
    console.print(f"plots: {out / 'reward.png'}, {out / 'training.png'}   trained model: {out / 'model'}", markup=False)
