"""Training by a recipe."""

from pathlib import Path

from rich.console import Console

from rolltap.addons.errors import InputError, MissingPackageError
from rolltap.runs import Run
from rolltap.trainer.training.recipe import FINISHED, load_recipe


def train(recipe: str | Path, *, engine: str, out: str | Path, seed: int = 0) -> Run:
    """Roll out, train, publish and repeat, as a recipe says, and return the run.

    `recipe` is the path of a TOML file, as the README shows it; unknown keys are refused by name. `engine` is the URL
    of the vLLM server, which gets the new weights. `out` is the run folder. A stopped training goes on from its
    last checkpoint. `seed` is the trainer's. A line for each step goes to stderr. The trained model is in the folder
    `model` of the run, and a plot of the rewards in `reward.png`.

    Raises `MissingPackageError` without the extra `train`; `InputError` for a wrong recipe, and for an `out` whose
    training is finished; `EngineError` when the engine refuses; `RecorderError` when the recorder dies.
    """
    recipe, out = Path(recipe), Path(out)
    if (out / FINISHED).exists():
        raise InputError(f"{out} holds a finished training: choose another folder")
    settings = load_recipe(recipe)
    try:
        from rolltap.trainer.training import loop
        from rolltap.trainer.views.plot import plot_rewards
    except ImportError as error:
        raise MissingPackageError(f"the trainer is not installed ({error}): pip install 'rolltap[train]'") from error
    loop.train(settings, engine=engine, run=out, seed=seed, console=Console(stderr=True))
    plot_rewards(out, out / "reward.png", f"{recipe.stem}, seed {seed}")
    return Run(out)
