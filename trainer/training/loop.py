"""The online loop: publish the weights, roll out, train on the recorded traces, and again.

TRL's trainer drives it. Before each batch it calls `OnlineTraces.before_batch`, which publishes the current weights,
and then `OnlineTraces`, which runs the sessions and reads their calls from the run folder. Sessions are not run in a
data loader, because data loaders fetch ahead: the traces would be off policy.

Of several processes the main one alone has recorder, engines and run folder. The others compute with it, and end when
it ends (`processes`).

A stopped training goes on from its last checkpoint. All steps after it are taken again, with the sessions that are in
the run folder. Nothing else decides on a step: its tasks are a function of the seed and the step, and the checkpoint
holds the weights, the optimizer and the scheduler. What else decides is refused to change (`begun`).

The processes of a training, as `torchrun` and `accelerate launch` start them.

The main process alone rolls out, publishes, writes and prints. The others wait for it, for hours, on the CPU.
"""

import atexit
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import PeftModel
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging as transformers_logging

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session, utc_now
from rolltap.addons.store.staging import new_folder
from rolltap.trainer.concurrency import run_blocking
from rolltap.trainer.console import processes_started, progress_bar
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish_transfer import require_transfer
from rolltap.trainer.models.loading import load_policy, load_tokenizer
from rolltap.trainer.models.saving import save_adapter, save_whole
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.build import TraceBatch
from rolltap.trainer.training.arguments import (
    check_arguments,
    checkpoint_step,
    dtype_of,
    last_checkpoint,
    lora_config,
    model_arguments,
    remove_incomplete,
    sampling,
    training_arguments,
    without_frozen,
)
from rolltap.trainer.training.attempt import begun_online, claimed_attempt
from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.grpo.ranks import initialise, is_main, on_main, together
from rolltap.trainer.training.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.training.online import OnlineTraces
from rolltap.trainer.training.recipe import FINISHED, Machine, Recipe
from rolltap.trainer.training.report import run_reports
from rolltap.trainer.training.serving import Serving, published_folder

T = TypeVar("T")

_LEFT = "rolltap: the main process has ended"
LEAVE_SECONDS = 25.0
"""Longest that an ending process waits for the main one to end. `torchrun` kills after 30 seconds."""
TENSOR_SECONDS = 1800
"""Longest that a process waits for another one's tensors, for example while that one computes a longer trace.

Nobody waits for rollouts here: objects travel over a gloo group of their own, which waits as long as it takes. A lost
process breaks gloo's connections, and is noticed at once. NCCL does not notice it: then the launcher, or this time,
ends the others.
"""


def join_processes() -> None:
    """Join the other processes that the launcher started, if any. Call it before anything can fail on one of them."""
    if processes_started() == 1 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TENSOR_SECONDS))
    atexit.register(_leave)


def only_on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process, and return its result. Its error is raised on every process. Collective.

    Elsewhere the result is None: use it only in a function that the main process alone calls.
    """
    results: list[Any] = [None]
    on_main(lambda: results.append(function()))
    result: T = results[-1]
    return result


def first_on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process, then on the others. An error that is everybody's is raised once. Collective.

    `function` must not call collective operations.
    """
    results: list[T] = []
    on_main(lambda: results.append(function()))
    return together(lambda: results[0] if results else function())


def require_machine(machine: Machine | None, processes: int, urls: int | None = None) -> None:
    """Raise `InputError` for other numbers of processes and engine URLs than a recipe's table [machine] gives.

    `urls` None is a training without engines.
    """
    given = {} if machine is None else machine.model_dump(exclude_unset=True)
    if (declared := given.get("processes", processes)) != processes:
        raise InputError(
            f"machine.processes is {declared}, but the number of training processes is {processes}: start them with "
            f"`torchrun --nproc-per-node {declared} -m rolltap train ...`, or change the recipe"
        )
    if urls is not None and (engines := given.get("engines", urls)) != urls:
        raise InputError(
            f"machine.engines is {engines}, but the number of engine URLs is {urls}: give --engine as many, separated "
            "by commas, or change the recipe"
        )


def _leave() -> None:
    """Leave the other processes, the main one first: a launcher stops it as soon as another one has ended.

    So it can say why the training ends, stop the recorder and give the engines back.
    """
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError, KeyboardInterrupt):  # the store has ended with the main process, or the launcher stops
        if is_main():
            store.set(_LEFT, "")
        until = time.monotonic() + LEAVE_SECONDS
        while not store.check([_LEFT]) and time.monotonic() < until:
            time.sleep(0.05)
        dist.destroy_process_group()


ADAPTER = "adapter"
"""Folder in the trained model with the adapter, if one was trained."""


def train(
    recipe: Recipe, *, engine: str, run: Path, title: str, seed: int, console: Console, steal: bool = False
) -> None:
    """Run a recipe from its start, or from the last checkpoint in `run`, to its end. Every process calls it.

    `engine` is the URL of a vLLM server that serves the recipe's model, or several separated by commas. `steal` takes
    engines from another training. `title` is that of the plots. Raises `InputError`, `EngineError`, `RecorderError`,
    `RunError` and, on processes of which another one failed, `RankError`.
    """
    engines = only_on_main(lambda: Engines(engine))

    def check() -> tuple[list[Task], Harness]:
        require_machine(recipe.machine, processes_started(), len(engines.admins))
        check_arguments(recipe)
        tasks, harness = _rollouts(recipe)
        tasks = _worker(recipe, harness, engine, run).fit(tasks)
        if recipe.publish == "nccl":
            require_transfer()
        engines.require_endpoints()
        return tasks, harness

    tasks, harness = on_main(check)
    args = first_on_main(lambda: training_arguments(recipe, run, seed, tasks))
    initialise(args)
    with ExitStack() as stack:
        online = only_on_main(
            lambda: stack.enter_context(_online(recipe, engines, tasks, harness, run, seed, console, steal))
        )
        rows = Dataset.from_dict({"task_id": [task.id for task in tasks]})
        reports = run_reports(run, title, console)
        trainer = make_trainer(recipe, args, rows, lambda rows: online(rows), reports, lambda: online.before_batch())
        on_main(lambda: online.begin(trainer))
        steps = train_to_end(trainer, console)
        on_main(lambda: save_finished(trainer, recipe, run))  # whether or not the engines take it
        on_main(lambda: online.finish(steps))


@contextmanager
def _online(
    recipe: Recipe,
    engines: Engines,
    tasks: Sequence[Task],
    harness: Harness,
    run: Path,
    seed: int,
    console: Console,
    steal: bool,
) -> Iterator[OnlineTraces]:
    """Claim the run folder and the engines, start the recorder, and yield the trace source. On the main process."""

    def run_sessions(groups: Sequence[Group], version: str) -> list[Session]:
        with progress_bar(console) as advance:
            return run_blocking(worker.run(groups, policy_version=version, advance=advance))

    with (
        claimed_attempt(run, begun_online(recipe, tasks, harness, seed)) as attempt,
        published_folder(recipe, run, attempt.run) as folder,
        engines.claimed(attempt.run, _about(run), steal=steal),
        _worker(recipe, harness, ",".join(engine.url for engine in engines.admins), run) as worker,
    ):
        serving = Serving(recipe, engines, folder, run)
        yield OnlineTraces(recipe, tasks, run, attempt, serving, run_sessions, console)


def _worker(recipe: Recipe, harness: Harness, engine: str, run: Path) -> Worker:
    options = {**recipe.recorder, "rolltap_sampling": json.dumps(sampling(recipe))}
    config = recipe.model_copy(update={"recorder": options})
    return Worker(config, harness=harness, engine=engine, model=recipe.model, out=run)


def _about(run: Path) -> str:
    """Return who the owner of an engine is, for people."""
    return (
        f"the training {run.absolute()} on {socket.gethostname()}, process {os.getpid()}, since {utc_now():%F %T} UTC"
    )


def _rollouts(recipe: Recipe) -> tuple[list[Task], Harness]:
    """Return the tasks and the harness of a recipe. Raises `InputError`, also when it has none."""
    if recipe.tasks is None or recipe.harness is None:
        missing = "tasks" if recipe.tasks is None else "harness"
        raise InputError(f"the recipe has no key {missing!r}: rollouts need it; add it, or train from recorded runs")
    return load_tasks(recipe.tasks, repositories=recipe.repositories), Harness.load(recipe.harness)


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
    model = together(lambda: load_policy(recipe.model, dtype_of(recipe), **model_arguments(recipe)))
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

    An adapter is merged into it, and is in the folder `ADAPTER` of its own.

    Call it on the main process. Raises `RunError` when it cannot be written.
    """
    model = trainer.model
    with new_folder(run / FINISHED) as folder:
        save_whole(model, folder, recipe.model)
        if isinstance(model, PeftModel):
            save_adapter(model, folder / ADAPTER, recipe.model)
