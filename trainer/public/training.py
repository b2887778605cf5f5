"""Training by a recipe."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rolltap.addons.errors import InputError, MissingPackageError, install_command
from rolltap.runs import Run
from rolltap.trainer.console import plain_console, runs_first
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.traces.build import require_collection
from rolltap.trainer.training.recipe import FINISHED, Recipe, load_recipe, require_steps_left

if TYPE_CHECKING:
    from rolltap.trainer.training.plan.plan import TrainingPlan


def train(
    recipe: str | Path,
    *,
    engine: str,
    out: str | Path,
    seed: int = 0,
    steal: bool = False,
    ray: str | None = None,
) -> Run:
    """Roll out, train, publish and repeat, as a recipe says, and return the run.

    `recipe` is the path of a TOML file, as the README shows it; unknown keys are refused by name.
    `engine` is the URL of the vLLM server, which gets the new weights, or several separated by
    commas. The training owns them until it ends; `steal` takes them from another training, which
    then fails. `ray` is the address of a cluster whose nodes run the sessions, in place of the
    recipe's. `out` is the run folder. A stopped training resumes from its last checkpoint. `seed`
    is the trainer's. A line for each step goes to stderr, and its metrics to `metrics.jsonl` in the
    run, which `view_run` plots. The trained model is in the folder `model` of the run.

    With `torchrun` or `accelerate launch`, every process calls it. The first one rolls out,
    publishes and prints.

    Raises `MissingPackageError` without the extra `train`; `InputError` for a wrong recipe, for an
    `out` whose training has taken all steps or was begun with another recipe or seed, and for other
    numbers of processes and engines than the recipe's; `EngineError` when an engine refuses,
    belongs to another training, or does not serve the trainer's weights; `RecorderError` when the
    recorder dies; `RankError` when another process failed.
    """
    out = Path(out)
    read = None
    if runs_first():
        read = _read(recipe, rollouts=True, out=out, ray=ray)
    with _importing():
        from rolltap.trainer.training import loop, online
    if read is not None:
        read = online.typed_recipe(read, engine)
    settings = loop.join_processes(read)
    console = plain_console(quiet=not runs_first())
    source = online.OnlineTraces(
        settings,
        out,
        engine=engine,
        seed=seed,
        console=console,
        steal=steal,
    )
    loop.train(source, settings, out, seed=seed, console=console)
    return Run(out)


def train_offline(
    recipe: str | Path,
    runs: Sequence[str | Path],
    *,
    out: str | Path,
    seed: int = 0,
) -> Path:
    """Train on recorded runs, without an engine, and return the folder of the trained model.

    `recipe` is that of `train`; its keys for rollouts and publishing are not used, and `tasks` and
    `harness` may be missing. Each group of the runs whose rewards differ is a row, and a step
    trains `groups_per_step` of them. The sessions may be of several policies: the loss weights
    their tokens by the recorded log-probabilities. `out` is a folder for the checkpoints and the
    model. A stopped training resumes from its last checkpoint, if the runs have the same groups. A
    line for each step goes to stderr, and its metrics to `metrics.jsonl` in `out`, which `view_run`
    plots. Several processes train as with `train`.

    Raises `MissingPackageError` without the extra `train`; `RunError` for a folder that is not a
    run; `InputError` for a wrong recipe, an `out` whose training is finished or was begun with
    another recipe, seed or other groups, no group to train on, the same session in two runs, and a
    tokenizer or a sampling temperature that is not the recipe's; `RankError` when another process
    failed.
    """
    require_collection(runs)
    if not runs:
        raise InputError("the list of runs is empty: give at least one")
    out = Path(out)
    read = None
    if runs_first():
        read = _read(recipe, rollouts=False, out=out)
    with _importing():
        from rolltap.trainer.training import loop, offline
    settings = loop.join_processes(read)
    console = plain_console(quiet=not runs_first())
    folders = [Path(run) for run in runs]
    source = offline.RecordedTraces(settings, folders, out=out, seed=seed, console=console)
    loop.train(source, settings, out, seed=seed, console=console)
    return out / FINISHED


def plan_training(
    recipe: str | Path,
    *,
    engine: str | None = None,
    processes: int | None = None,
    runs: Sequence[str | Path] = (),
    out: str | Path | None = None,
) -> "TrainingPlan":
    """Return what a training by a recipe would take, and which of its combinations cannot work.
    Nothing is started.

    `engine` is that of `train`, and `processes` the number of training processes; by default they
    are what the recipe's table [machine] says. With `runs` it is the plan of `train_offline`: no
    engine and no rollouts. `out` is for the plan's lines. The recipe's model needs no weights:
    `config.json` and the tokenizer are enough.

    Raises `MissingPackageError` without the extra `train`; `InputError` for a recipe that cannot be
    read, nor its model, preset or tasks.
    """
    settings = _read(recipe, rollouts=not runs)
    with _importing():
        from rolltap.trainer.training.plan.plan import plan
    if out is not None:
        out = Path(out)
    return plan(
        settings,
        engine=engine,
        processes=processes,
        file=Path(recipe),
        runs=[Path(run) for run in runs],
        out=out,
    )


def _read(
    recipe: str | Path,
    *,
    rollouts: bool,
    out: Path | None = None,
    ray: str | None = None,
) -> Recipe:
    """Return a recipe whose files are there, before the slow imports.

    A plan, without `out`, needs no tasks yet.
    """
    settings = load_recipe(Path(recipe), ray)
    if out is not None:
        require_steps_left(out, settings)
    if not settings.model.is_dir():
        missing = f"the folder {settings.model} does not exist"
        raise InputError(f"{recipe}: model: {missing}: correct the key in the recipe")
    if not rollouts:
        return settings
    if settings.harness is not None:
        Harness.load(settings.harness)
    tasks = settings.tasks
    if tasks is not None and (out is not None or tasks.exists()):
        load_tasks(tasks, repositories=settings.repositories)
    if settings.evaluation is None:
        return settings
    held_out = settings.evaluation.tasks
    if out is not None or held_out.exists():
        try:
            load_tasks(held_out, repositories=settings.repositories)
        except InputError as error:
            raise InputError(f"{recipe}: evaluation.tasks: {error}") from error
    return settings


@contextmanager
def _importing() -> Iterator[None]:
    """Raise `MissingPackageError` when an import of the block lacks a package.

    Other errors stay as they are.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        # TRL and transformers raise RuntimeError, whose cause is the ImportError
        if not isinstance(error, ImportError) and not isinstance(error.__cause__, ImportError):
            raise
        raise MissingPackageError(
            f"the trainer is not installed ({error}): {install_command('train')}",
        ) from error
