"""The online loop: publish the weights, roll out, train on the recorded traces, and again.

TRL's trainer drives it. For each batch it calls `OnlineTraces`, which publishes the current weights, runs the sessions
and reads their calls from the run folder. Sessions are not run in a data loader, because data loaders fetch ahead: the
traces would be off policy.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from transformers import PrinterCallback, set_seed
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session
from rolltap.trainer.blocking import run_blocking
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.publish import CheckpointPublisher, LoraPublisher, Publisher
from rolltap.trainer.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.scheduler import Plan, run_groups
from rolltap.trainer.rollouts.task import Task, load_tasks
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.sessions import TraceOptions, load_batch
from rolltap.trainer.training.recipe import FINISHED, Recipe

CHECKPOINTS = "checkpoints"


def train(recipe: Recipe, *, engine: str, run: Path, seed: int, console: Console) -> None:
    """Run a recipe from its start, or from the last checkpoint in `run`, to its end.

    `engine` is the URL of a vLLM server that serves the recipe's model. Raises `InputError`.
    """
    tasks, harness = _rollouts(recipe)
    harness.require_program()
    if "," in engine:
        raise InputError(f"engine is {engine!r}: weights are published to one engine, give one URL")
    EngineAdmin(engine).require_endpoints()
    args = training_arguments(recipe, run, seed, tasks)
    plan = Plan(harness, recipe.sessions_per_group, recipe.concurrency, recipe.session_timeout)
    options = {**recipe.recorder, "rolltap_sampling": json.dumps(sampling(recipe))}
    with Recorder(run, engine=engine, model=recipe.model, options=options, processes=recipe.recorders) as recorder:
        publisher = _publisher(recipe, engine, run)
        trace_options = TraceOptions(recipe.strategy, recipe.roles, recipe.max_tokens)
        source = OnlineTraces(plan, recorder, publisher, trace_options, {t.id: t for t in tasks}, console)
        trainer = make_trainer(recipe, args, Dataset.from_dict({"task_id": [task.id for task in tasks]}), source)
        source.trainer = trainer
        train_to_end(trainer, console)
        publisher.publish(trainer.model, str(trainer.state.global_step))
        save_finished(trainer, run)


def _rollouts(recipe: Recipe) -> tuple[list[Task], Harness]:
    """Return the tasks and the harness of a recipe. Raises `InputError`, also when it has none."""
    if recipe.tasks is None or recipe.harness is None:
        missing = "tasks" if recipe.tasks is None else "harness"
        raise InputError(f"the recipe has no key {missing!r}: rollouts need it; add it, or train from recorded runs")
    return load_tasks(recipe.tasks), Harness.load(recipe.harness)


def make_trainer(
    recipe: Recipe, args: GRPOConfig, rows: Dataset, source: Callable[[list[dict[str, Any]]], TraceBatch]
) -> TraceGRPOTrainer:
    """Return the trainer of a recipe. `source` is called with the rows of a step."""
    set_seed(args.seed)
    transformers_logging.disable_progress_bar()  # it would show one for every published checkpoint
    trainer = TraceGRPOTrainer(
        model=str(recipe.model),
        args=args,
        train_dataset=rows,
        trace_source=source,
        groups_per_step=recipe.groups_per_step,
        peft_config=LoraConfig(**recipe.lora) if recipe.lora else None,
    )
    trainer.remove_callback(PrinterCallback)  # the trace source prints the line of a step
    return trainer


def train_to_end(trainer: TraceGRPOTrainer, console: Console) -> None:
    """Train from the last checkpoint in the trainer's folder, or from the start, to the last step."""
    checkpoint = last_checkpoint(Path(trainer.args.output_dir))
    if checkpoint is not None:
        console.print(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def save_finished(trainer: TraceGRPOTrainer, run: Path) -> None:
    """Save the trained model as the folder `FINISHED` of the run."""
    trainer.save_model(str(run / FINISHED))


class OnlineTraces:
    """Trace source of an online run. Set `trainer` before the first batch."""

    def __init__(
        self,
        plan: Plan,
        recorder: Recorder,
        publisher: Publisher,
        trace_options: TraceOptions,
        tasks: dict[str, Task],
        console: Console,
    ) -> None:
        self.trainer: TraceGRPOTrainer
        self._plan = plan
        self._recorder = recorder
        self._publisher = publisher
        self._trace_options = trace_options
        self._tasks = tasks
        self._console = console

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Publish the weights, record one group of sessions for each row (`task_id`), and return their batch."""
        started = time.monotonic()
        step = self.trainer.state.global_step
        self._publisher.publish(self.trainer.model, str(step))
        published = time.monotonic()
        sessions = self._rollout([self._tasks[row["task_id"]] for row in rows], str(step))
        batch = load_batch(self._recorder.path, {s.session_id for s in sessions}, self._trace_options)
        mean = f"{fmean(labelled.reward for labelled in batch.rewards.values()):.3f}" if batch.rewards else "none"
        self._console.print(
            f"step {step + 1}/{self.trainer.args.max_steps}  reward [bold]{mean}[/]  "
            f"{len(sessions)} sessions in {time.monotonic() - published:.1f} s  "
            f"sampled tokens {batch.ledger}  published in {published - started:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
        return batch

    def _rollout(self, tasks: Sequence[Task], version: str) -> list[Session]:
        with progress_bar(self._console) as advance:
            return run_blocking(run_groups(tasks, self._plan, self._recorder, policy_version=version, advance=advance))


def sampling(recipe: Recipe) -> dict[str, Any]:
    """Return the recorder's sampling parameters: the recipe's own, and the temperature by which the trainer divides.

    Raises `InputError` when the two temperatures differ.
    """
    text = recipe.recorder.get("rolltap_sampling", "{}")
    if not isinstance(text, str):
        raise InputError("recorder.rolltap_sampling is a list: give one JSON object as text")
    try:
        own: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise InputError(f"recorder.rolltap_sampling is not JSON: {error}") from error
    temperature = recipe.grpo.get("temperature", 1.0)
    if own.get("temperature", temperature) != temperature:
        raise InputError(
            f"recorder.rolltap_sampling samples at temperature {own['temperature']}, but grpo.temperature is "
            f"{temperature}: the trainer would divide the logits by another number than the engine"
        )
    return {**own, "temperature": temperature}


_OURS = ("output_dir", "max_steps", "seed", "num_generations", "save_strategy", "save_steps")


def training_arguments(recipe: Recipe, run: Path, seed: int, tasks: Sequence[object]) -> GRPOConfig:
    """Return TRL's arguments: the recipe's, and those that the loop sets. Raises `InputError` for what TRL refuses."""
    for key in _OURS:
        if key in recipe.grpo:
            raise InputError(f"grpo.{key} is set by rolltap: remove it")
    if recipe.groups_per_step > len(tasks):
        raise InputError(f"groups_per_step is {recipe.groups_per_step}, but {recipe.tasks} has {len(tasks)} tasks")
    cuda = torch.cuda.is_available()
    defaults = {
        "bf16": cuda,
        "use_cpu": not cuda,
        "activation_checkpointing": True,  # TRL's default, by the name that is not deprecated
        "beta": 0.0,
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_total_limit": 2,
        "per_device_train_batch_size": recipe.sessions_per_group,
    }
    try:
        return GRPOConfig(
            **defaults | recipe.grpo,
            output_dir=str(run / CHECKPOINTS),
            max_steps=recipe.steps * recipe.grpo.get("num_iterations", 1),
            seed=seed,
            num_generations=recipe.sessions_per_group,
            save_strategy="steps",
            save_steps=recipe.save_steps * recipe.grpo.get("num_iterations", 1),
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"the recipe's [grpo] table: {error}") from error


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint with a readable trainer state, or None."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for checkpoint in reversed(checkpoints):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return checkpoint
    return None


def _publisher(recipe: Recipe, engine: str, run: Path) -> Publisher:
    folder = run / "published"
    if recipe.publish == "lora":
        return LoraPublisher(engine, folder, run)
    return CheckpointPublisher(engine, folder, run)
