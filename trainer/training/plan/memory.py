"""Memory of a training process and of an engine, how one GPU is divided between them, and
checkpoints.

All sizes are bytes. A session is one trace, as long as the recipe allows, and shares no prefix with
another one.
"""

from dataclasses import dataclass
from math import ceil

import torch

from rolltap.trainer.engine.serve import Parts
from rolltap.trainer.models.loading import Dtype
from rolltap.trainer.training.arguments import SAVE_TOTAL_LIMIT
from rolltap.trainer.training.plan.engine import Blocks, sequence_bytes, sequences_of
from rolltap.trainer.training.plan.model import BFLOAT16, FLOAT32, ModelNumbers
from rolltap.trainer.training.plan.traced_step import StepMemory, at
from rolltap.trainer.training.recipe import Machine as DeclaredMachine
from rolltap.trainer.training.recipe import Recipe

GIB = 2**30
CUDA = int(1.5 * GIB)
"""A process on a GPU before it has any tensor, with the workspaces of its libraries. Assumed, not
measured."""
SLACK = 0.95
"""Share of a GPU that is planned with: the rest is lost to fragments. Assumed, not measured."""
MOMENTS = {
    "sgd": 0,
    "adafactor": 0,
    "adagrad": 1,
    "rmsprop": 1,
}
"""Values that an optimizer keeps for each trained one. Others are counted as AdamW, which keeps
two."""
SERVING = 4 * GIB
"""Activations, CUDA graphs and libraries of an engine, which do not grow with its sequences.
Assumed, not measured."""
UTILIZATION = 0.92
"""vLLM's default of `--gpu-memory-utilization`: the share of a GPU that an engine takes. vLLM
0.32."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Processes, engines and GPUs of a plan."""

    processes: int
    nodes: int
    engines: tuple[str, ...]
    """URLs. None to train on recorded runs."""
    gpu: float | None
    """Bytes of a GPU; None without one, or if it is not known."""
    shared_gpu: bool
    dtype: Dtype
    """Type of the weights: the recipe's, or the one that a start on this machine chooses."""


def machine_of(
    recipe: Recipe,
    engine: str | None,
    processes: int | None,
    *,
    online: bool,
) -> Machine:
    """Return the machine of a recipe's table [machine], or this one. `engine` and `processes` are
    those of `plan`."""
    declared = recipe.machine or DeclaredMachine()
    gpu = None
    if not recipe.grpo.get("use_cpu"):
        if declared.gpu_gib:
            gpu = GIB * declared.gpu_gib
        elif torch.cuda.is_available():
            gpu = float(torch.cuda.get_device_properties(0).total_memory)
    engines: list[str] = []
    if engine:
        engines = [url.strip() for url in engine.split(",")]
    elif online:
        engines = [f"http://127.0.0.1:{8000 + i}" for i in range(declared.engines)]
    default: Dtype = "float32"
    if gpu:
        default = "bfloat16"
    elif online:
        default = Parts.of(recipe.model).cpu_type
    return Machine(
        processes=processes or declared.processes,
        nodes=declared.nodes,
        engines=tuple(engines),
        gpu=gpu,
        shared_gpu=online and declared.shared_gpu,
        dtype=recipe.dtype or default,
    )


class Sizes(dict[str, int]):
    """Bytes by the names of the parts that take them."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self.values())


@dataclass(frozen=True, slots=True)
class Micro:
    """The largest micro-batch of a process, which is one row."""

    sessions: int
    longest: int
    """Tokens of each."""

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return self.sessions * self.longest


def micro_batch(recipe: Recipe, numbers: ModelNumbers, processes: int) -> Micro:
    """Return the micro-batch of a step whose sessions are all as long as they may be."""
    parts = processes * int(recipe.grpo.get("gradient_accumulation_steps", 1))
    sessions = -(-recipe.groups_per_step * recipe.sessions // parts)
    return Micro(sessions, min(recipe.max_tokens or numbers.context, numbers.context))


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Memory that an engine takes of its GPU."""

    sizes: Sizes
    """Of the cache too: keys and values, and states of linear attention."""
    sequences: int
    """Value of `--max-num-seqs`."""
    blocks: int
    """Blocks of the cache. vLLM does not start a model with linear attention with fewer than it has
    sequences: each that is decoded needs one (config/compilation.py,
    `resolve_cudagraph_mode_and_sizes`)."""
    sessions: int
    """Number of the longest sessions that fit into the cache."""
    utilization: float
    """Value of `--gpu-memory-utilization` that gives the engine this much."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a training process and of an engine."""

    always: Sizes
    """Held whatever the length of the row: see `fixed`."""
    row: Sizes
    """For the row of the micro-batch: kept for the backward pass, and on top of it at the peak."""
    on_host: int
    """Checkpoints of the row in the host's memory."""
    room: int | None
    """Left for a row; None when the GPU's memory is not known."""
    longest_row: int | None
    """Tokens of the longest row that fits there."""
    engine: EngineShare | None
    """None when the GPU's memory is not known, and for recorded runs."""


def memory_of(
    recipe: Recipe,
    machine: Machine,
    numbers: ModelNumbers,
    micro: Micro,
    step: StepMemory,
) -> Memory:
    """Return what each process and engine of a machine takes of a GPU. A total that is larger does
    not fit.

    An engine and a training process that share one GPU: the trainer gets what its row needs; the
    engine what its sessions need, at least for one and for the states of all its sequences; the
    trainer the rest.
    """
    on_host = 0
    if recipe.grpo.get("offload_checkpoints"):
        step = step.offloaded()
        on_host = at(step.checkpoints, micro.tokens)
    always = fixed(recipe, machine, numbers)
    kept = at(step.kept, micro.tokens)
    peak = at(step.peak, micro.tokens)
    row = Sizes({"checkpoints": kept, "a layer": peak - kept})
    if machine.gpu is None:
        return Memory(always, row, on_host, None, None, None)
    room = int(SLACK * machine.gpu) - always.total
    engine = None
    if machine.engines:
        engine = _engine(recipe, machine, numbers, micro, room, peak)
        if machine.shared_gpu:
            room -= engine.sizes.total
    return Memory(always, row, on_host, max(0, room), step.longest(room), engine)


def _engine(
    recipe: Recipe,
    machine: Machine,
    numbers: ModelNumbers,
    micro: Micro,
    room: int,
    peak: int,
) -> EngineShare:
    """Return an engine's share. A trainer on the same GPU leaves `room`, of which it needs
    `peak`."""
    assert machine.gpu is not None
    sequences = sequences_of(recipe, len(machine.engines))
    adapters = 0
    if recipe.publish == "lora":
        adapters = recipe.adapters * numbers.trained * numbers.item
    sizes = Sizes(
        {
            "weights": numbers.weights,
            "adapters": adapters,
            "logits": sequences * sequence_bytes(numbers),
            "working memory": SERVING,
        }
    )
    blocks = Blocks.of(numbers)
    one = blocks.session_bytes(micro.longest)
    utilization = UTILIZATION
    if machine.shared_gpu:
        least = one
        if blocks.linear:
            least = max(one, sequences * blocks.bytes)
        left = room - sizes.total
        wanted = max(least, -(-recipe.concurrency // len(machine.engines)) * one)
        cache = max(0, min(wanted, max(left - peak, least), left))
        utilization = ceil(100 * (sizes.total + cache) / machine.gpu) / 100
    sizes["cache"] = max(0, int(utilization * machine.gpu) - sizes.total)
    return EngineShare(
        sizes=sizes,
        sequences=sequences,
        blocks=sizes["cache"] // blocks.bytes,
        sessions=sizes["cache"] // one,
        utilization=utilization,
    )


def fixed(recipe: Recipe, machine: Machine, numbers: ModelNumbers) -> Sizes:
    """Return what each of the training processes always holds, whatever the length of its row.

    All weights are trained in float32, and an adapter's in float32 beside weights of the machine's
    type. The reference model comes with `grpo.beta` and full weights. With `sharding = "full"` a
    process has a share of all that. It gathers two layers at once and what is outside of them, and
    gradients of a layer in both types.
    """
    gradients = FLOAT32 * numbers.trained
    weights = numbers.weights + gradients
    if not recipe.lora:
        weights = gradients + numbers.item * (numbers.parameters - numbers.trained)
    sizes = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": _moments(recipe) * gradients,
        "reference model": 0,
    }
    if recipe.grpo.get("beta") and not recipe.lora:
        sizes["reference model"] = weights
    if shards(recipe, machine.processes):
        for name, size in sizes.items():
            sizes[name] = -(-size // machine.processes)
        item = BFLOAT16 if machine.dtype == "bfloat16" else FLOAT32
        gathered = item * (2 * numbers.largest_layer + numbers.outside)
        if not recipe.lora:
            gathered += (item + FLOAT32) * max(numbers.largest_layer, numbers.outside)
        sizes["gathered layers"] = gathered
    elif machine.processes > 1:
        sizes["buckets"] = gradients  # of DistributedDataParallel, which averages them there
    if machine.gpu is not None:
        sizes["CUDA"] = CUDA
    return Sizes(sizes)


def shards(recipe: Recipe, processes: int) -> bool:
    """Return True when the processes share out the weights of the layers."""
    return processes > 1 and recipe.grpo.get("sharding") == "full"


def checkpoints_of(recipe: Recipe, numbers: ModelNumbers) -> dict[str, int]:
    """Return how many checkpoints a training writes, the most at once, and the bytes of one: the
    trained weights with the optimizer's state."""
    written = -(-recipe.steps // recipe.save_steps)  # after the last step too
    limit = int(recipe.grpo.get("save_total_limit", SAVE_TOTAL_LIMIT))
    at_once = written
    if limit > 0:
        at_once = min(written, limit + 1)  # an old one is removed after a new one is written
    return {
        "checkpoints": written,
        "checkpoints_at_once": at_once,
        "checkpoint_bytes": FLOAT32 * (1 + _moments(recipe)) * numbers.trained,
    }


def gib(size: float, digits: int = 1) -> str:
    """Return a number of bytes for people."""
    return f"{size / GIB:.{digits}f} GiB"


def _moments(recipe: Recipe) -> int:
    return MOMENTS.get(str(recipe.grpo.get("optim", "adamw")), 2)
