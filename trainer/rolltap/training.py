"""Training by a recipe."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rolltap.addons.errors import InputError, MissingPackageError
from rolltap.runs import Run
from rolltap.trainer.traces.build import require_collection
from rolltap.trainer.training.recipe import FINISHED, load_recipe


def train(recipe: str | Path, *, engine: str, out: str | Path, seed: int = 0) -> Run:
    """Roll out, train, publish and repeat, as a recipe says, and return the run.

    `recipe` is the path of a TOML file, as the README shows it; unknown keys are refused by name. `engine` is the URL
    of the vLLM server, which gets the new weights. `out` is the run folder. A stopped training goes on from its
    last checkpoint. `seed` is the trainer's. A line for each step goes to stderr, its metrics to `metrics.jsonl` in the
    run, and plots to `reward.png` and `training.png`. The trained model is in the folder `model` of the run.

    Raises `MissingPackageError` without the extra `train`; `InputError` for a wrong recipe, and for an `out` whose
    training is finished or was begun with another recipe or seed; `EngineError` when the engine refuses;
    `RecorderError` when the recorder dies.
    """
    recipe, out = Path(recipe), Path(out)
    _require_unfinished(out)
    settings = load_recipe(recipe)
    try:
        from rolltap.trainer.training import loop
    except ImportError as error:
        raise _missing(error) from error
    title = f"{recipe.stem}, seed {seed}"
    loop.train(settings, engine=engine, run=out, title=title, seed=seed, console=Console(stderr=True))
    return Run(out)


def train_offline(recipe: str | Path, runs: Sequence[str | Path], *, out: str | Path, seed: int = 0) -> Path:
    """Train on recorded runs, without an engine and a recorder, and return the folder of the trained model.

    `recipe` is that of `train`; its keys for rollouts and publishing are not used, and `tasks` and `harness` may be
    missing. Each group of the runs whose rewards differ is a row, and a step trains `groups_per_step` of them. The
    sessions may be of several policies: the loss weights their tokens by the recorded log-probabilities. `out` is a
    folder for the checkpoints and the model. A stopped training goes on from its last checkpoint, if the runs have the
    same groups. A line for each step goes to stderr, its metrics to `metrics.jsonl` in `out`, and a plot to
    `training.png`.

    Raises `MissingPackageError` without the extra `train`; `RunError` for a folder that is not a run; `InputError` for
    a wrong recipe, an `out` whose training is finished or was begun with another recipe, seed or other groups, no
    group to train on, a session in two runs, and a tokenizer or a sampling temperature that is not the recipe's.
    """
    require_collection(runs)
    if not runs:
        raise InputError("the list of runs is empty")
    recipe, out = Path(recipe), Path(out)
    _require_unfinished(out)
    settings = load_recipe(recipe)
    try:
        from rolltap.trainer.training import offline
    except ImportError as error:
        raise _missing(error) from error
    title, folders = f"{recipe.stem}, seed {seed}", [Path(run) for run in runs]
    offline.train(settings, folders, out=out, title=title, seed=seed, console=Console(stderr=True))
    return out / FINISHED


def _require_unfinished(out: Path) -> None:
    if (out / FINISHED).exists():
        raise InputError(f"{out} holds a finished training: choose another folder")


def _missing(error: ImportError) -> MissingPackageError:
    return MissingPackageError(f"the trainer is not installed ({error}): pip install 'rolltap[train]'")
