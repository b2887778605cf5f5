"""Findings of a plan about a recipe: what cannot work, what may go wrong, and what is not there yet.

The machine that a recipe is planned for.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rolltap.addons.errors import RolltapError
from rolltap.trainer.models.loading import INSTALL, Dtype, kernels
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.training.arguments import check_arguments, sampling, training_arguments
from rolltap.trainer.training.dry_run.memory import GIB
from rolltap.trainer.training.dry_run.model import ModelNumbers
from rolltap.trainer.training.recipe import Recipe

FIRST_PORT = 8000
"""Port of the first engine, if no URL is given."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Processes, engines and GPUs of a plan."""

    processes: int
    engines: tuple[str, ...]
    """URLs. None to train on recorded runs."""
    gpu: float | None
    """Bytes of a GPU; None without one, or if it is not known."""
    gpus: float
    """GPUs of this machine that may train; infinite if the plan is for another one."""
    shared_gpu: bool
    dtype: Dtype
    cuda: bool
    """True if this machine has a GPU."""


def machine_of(recipe: Recipe, engine: str | None, processes: int | None, *, online: bool = True) -> Machine:
    """Return the machine that a recipe's table [machine] names, and otherwise this one.

    `engine` is the value of `--engine`: URLs, separated by commas. `processes` is the number of processes that are
    started. Without `online` there are no engines.

    The type of the weights is the one that a start on this machine chooses: the recipe's, or bfloat16 with a GPU and
    float32 without one.
    """
    declared = recipe.machine
    cuda = torch.cuda.is_available()
    here = float(torch.cuda.get_device_properties(0).total_memory) if cuda else None
    gpu = declared.gpu_gib * GIB if declared and declared.gpu_gib else here
    if recipe.grpo.get("use_cpu"):
        gpu = None
    urls = [url.strip() for url in engine.split(",")] if engine else []
    if not urls and online:
        urls = [f"http://127.0.0.1:{FIRST_PORT + i}" for i in range(declared.engines if declared else 1)]
    return Machine(
        processes=processes or (declared.processes if declared else 1),
        engines=tuple(urls),
        gpu=gpu,
        gpus=torch.cuda.device_count() if cuda and gpu == here else float("inf"),
        shared_gpu=bool(online and declared and declared.shared_gpu),
        dtype=recipe.dtype or ("float32" if gpu is None else "bfloat16"),
        cuda=cuda,
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a recipe, and what to do about it."""

    level: Literal["error", "warning", "note"]
    """error: a start would be refused or would fail. warning: it starts, and is slow or may fail. note: is missing
    here, and the plan does without."""
    text: str
    fix: str


def error(text: str, fix: str) -> Finding:
    """Return a finding of a recipe that cannot run."""
    return Finding("error", text, fix)


def warning(text: str, fix: str) -> Finding:
    """Return a finding of a recipe that may go wrong."""
    return Finding("warning", text, fix)


def refused(refusal: RolltapError) -> Finding:
    """Return the finding of what a start refuses. Its remedy comes after the last colon of the message."""
    what, _, fix = str(refusal).rpartition(": ")
    return error(what or fix, fix if what else "correct the recipe")


def of_recipe(recipe: Recipe, machine: Machine) -> Iterator[Finding]:
    """Yield the findings that need no model: those of a start's own checks first."""
    yield from _refused(recipe, online=bool(machine.engines))
    if machine.engines:
        yield from _rollouts(recipe)
    if recipe.model.is_dir() and not list(recipe.model.glob("*.safetensors")):
        yield Finding("note", f"the folder {recipe.model.name} has no weights", "put them there before the start")
    if machine.engines:
        yield from _publishing(recipe, machine)
    if machine.dtype == "float16" and not recipe.lora:
        yield error("float16 has too small a range to update full weights", 'dtype = "bfloat16", or add a [lora] table')
    yield from _processes(recipe, machine)
    if machine.cuda and machine.dtype == "bfloat16" and not torch.cuda.is_bf16_supported():
        yield error("this GPU does not compute in bfloat16", 'dtype = "float16" with [lora], or dtype = "float32"')
    if recipe.grpo.get("forward") == "padded":
        yield warning(
            'the memory of forward = "padded" is an estimate: rows are padded to the longest', 'forward = "segments"'
        )


def of_model(recipe: Recipe, machine: Machine, numbers: ModelNumbers) -> Iterator[Finding]:
    """Yield the findings that need the model's numbers, but no memory."""
    if recipe.max_tokens is None:
        yield warning(
            f"max_tokens is not set: traces are planned with the model's context of {numbers.context:,} tokens",
            "set max_tokens to the longest trace that is worth its memory",
        )
    elif recipe.max_tokens > numbers.context:
        yield error(
            f"max_tokens = {recipe.max_tokens:,} is more than the model's context of {numbers.context:,} tokens",
            f"max_tokens = {numbers.context} or less",
        )
    if missing := [name for name, there in kernels(numbers.model_type).items() if not there]:
        where = "" if machine.cuda else " (here; look again on the machine that trains)"
        yield warning(
            f"linear attention falls back to torch, which is slower: no {' and no '.join(missing)}{where}",
            f"{INSTALL} on the machine with the GPU",
        )
    if machine.engines and machine.gpu is None and numbers.tied and not recipe.lora and recipe.publish == "checkpoint":
        yield error(
            "vLLM's CPU backend does not update tied embeddings on a reload, and no GPU is planned",
            "give machine.gpu_gib if it runs on GPUs; on a CPU add a [lora] table, or untie the embeddings",
        )


def adapter_rank(recipe: Recipe) -> int:
    """Return the largest rank of the adapter's layers. A value of another type is refused elsewhere."""
    pattern = recipe.lora.get("rank_pattern") or {}
    ranks = [recipe.lora.get("r", 8), *(pattern.values() if isinstance(pattern, dict) else [])]
    return max([rank for rank in ranks if isinstance(rank, int)], default=8)


def _refused(recipe: Recipe, *, online: bool) -> Iterator[Finding]:
    """Yield what a start refuses first, with the same checks. Without `online` there are no rollouts."""
    tasks = recipe.tasks if online and recipe.tasks and recipe.tasks.is_file() else None
    rows: list[object] = []

    def read_tasks() -> None:
        rows.extend(load_tasks(tasks) if tasks else range(recipe.groups_per_step))

    def arguments() -> None:
        training_arguments(recipe, Path("run"), 0, rows)

    checks: list[Callable[[], object]] = [
        lambda: check_arguments(recipe),
        read_tasks,
        arguments,
        lambda: sampling(recipe) if online else None,
    ]
    for check in checks:
        try:
            check()
        except RolltapError as refusal:
            yield refused(refusal)
            return


def _rollouts(recipe: Recipe) -> Iterator[Finding]:
    if recipe.recorder and importlib.util.find_spec("mitmproxy") is None:
        yield Finding("note", "values of [recorder] are not checked: mitmproxy is not here", "install rolltap[record]")
    if recipe.tasks is None or recipe.harness is None:
        missing = "tasks" if recipe.tasks is None else "harness"
        yield warning(f"there is no key {missing!r}: only recorded runs can be trained on", f"add {missing}")
    elif not recipe.tasks.is_file():
        yield Finding("note", f"the task file {recipe.tasks.name} is not there", "write it before the start")
    if recipe.harness is not None:
        try:
            Harness.load(recipe.harness)
        except RolltapError as refusal:
            yield error(str(refusal), f"one of {', '.join(Harness.names())}, or a .toml file")


def _publishing(recipe: Recipe, machine: Machine) -> Iterator[Finding]:
    if recipe.publish == "lora" and not recipe.lora:
        yield error('publish = "lora" has no adapter', 'add a [lora] table, or publish = "checkpoint"')
    if recipe.publish == "nccl":
        yield from _transfer(recipe, machine)


def _transfer(recipe: Recipe, machine: Machine) -> Iterator[Finding]:
    if importlib.util.find_spec("vllm") is None:
        yield error(
            'publish = "nccl" needs vLLM in the trainer\'s environment', 'install it, or publish = "checkpoint"'
        )
    if machine.shared_gpu:
        yield error("NCCL does not join two processes on one GPU", 'publish = "checkpoint" into /dev/shm, or "lora"')


def _processes(recipe: Recipe, machine: Machine) -> Iterator[Finding]:
    sessions = recipe.groups_per_step * recipe.sessions
    parts = machine.processes * int(recipe.grpo.get("gradient_accumulation_steps", 1))
    if machine.processes > sessions:
        yield error(
            f"{machine.processes} processes have only {sessions} sessions a step to train on",
            f"at most {sessions} processes, or more groups or sessions",
        )
    elif parts > sessions:
        yield warning(
            f"a step has {sessions} sessions for {parts} micro-batches of all processes: some are empty",
            "a smaller grpo.gradient_accumulation_steps",
        )
    if machine.processes > machine.gpus:
        yield error(
            f"{machine.processes} processes on a machine with {machine.gpus} GPUs",
            "one process for each GPU that trains",
        )
    declared = recipe.machine
    if declared and declared.processes != machine.processes:
        yield error(
            f"the recipe is for {declared.processes} processes, but {machine.processes} are given",
            "correct machine.processes, or start that many",
        )
    if declared and machine.engines and declared.engines != len(machine.engines):
        yield error(
            f"the recipe is for {declared.engines} engines, but --engine names {len(machine.engines)}",
            "correct machine.engines, or give as many URLs",
        )
    if machine.shared_gpu and machine.gpu is None:
        yield warning("the memory of the shared GPU is not known", "give machine.gpu_gib")
    if len(machine.engines) > 1 and recipe.publish == "lora":
        yield Finding(
            "note",
            f"{len(machine.engines)} engines, one a GPU: vLLM with --data-parallel-size cannot load adapters",
            "start each as written",
        )
