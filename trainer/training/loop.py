"""The online loop: publish the weights, roll out, train on the recorded traces, and again.

TRL's trainer drives it. For each batch it calls `OnlineTraces`, which publishes the current weights, runs the sessions
and reads their calls from the run folder. Sessions are not run in a data loader, because data loaders fetch ahead: the
traces would be off policy.

A stopped training goes on from its last checkpoint. All steps after it are taken again, with the sessions that are in
the run folder. Nothing else decides on a step: its tasks are a function of the seed and the step, and the checkpoint
holds the weights, the optimizer and the scheduler. What else decides is refused to change (`begun`).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session
from rolltap.addons.store.staging import new_folder
from rolltap.trainer.blocking import run_blocking
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.publish import CheckpointPublisher, LoraPublisher, Publisher
from rolltap.trainer.grpo.config import TraceGRPOConfig
from rolltap.trainer.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.scheduler import Group, Plan, run_groups
from rolltap.trainer.rollouts.task import Task, load_tasks
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.arguments import check_arguments, lora_config, sampling, training_arguments
from rolltap.trainer.training.attempts import claimed_attempt
from rolltap.trainer.training.begun import begun_online
from rolltap.trainer.training.checkpoints import checkpoint_step, last_checkpoint, remove_incomplete
from rolltap.trainer.training.online import OnlineTraces
from rolltap.trainer.training.recipe import FINISHED, Recipe
from rolltap.trainer.training.reports import run_reports


def train(recipe: Recipe, *, engine: str, run: Path, title: str, seed: int, console: Console) -> None:
    """Run a recipe from its start, or from the last checkpoint in `run`, to its end.

    `engine` is the URL of a vLLM server that serves the recipe's model. `title` is that of the plots. Raises
    `InputError`.
    """
    check_arguments(recipe)
    tasks, harness = _rollouts(recipe)
    harness.require_program()
    if "," in engine:
        raise InputError(f"engine is {engine!r}: weights are published to one engine, give one URL")
    EngineAdmin(engine).require_endpoints()
    args = training_arguments(recipe, run, seed, tasks)
    plan = Plan(harness, recipe.concurrency, recipe.session_timeout)
    options = {**recipe.recorder, "rolltap_sampling": json.dumps(sampling(recipe))}
    recorder = Recorder(run, engine=engine, model=recipe.model, options=options, processes=recipe.recorders)
    begun = begun_online(recipe, tasks, harness, seed)
    with claimed_attempt(run, begun) as attempt, recorder:
        publisher = _publisher(recipe, engine, run)

        def run_sessions(groups: Sequence[Group], version: str) -> list[Session]:
            with progress_bar(console) as advance:
                return run_blocking(run_groups(groups, plan, recorder, policy_version=version, advance=advance))

        rows = Dataset.from_dict({"task_id": [task.id for task in tasks]})
        source = OnlineTraces(recipe, tasks, run, attempt, publisher, run_sessions, console)
        trainer = make_trainer(recipe, args, rows, source, run_reports(run, title, console))
        source.trainer = trainer
        steps = train_to_end(trainer, console)
        publisher.publish(trainer.model, str(attempt.version(steps)))
        save_finished(trainer, run)


def _rollouts(recipe: Recipe) -> tuple[list[Task], Harness]:
    """Return the tasks and the harness of a recipe. Raises `InputError`, also when it has none."""
    if recipe.tasks is None or recipe.harness is None:
        missing = "tasks" if recipe.tasks is None else "harness"
        raise InputError(f"the recipe has no key {missing!r}: rollouts need it; add it, or train from recorded runs")
    return load_tasks(recipe.tasks), Harness.load(recipe.harness)


def make_trainer(
    recipe: Recipe,
    args: TraceGRPOConfig,
    rows: Dataset,
    source: Callable[[list[dict[str, Any]]], TraceBatch],
    reports: list[TrainerCallback],
) -> TraceGRPOTrainer:
    """Return the trainer of a recipe. `source` is called with the `rows` of a step. `reports` are of `run_reports`."""
    set_seed(args.seed)
    transformers_logging.disable_progress_bar()  # it would show one for every published checkpoint
    trainer = TraceGRPOTrainer(
        model=str(recipe.model),
        args=args,
        train_dataset=rows,
        trace_source=source,
        groups_per_step=recipe.groups_per_step,
        callbacks=reports,
        peft_config=lora_config(recipe),
    )
    trainer.remove_callback(PrinterCallback)  # the reports print the line of a step
    return trainer


def train_to_end(trainer: TraceGRPOTrainer, console: Console) -> int:
    """Train from the last whole checkpoint in the trainer's folder, or from the start, to the last step.

    Returns the number of optimizer steps that made the weights.
    """
    folder = Path(trainer.args.output_dir)
    remove_incomplete(folder)
    checkpoint = last_checkpoint(folder)
    if checkpoint is not None:
        console.print(f"resuming from {checkpoint}")
        if checkpoint_step(checkpoint) >= trainer.args.max_steps:
            trainer._load_from_checkpoint(str(checkpoint))  # `train` would take one more step
            return checkpoint_step(checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return int(trainer.state.global_step)


def save_finished(trainer: TraceGRPOTrainer, run: Path) -> None:
    """Save the trained model as the folder `FINISHED` of the run. It appears when it is complete.

    Raises `RunError` when it cannot be written.
    """
    with new_folder(run / FINISHED) as folder:
        trainer.save_model(str(folder))


def _publisher(recipe: Recipe, engine: str, run: Path) -> Publisher:
    folder = run / "published"
    if recipe.publish == "lora":
        return LoraPublisher(engine, folder, run)
    return CheckpointPublisher(engine, folder, run)
