"""`rolltap train`: the whole loop, by a recipe."""

from pathlib import Path

import click
from rich.console import Console

import rolltap
from rolltap.trainer.commands.options import FILE, FOLDER, engine_option, print_result


@click.command("train")
@click.argument("recipe", type=FILE)
@click.option("--out", type=FOLDER, required=True, help="The run folder. A run that was stopped is resumed.")
@engine_option(help="URL of the vLLM server.")
@click.option("--seed", default=0, show_default=True, help="Seed of the trainer.")
def train_command(recipe: Path, out: Path, engine: str, seed: int) -> None:
    """Record, train, publish and repeat, as a RECIPE says.

    The new weights are published to the running engine, which samples the next sessions.
    """
    run = rolltap.train(recipe, engine=engine, out=out, seed=seed)
    print_result(run.summary(), as_json=False)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"reward plot: {out / 'reward.png'}   trained model: {out / 'model'}", markup=False)
