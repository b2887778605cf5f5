"""The memory of a machine: what a recipe takes of it, and whether it fits."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rolltap.trainer.planning import findings as found
from rolltap.trainer.planning.engine_share import EngineShare, divide, own_gpu, session_bytes
from rolltap.trainer.planning.findings import Finding
from rolltap.trainer.planning.machine import Machine
from rolltap.trainer.planning.memory import GIB, SLACK, Fixed, Rows, Variable, fixed, variable
from rolltap.trainer.planning.numbers import ModelNumbers
from rolltap.trainer.planning.publishing import Disk, disk
from rolltap.trainer.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a training process and of an engine."""

    always: Fixed
    traces: Variable
    planned_traces: int | None
    """Room for the traces; None when the GPU's memory is not known."""
    suggested_memory_gib: float | None
    """Value of `grpo.memory_gib` on a shared GPU that the recipe does not give."""
    engine: EngineShare | None
    """None when the GPU's memory is not known, and for recorded runs."""
    disk: Disk


def memory_of(recipe: Recipe, machine: Machine, numbers: ModelNumbers, traces: Rows) -> Memory:
    """Return what a training process and an engine take, and how much room there is for the traces."""
    always = fixed(recipe, numbers, machine.processes, cuda=machine.gpu is not None)
    given = recipe.grpo.get("memory_gib")
    suggested, engine = None, None
    if machine.gpu is None:
        room = int(given * GIB) if given else None
        chosen = variable(recipe, numbers, traces, room)
    elif machine.shared_gpu:
        at_once = -(-recipe.concurrency // len(machine.engines))
        divided = divide(recipe, numbers, always, traces, machine.gpu, at_once)
        engine, chosen, room = divided.engine, divided.trainer, divided.memory
        suggested = None if given else room // (GIB // 10) / 10
    else:
        engine = own_gpu(recipe, numbers, machine.gpu, traces.longest) if machine.engines else None
        room = int(given * GIB) if given else max(0, int(SLACK * machine.gpu) - always.total)
        chosen = variable(recipe, numbers, traces, room)
    return Memory(always, chosen, room, suggested, engine, disk(recipe, numbers, online=bool(machine.engines)))


def too_little(
    recipe: Recipe, machine: Machine, numbers: ModelNumbers, traces: Rows, memory: Memory
) -> Iterator[Finding]:
    """Yield a finding for each way in which the memory is too small."""
    if machine.gpu is None:
        yield Finding("note", "the memory of a GPU is not known: nothing is said about what fits", "machine.gpu_gib")
        return
    gpu, always, engine = machine.gpu, memory.always, memory.engine
    if always.total > SLACK * gpu:
        yield found.error(
            f"weights, gradients and optimizer take {_gib(always.total)} of a GPU's {_gib(gpu)}",
            "more machine.processes, which share the optimizer's state, or a larger GPU"
            if recipe.lora
            else "a [lora] table, or more machine.processes, which share the optimizer's state",
        )
        return
    room = memory.planned_traces or 0
    smaller = "a smaller max_tokens" + ("" if recipe.grpo.get("offload_states") else ", or offload_states = true")
    if memory.traces.total > room:
        yield found.error(
            f"a trace of {traces.longest:,} tokens takes {_gib(memory.traces.total)}, of which {_gib(room)} are there",
            smaller + (", or a machine with a GPU for each" if machine.shared_gpu else ""),
        )
    elif always.total + room + (engine.total if engine and machine.shared_gpu else 0) > gpu:
        yield found.error(
            f"grpo.memory_gib = {recipe.grpo['memory_gib']} is more than the GPU has besides {_gib(always.total)}",
            "a smaller grpo.memory_gib, or none",
        )
    if engine is None:
        return
    if engine.sessions < 1:
        yield found.error(
            f"the engine's cache of {_gib(engine.cache)} does not hold a session of {traces.longest:,} tokens "
            f"({_gib(session_bytes(numbers, traces.longest))})",
            "a smaller max_tokens" + (", or another GPU for the engine" if machine.shared_gpu else ""),
        )
    elif engine.sessions * len(machine.engines) < recipe.concurrency:
        yield found.warning(
            f"{recipe.concurrency} sessions run at once, but the engines hold {engine.sessions * len(machine.engines)} "
            "of the longest: vLLM would compute some of them again",
            "a smaller concurrency, unless most sessions are much shorter",
        )
    folder = recipe.publish_folder
    if folder and folder.is_relative_to("/dev/shm") and Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        if free < memory.disk.published:
            yield Finding(
                "note",
                f"{folder} needs {_gib(memory.disk.published)} of memory, and {_gib(free)} are free here",
                "a larger /dev/shm (docker run --shm-size)",
            )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
