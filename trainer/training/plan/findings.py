"""Findings of a plan: what a start refuses or cannot work, what may go wrong, and what is not there
yet."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from rolltap.addons.errors import RolltapError
from rolltap.trainer.doctor.model import diagnose
from rolltap.trainer.models.loading import INSTALL, LINEAR_ATTENTION, kernels
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.training.arguments import check_arguments, require_rows, sampling
from rolltap.trainer.training.plan.engine import Blocks
from rolltap.trainer.training.plan.memory import SLACK, Machine, Memory, Micro, gib
from rolltap.trainer.training.plan.model import ModelNumbers
from rolltap.trainer.training.plan.traced_step import StepMemory, at
from rolltap.trainer.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a recipe, and what to do about it."""

    level: Literal["error", "warning", "note"]
    """error: a start would be refused or would fail. warning: it starts, and is slow or may fail.
    note: is missing here, and the plan does not need it."""
    text: str
    fix: str


def of_recipe(recipe: Recipe, machine: Machine) -> Iterator[Finding]:
    """Yield the findings that need no model."""
    if recipe.model.is_dir() and not list(recipe.model.glob("*.safetensors")):
        text = f"the folder {recipe.model.name} has no weights"
        yield Finding("note", text, "put them there before the start")
    sessions = recipe.groups_per_step * recipe.sessions
    if machine.processes > sessions:
        text = f"{machine.processes} processes have only {sessions} sessions a step to train on"
        yield Finding("error", text, f"at most {sessions} processes, or more groups or sessions")
    elsewhere = recipe.machine is not None and recipe.machine.gpu_gib is not None
    if machine.gpu and not elsewhere:
        each = machine.processes // machine.nodes
        gpus = torch.cuda.device_count()
        if 0 < gpus < each:
            text = f"{each} processes on a machine with {gpus} GPUs"
            yield Finding("error", text, "one process for each GPU that trains")
    if not machine.engines:
        return
    for key in ("tasks", "harness"):
        if getattr(recipe, key) is None:
            text = f"there is no key {key!r}: only recorded runs can be trained on"
            yield Finding("warning", text, f"add {key}")
    if recipe.tasks is not None and not recipe.tasks.exists():
        text = f"the task file {recipe.tasks.name} is not there"
        yield Finding("note", text, "write it before the start")
    with suppress(RolltapError):  # a folder without a tokenizer is left to the start
        for problem in diagnose(str(recipe.model), recipe.recorder).problems:
            text, _, fix = problem.rpartition(". ")
            yield Finding("warning", text, fix)


def of_model(recipe: Recipe, machine: Machine, numbers: ModelNumbers) -> Iterator[Finding]:
    """Yield the findings of the model."""
    context = f"the model's context of {numbers.context:,} tokens"
    if recipe.max_tokens is None:
        text = f"max_tokens is not set: traces are planned with {context}"
        fix = "set max_tokens to the longest trace that is worth its memory"
        yield Finding("warning", text, fix)
    elif recipe.max_tokens > numbers.context:
        text = f"max_tokens = {recipe.max_tokens:,} is more than {context}"
        yield Finding("error", text, f"max_tokens = {numbers.context} or less")
    missing = [name for name, there in kernels(numbers.model_type).items() if not there]
    if LINEAR_ATTENTION in missing:
        missing.remove(LINEAR_ATTENTION)
        fix = f"{INSTALL} in a clone, on the machine with the GPU"
        if numbers.fla:
            yield Finding("note", f"no {LINEAR_ATTENTION} here, but it is planned with", fix)
        else:
            text = "linear attention falls back to torch, which is slower: "
            yield Finding("warning", f"{text}no {LINEAR_ATTENTION} here", fix)
    if missing:
        text = f"no {' and no '.join(missing)} here: torch does the same"
        install = f"pip install --no-build-isolation {' '.join(missing)}"
        yield Finding("note", text, f"none is needed; with nvcc, {install}")
    if machine.gpu is not None:
        return
    if machine.engines and numbers.tied and not recipe.lora and recipe.publish == "checkpoint":
        text = "vLLM's CPU backend does not update tied embeddings on a reload"
        fix = "on a CPU add a [lora] table, or untie the embeddings"
        yield Finding(
            "error",
            f"{text}, and no GPU is planned",
            f"give machine.gpu_gib if it runs on GPUs; {fix}",
        )
    text = "the memory of a GPU is not known: nothing is said about what fits"
    yield Finding("note", text, "machine.gpu_gib")


def of_memory(
    recipe: Recipe,
    machine: Machine,
    micro: Micro,
    memory: Memory,
    step: StepMemory,
) -> Iterator[Finding]:
    """Yield a finding if the memory of a training process is too small. `step` is what was
    traced."""
    if machine.gpu is None or memory.room is None or memory.longest_row is None:
        return
    always = memory.always.total
    if always > SLACK * machine.gpu:
        text = f"weights, gradients and optimizer take {gib(always)} of a GPU's {gib(machine.gpu)}"
        fixes = ["a larger GPU"]
        if not recipe.lora:
            fixes.append("a [lora] table")
        if recipe.grpo.get("sharding") == "full":
            fixes.append("more machine.processes")
        else:
            several = "with several machine.processes, which share them out"
            fixes.append(f'grpo.sharding = "full" {several}')
        yield Finding("error", text, ", or ".join(fixes))
        return
    if memory.row.total <= memory.room:
        return
    text = (
        f"{micro.sessions} sessions of {micro.longest:,} tokens at once take "
        f"{gib(memory.row.total)}, and {gib(memory.room)} are left, "
        f"for {memory.longest_row:,} tokens"
    )
    fixes = []
    offloaded = at(step.offloaded().peak, micro.tokens)
    if offloaded <= memory.room:
        fixes.append("grpo.offload_checkpoints = true")
    fitting = memory.longest_row // micro.longest
    if fitting:
        given = int(recipe.grpo.get("gradient_accumulation_steps", 1))
        parts = given * -(-micro.sessions // fitting)
        fixes.append(f"grpo.gradient_accumulation_steps = {parts}")
        fix = ", or ".join(fixes)
        unless = "unless sessions are shorter or share most tokens"
        yield Finding("warning", text, f"{fix}, {unless}")
        return
    fixes.append("a smaller max_tokens")
    if machine.shared_gpu:
        fixes.append("a machine with a GPU for each")
    yield Finding("error", text, ", or ".join(fixes))


def of_engine(
    recipe: Recipe,
    machine: Machine,
    numbers: ModelNumbers,
    micro: Micro,
    memory: Memory,
) -> Iterator[Finding]:
    """Yield a finding if the memory of an engine is too small."""
    engine = memory.engine
    if engine is None:
        return
    elsewhere = ""
    if machine.shared_gpu:
        elsewhere = ", or another GPU for the engine"
    cache = f"the engine's cache of {gib(engine.sizes['cache'])}"
    held = engine.sessions * len(machine.engines)
    if engine.sessions < 1:
        one = gib(Blocks.of(numbers).session_bytes(micro.longest))
        text = f"{cache} does not hold a session of {micro.longest:,} tokens ({one})"
        yield Finding("error", text, f"a smaller max_tokens{elsewhere}")
    elif numbers.linear_layers and engine.blocks < engine.sequences:
        text = (
            f"{cache} has {engine.blocks} blocks, and each of its {engine.sequences} calls "
            "needs one for the state of linear attention: vLLM would not start"
        )
        yield Finding("error", text, f"a smaller concurrency{elsewhere}")
    elif held < recipe.concurrency:
        text = (
            f"{recipe.concurrency} sessions run at once, but the engines hold {held} of the "
            "longest: vLLM would compute some of them again"
        )
        fix = "a smaller concurrency, unless most sessions are much shorter"
        yield Finding("warning", text, fix)


def check_start(recipe: Recipe, machine: Machine) -> None:
    """Make a start's own checks. Raises the first `RolltapError`."""
    check_arguments(recipe, machine.processes, len(machine.engines) or None)
    if not machine.engines:
        return
    if recipe.tasks and recipe.tasks.exists():
        tasks = len(load_tasks(recipe.tasks, repositories=recipe.repositories))
        require_rows(recipe, tasks, f"{recipe.tasks} has {tasks} tasks")
    sampling(recipe)
    if recipe.service is None:
        tools = tuple(tool for tool in recipe.tools if tool.is_dir())  # others may come yet
        recipe.model_copy(update={"tools": tools}).make_runtime()
        recipe.options()
