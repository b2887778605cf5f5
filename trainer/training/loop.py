"""The online loop: publish the weights, roll out, train on the recorded traces, and again.

TRL's trainer drives it, and asks `OnlineTraces` for the batch of each step. A stopped training resumes from its last
checkpoint. All steps after it are taken again, with the sessions that are in the run folder. Nothing else decides on a
step: its tasks are a function of the seed and the step, and the checkpoint holds the weights, the optimizer and the
scheduler. Settings that decide on a step are refused to change (`require_same`).

With several processes, as `torchrun` and `accelerate launch` start them, the main one alone has recorder, engines and
run folder: it rolls out, publishes, writes and prints. The others compute with it, wait for it on the CPU, for hours,
and end when it ends.
"""

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from rolltap.addons.errors import InputError
from rolltap.addons.store.staging import new_folder
from rolltap.trainer.console import processes_started
from rolltap.trainer.models.loading import load_policy, load_tokenizer
from rolltap.trainer.models.saving import save_adapter, save_whole
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.arguments import (
    checkpoint_step,
    dtype_of,
    last_checkpoint,
    lora_config,
    model_arguments,
    remove_incomplete,
    training_arguments,
    without_frozen,
)
from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.grpo.ranks import connect, initialise, is_main, on_main, together
from rolltap.trainer.training.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.training.online import OnlineTraces, typed_recipe
from rolltap.trainer.training.recipe import FINISHED, Recipe
from rolltap.trainer.training.report import Plots, run_reports

T = TypeVar("T")

ADAPTER = "adapter"
"""Folder in the trained model with the adapter, if one was trained."""

_LEFT = "rolltap: the main process has ended"
LEAVE_SECONDS = 120.0
"""Longest that an ending process waits for the main one to end: it stops the recorder and gives the engines back."""
TENSOR_SECONDS = 1800
"""Longest that a process waits for another one's tensors, for example while that one computes a longer trace.

Nobody waits for rollouts here: objects travel over a gloo group of their own, which waits as long as it takes. A lost
process breaks gloo's connections, and is noticed at once. NCCL does not notice it: then the launcher, or this time,
ends the others.
"""


def train(
    recipe: Recipe, *, engine: str, run: Path, title: str, seed: int, console: Console, steal: bool = False
) -> None:
    """Run a recipe from its start, or from the last checkpoint in `run`, to its end. Every process calls it.

    `engine` is the URL of a vLLM server that serves the recipe's model, or several separated by commas. `steal` takes
    engines from another training. `title` is that of the plots. Raises `InputError`, `EngineError`, `RecorderError`,
    `RunError` and, on processes of which another one failed, `RankError`.
    """
    recipe = on_main(partial(typed_recipe, recipe, engine))
    online = OnlineTraces(recipe, run, engine=engine, seed=seed, console=console, steal=steal)
    tasks = on_main(online.check)
    args = first_on_main(partial(training_arguments, recipe, run, seed, tasks))
    initialise(args)
    with online:
        rows = Dataset.from_dict({"task_id": [task.id for task in tasks]})
        reports = run_reports(run, title, console)
        trainer = make_trainer(recipe, args, rows, online, reports, online.before_batch)
        on_main(partial(online.begin, trainer))
        steps = train_to_end(trainer, console)
        on_main(partial(save_finished, trainer, recipe, run))  # whether or not the engines take it
        on_main(partial(online.finish, steps))
        if recipe.evaluation is not None:  # the last one comes after the trainer's last log
            on_main(next(report.draw for report in reports if isinstance(report, Plots)))


def join_processes(recipe: Recipe | None) -> Recipe:
    """Join the launcher's other processes, if any, and return the main one's recipe. Call it before others can fail."""
    if processes_started() > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=TENSOR_SECONDS))
        connect()
        atexit.register(_leave, dist.distributed_c10d._get_default_store(), is_main())
    return on_main(lambda: cast(Recipe, recipe))


def first_on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process, then on the others. An error that is everybody's is raised once. Collective.

    `function` must not call collective operations.
    """
    results: list[T] = []
    on_main(lambda: results.append(function()))
    return together(lambda: results[0] if results else function())


def make_trainer(
    recipe: Recipe,
    args: TraceGRPOConfig,
    rows: Dataset,
    source: Callable[[list[dict[str, Any]]], TraceBatch],
    reports: list[TrainerCallback],
    before_batch: Callable[[], None] | None = None,
) -> TraceGRPOTrainer:
    """Return the trainer of a recipe. Every process calls it.

    The main process alone calls `before_batch`, and then `source` with the `rows` of a step. `reports` are of
    `run_reports`.
    """
    set_seed(args.seed)
    transformers_logging.disable_progress_bar()  # it would show one for every published checkpoint
    model = together(
        lambda: load_policy(recipe.model, dtype_of(recipe), on_cpu=args.sharding == "full", **model_arguments(recipe))
    )
    config = lora_config(recipe)
    trainer = TraceGRPOTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        trace_source=source,
        groups_per_step=recipe.groups_per_step,
        processing_class=load_tokenizer(recipe.model),
        callbacks=reports,
        peft_config=config and without_frozen(config, model),
        before_batch=before_batch and partial(on_main, before_batch),
    )
    trainer.remove_callback(PrinterCallback)  # the reports print the line of a step
    return trainer


def train_to_end(trainer: TraceGRPOTrainer, console: Console) -> int:
    """Train from the last whole checkpoint in the trainer's folder, or from the start, to the last step.

    Every process calls it. Returns the number of optimizer steps that made the weights.
    """

    def find() -> Path | None:
        folder = Path(trainer.args.output_dir)
        remove_incomplete(folder)
        return last_checkpoint(folder)

    checkpoint = on_main(find)
    if checkpoint is not None:
        console.print(f"resuming from {checkpoint}")
        if checkpoint_step(checkpoint) >= trainer.args.max_steps:
            trainer._load_from_checkpoint(str(checkpoint))  # `train` would take one more step
            return checkpoint_step(checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return int(trainer.state.global_step)


def save_finished(trainer: TraceGRPOTrainer, recipe: Recipe, run: Path) -> None:
    """Save the trained model as the folder `FINISHED` of the run. It appears when it is complete.

    An adapter is merged into it, and is in the folder `ADAPTER` of its own: under PEFT's names where engines do not
    take it. Call it on the main process. Raises `RunError` when it cannot be written.
    """
    model = trainer.model
    with new_folder(run / FINISHED) as folder:
        save_whole(model, folder, recipe.model)
        if isinstance(model, PeftModel):
            with suppress(InputError):  # it writes PEFT's names before those that engines take
                save_adapter(model, folder / ADAPTER, recipe.model)


def _leave(store: Any, main: bool) -> None:
    """Wait until the main process has left: a launcher stops it as soon as another one has ended.

    So it can say why the training ends, stop the recorder and give the engines back.
    """
    with suppress(RuntimeError, KeyboardInterrupt):  # the store has ended with the main process, or the launcher stops
        if main:
            store.set(_LEFT, "")
        until = time.monotonic() + LEAVE_SECONDS
        while not store.check([_LEFT]) and time.monotonic() < until:
            time.sleep(0.05)
