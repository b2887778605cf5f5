"""The loop of a training: ask a source for the batch of a step, train on it, and again.

TRL's trainer drives it. `OnlineTraces` publishes the weights and rolls out, `RecordedTraces` reads
recorded runs. A stopped training resumes from its last checkpoint. All steps after it are taken
again, with the same sessions. Nothing else decides on a step: its tasks are a function of the seed
and the step, and the checkpoint holds the weights, the optimizer and the scheduler. Settings that
decide on a step are refused to change (`require_same_fingerprint`).

Of several processes the main one alone has recorder, engines and run folder: it rolls out,
publishes, writes and prints. The others compute with it, and end when it ends.
"""

import atexit
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from transformers import PrinterCallback, set_seed
from transformers.utils import logging as transformers_logging

from rolltap.addons.errors import InputError
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.console import end_with_launcher, processes_started
from rolltap.trainer.models.devices import require_gpu, use_expandable_segments
from rolltap.trainer.models.loading import load_policy, load_tokenizer
from rolltap.trainer.models.saving import save_adapter, save_whole
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.traces.trained import write_step
from rolltap.trainer.training import arguments
from rolltap.trainer.training.attempt import Attempt, require_shared
from rolltap.trainer.training.recipe import CHECKPOINTS, FINISHED, Recipe, checkpoint_step
from rolltap.trainer.training.report import Phases, Reports
from rolltap.trainer.training.step.checkpoint import load_trained
from rolltap.trainer.training.step.distributed import (
    abort_on_error,
    is_main,
    lost,
    object_group,
    on_main,
    raise_on_all,
)
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer

ADAPTER = "adapter"
"""Folder in the trained model with the adapter, if one was trained."""

_LEFT = "rolltap: the main process has ended"
LEAVE_SECONDS = 120.0
"""Longest that an ending process waits for the main one to end: it stops the recorder and gives the
engines back."""
TENSOR_SECONDS = 1800
"""Longest that a process waits for another one's tensors, for example while that one computes a
longer trace. NCCL does not notice a lost process: then the launcher, or this time, ends the others.
"""


class Source:
    """Rows of a training, and their batches. Every process has one, and the main process alone
    calls it: `check`, `claim` and `begin`; for each batch `before_batch` and the source itself; for
    each optimizer step `check_step`; at the end `finish`."""

    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """`Phases.of` of the training."""

    def check(self) -> dict[str, list[Any]]:
        """Check what can be checked before anything starts. Returns the columns of the rows,
        `task_id` among them."""
        raise NotImplementedError

    def claim(self, stack: ExitStack) -> Attempt:
        """Claim, until the stack is closed, what no other training may use."""
        raise NotImplementedError

    def __call__(self, rows: list[dict[str, Any]]) -> TraceBatch:
        """Return the batch of the rows of a step."""
        raise NotImplementedError

    def begin(self, trainer: TraceGRPOTrainer) -> None:
        """Take the trainer, which still has the weights that it began with."""

    def before_batch(self) -> None:
        """Prepare the next batch."""

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of an optimizer step, counted from 0, before the weights change. What
        it raises ends the training."""

    def finish(self, steps: int) -> None:
        """Take the weights of so many optimizer steps, which are trained and saved."""


def train(
    source: Source,
    recipe: Recipe,
    run: Path,
    *,
    seed: int,
    console: Console,
) -> None:
    """Train from the start, or from the last checkpoint in `run`, to the recipe's last step. Every
    process calls it.

    Raises what the source raises, `InputError`, `RunError` and, on processes of which another one
    failed, `RankError`.
    """
    raise_on_all(partial(require_gpu, recipe.grpo.get("use_cpu", False)))
    columns = on_main(source.check)
    args = raise_on_all(partial(arguments.training_arguments, recipe, run, seed))
    with ExitStack() as stack:
        attempt = on_main(partial(source.claim, stack))
        raise_on_all(partial(require_shared, run, attempt))
        on_main(partial(set_aside, run, recipe, console))
        set_seed(seed)
        # it would show one for every published checkpoint
        transformers_logging.disable_progress_bar()
        load = partial(
            load_policy,
            recipe.model,
            arguments.dtype_of(recipe),
            on_cpu=args.sharding == "full",
            **arguments.model_arguments(recipe),
        )
        model = raise_on_all(load)
        phases = Phases()
        reports = Reports(run, console)
        source.phase = phases.of
        trainer = TraceGRPOTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_dict(columns),
            trace_source=phases.of("rollout")(source),
            groups_per_step=recipe.groups_per_step,
            processing_class=load_tokenizer(recipe.model),
            callbacks=[phases, reports],
            peft_config=arguments.lora_config(recipe, model),
            before_batch=partial(on_main, phases.of("publication")(source.before_batch)),
        )
        phases.log = trainer.log_metrics
        trainer.remove_callback(PrinterCallback)  # the reports print the line of a step
        trainer.check_step = source.check_step
        trainer.record = partial(write_step, stack.enter_context(RunWriter(run)), attempt.version)
        trainer.before_training = partial(on_main, partial(source.begin, trainer))
        steps = abort_on_error(partial(train_to_end, trainer, console))
        on_main(partial(save_finished, trainer, recipe, run))  # whether or not the engines take it
        on_main(partial(source.finish, steps))
        on_main(partial(reports.end, steps))


def join_processes(recipe: Recipe | None) -> Recipe:
    """Join the launcher's other processes, if any, and return the main one's recipe. Call it before
    others can fail."""
    use_expandable_segments()
    if processes_started() > 1 and not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=TENSOR_SECONDS))
            object_group()
        except RuntimeError as error:
            raise lost(error) from error
        end_with_launcher()
        atexit.register(_leave, dist.distributed_c10d._get_default_store(), is_main())
    return on_main(lambda: cast(Recipe, recipe))


def train_to_end(trainer: TraceGRPOTrainer, console: Console) -> int:
    """Train to the last step, and return the number of optimizer steps that made the weights.
    Collective."""
    folder = Path(trainer.args.output_dir)
    limit = trainer.args.save_total_limit
    checkpoint = on_main(partial(arguments.remove_incomplete, folder, limit))
    if checkpoint is not None:
        console.print(f"resuming from {checkpoint}")
        if checkpoint_step(checkpoint) >= trainer.args.max_steps:
            # `train` would take one more step
            if trainer.before_training is not None:
                trainer.before_training()
            load_trained(trainer.model, checkpoint)
            return checkpoint_step(checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return int(trainer.state.global_step)


def set_aside(run: Path, recipe: Recipe, console: Console) -> None:
    """Rename the model of a finished training that takes more steps now: its folder is for the new
    model."""
    checkpoint = arguments.last_checkpoint(run / CHECKPOINTS)
    if (run / FINISHED).exists() and checkpoint is not None:
        steps = checkpoint_step(checkpoint) // recipe.iterations
        kept = (run / FINISHED).rename(run / f"{FINISHED}-{steps}")
        console.print(f"takes more steps: the model of {steps} steps is in {kept} now")


def save_finished(trainer: TraceGRPOTrainer, recipe: Recipe, run: Path) -> None:
    """Save the trained model as the folder `FINISHED` of the run, on the main process. It appears
    when it is complete.

    An adapter is merged into it, and is in `ADAPTER` too: under PEFT's names where engines do not
    take it. Raises `RunError` when it cannot be written.
    """
    model = trainer.model
    with new_folder(run / FINISHED) as folder:
        save_whole(model, folder, recipe.model)
        if isinstance(model, PeftModel):
            with suppress(InputError):  # it writes PEFT's names before those that engines take
                save_adapter(model, folder / ADAPTER, recipe.model)


def _leave(store: Any, main: bool) -> None:
    """Wait until the main process has left, which a launcher stops as soon as another one has
    ended; unless this one has left the groups after an error, whose end the main process waits for.
    """
    with suppress(
        RuntimeError, KeyboardInterrupt
    ):  # the store has ended with the main process, or the launcher stops
        if main:
            store.set(_LEFT, "")
        until = time.monotonic() + LEAVE_SECONDS
        while dist.is_initialized() and not store.check([_LEFT]) and time.monotonic() < until:
            time.sleep(0.05)
