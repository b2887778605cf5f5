"""`rolltap train`: the whole loop, by a recipe."""

from pathlib import Path

import click
from rich.console import Console

from rolltap.addons.errors import InputError, MissingPackageError
from rolltap.trainer.commands.options import FILE, FOLDER, engine_option
from rolltap.trainer.training.recipe import FINISHED, load_recipe
from rolltap.trainer.views.report import print_summary, summarize


@click.command("train")
@click.argument("recipe", type=FILE)
@click.option("--out", type=FOLDER, required=True, help="The run folder. A run that was stopped is resumed.")
@engine_option(help="URL of the vLLM server.")
@click.option("--seed", default=0, show_default=True, help="Seed of the trainer.")
def train_command(recipe: Path, out: Path, engine: str, seed: int) -> None:
    """Record, train, publish, repeat, as a RECIPE says.

    The new weights go to the running engine, which samples the next sessions.
    """
    if (out / FINISHED).exists():
        raise InputError(f"{out} holds a finished training: choose another --out")
    settings, console = load_recipe(recipe), Console(stderr=True)
    try:
        # they take seconds to import and are not needed by the other commands
        from rolltap.trainer.training.loop import train
        from rolltap.trainer.views.plot import plot_rewards
    except ImportError as error:
        raise MissingPackageError(f"the trainer is not installed ({error}): pip install 'rolltap[train]'") from error
    train(settings, engine=engine, run=out, seed=seed, console=console)
    plot_rewards(out, out / "reward.png", f"{recipe.stem}, seed {seed}")
    print_summary(summarize(out), Console())
    console.print(f"reward plot: {out / 'reward.png'}   trained model: {out / FINISHED}")
