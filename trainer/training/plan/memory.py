"""Memory of a training process and of an engine, how one GPU is divided between them, and checkpoints.

All sizes are bytes. A trace is as long as the recipe allows, and shares no prefix with another one.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil

import torch

from rolltap.trainer.engine.serve import Parts
from rolltap.trainer.models.loading import Dtype
from rolltap.trainer.training.arguments import SAVE_TOTAL_LIMIT
from rolltap.trainer.training.dry_run.engine import Blocks, sequence_bytes, sequences_of
from rolltap.trainer.training.dry_run.model import FLOAT32, ModelNumbers
from rolltap.trainer.training.forward.sizes import SIZES
from rolltap.trainer.training.grpo.forward import TOKENS_PER_SEGMENT
from rolltap.trainer.training.grpo.optimizer import shares
from rolltap.trainer.training.recipe import Machine as DeclaredMachine
from rolltap.trainer.training.recipe import Recipe

GIB = 2**30
CUDA = int(1.5 * GIB)
"""A process on a GPU before it has any tensor, with the workspaces of its libraries. Assumed, not measured."""
SLACK = 0.95
"""Share of a GPU that is planned with: the rest is lost to fragments. Assumed, not measured."""
MOMENTS = {"sgd": 0, "adafactor": 0, "adagrad": 1, "rmsprop": 1}
"""Values that an optimizer keeps for each trained one. Others are counted as AdamW, which keeps two."""
SERVING = 4 * GIB
"""Activations, CUDA graphs and libraries of an engine, which do not grow with its sequences. Assumed, not measured."""
UTILIZATION = 0.92
"""vLLM's default of `--gpu-memory-utilization`: the share of a GPU that an engine takes. vLLM 0.32."""


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


def machine_of(recipe: Recipe, engine: str | None, processes: int | None, *, online: bool) -> Machine:
    """Return the machine of a recipe's table [machine], or this one. `engine` and `processes` are those of `plan`."""
    declared = recipe.machine or DeclaredMachine()
    gpu = None
    if not recipe.grpo.get("use_cpu") and (declared.gpu_gib or torch.cuda.is_available()):
        gpu = GIB * declared.gpu_gib if declared.gpu_gib else float(torch.cuda.get_device_properties(0).total_memory)
    here_by_default = (f"http://127.0.0.1:{8000 + i}" for i in range(declared.engines if online else 0))
    return Machine(
        processes=processes or declared.processes,
        nodes=declared.nodes,
        engines=tuple(map(str.strip, engine.split(","))) if engine else tuple(here_by_default),
        gpu=gpu,
        shared_gpu=online and declared.shared_gpu,
        dtype=recipe.dtype or ("bfloat16" if gpu else Parts.of(recipe.model).cpu_type if online else "float32"),
    )


class Sizes(dict[str, int]):
    """Bytes by the names of the parts that take them."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self.values())


@dataclass(frozen=True, slots=True)
class Rows:
    """Traces of one forward pass. `longest` is the tokens of each."""

    count: int
    longest: int


@dataclass(frozen=True, slots=True)
class Variable:
    """Memory of the traces of one forward pass, and how they are cut."""

    tokens_per_segment: int
    tokens_in_memory: int | None
    """None if the states of all rows are kept at once."""
    sizes: Sizes
    """The `Parts` of a backward pass."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Memory that an engine takes of its GPU."""

    sizes: Sizes
    """Of the cache too: keys and values, and states of linear attention."""
    sequences: int
    """Value of `--max-num-seqs`."""
    blocks: int
    """Blocks of the cache. vLLM does not start a model with linear attention with fewer than it has sequences: each
    that is decoded needs one (config/compilation.py, `resolve_cudagraph_mode_and_sizes`)."""
    sessions: int
    """Number of the longest sessions that fit into the cache."""
    utilization: float
    """Value of `--gpu-memory-utilization` that gives the engine this much."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a training process and of an engine."""

    always: Sizes
    """Held whatever the length of the traces: see `fixed`."""
    traces: Variable
    planned_traces: int | None
    """Left for the traces; None when the GPU's memory is not known."""
    suggested_memory_gib: float | None
    """Value of `grpo.memory_gib` on a shared GPU, if the recipe gives none."""
    engine: EngineShare | None
    """None when the GPU's memory is not known, and for recorded runs."""


def memory_of(recipe: Recipe, machine: Machine, numbers: ModelNumbers, traces: Rows) -> Memory:
    """Return what each process and engine of a machine takes of a GPU. A total that is larger does not fit.

    An engine and a training process that share one GPU: the trainer gets what its longest trace needs, in segments of
    the default size, or `grpo.memory_gib`; the engine what its sessions need, at least for one and for the states of
    all its sequences; the trainer the rest.
    """
    gpu, grpo = machine.gpu, recipe.grpo
    always = fixed(recipe, numbers, machine.processes, cuda=gpu is not None)
    memory = int(grpo["memory_gib"] * GIB) if grpo.get("memory_gib") else None
    if gpu is None:
        return Memory(always, variable(recipe, numbers, traces, memory), memory, None, None)
    adapters = recipe.adapters * numbers.adapter * numbers.item // FLOAT32 if recipe.publish == "lora" else 0
    engines = max(1, len(machine.engines))
    sequences = sequences_of(recipe, engines)
    logits = sequences * sequence_bytes(numbers)
    held = numbers.weights + adapters + logits + SERVING
    cache, utilization = max(0, int(UTILIZATION * gpu) - held), UTILIZATION
    blocks = Blocks.of(numbers)
    one = blocks.session_bytes(traces.longest)
    rest = int(SLACK * gpu) - always.total
    if machine.shared_gpu:
        rest -= held
        need = memory or variable(recipe, numbers, Rows(1, traces.longest), None).sizes.total
        least = max(one, sequences * blocks.bytes if blocks.linear else 0)
        wanted = max(least, -(-recipe.concurrency // engines) * one)
        cache = max(0, min(wanted, max(rest - need, least), rest))
        utilization = ceil(100 * (held + cache) / gpu) / 100
        cache = int(utilization * gpu) - held
        rest -= cache
    suggested = None if memory or not machine.shared_gpu else max(0, rest) // (GIB // 10) / 10
    memory = memory or max(0, rest)
    sizes = {"weights": numbers.weights, "adapters": adapters, "logits": logits, "working memory": SERVING}
    sizes["cache"] = cache
    engine = EngineShare(Sizes(sizes), sequences, cache // blocks.bytes, cache // one, utilization)
    traced = variable(recipe, numbers, traces, memory)
    return Memory(always, traced, memory, suggested, engine if machine.engines else None)


def fixed(recipe: Recipe, numbers: ModelNumbers, processes: int, *, cuda: bool) -> Sizes:
    """Return what each of the training processes always holds, whatever the length of its traces.

    Gradients are float32. The optimizer's state has float32 copies of the weights; with full weights it is the share of
    the process that has the largest. The reference model comes with `grpo.beta` and full weights. Sharded layers are
    float32 where they are trained; two are gathered at once, and one has a gradient of its own and for the others.
    """
    whole, sizes, part = numbers.weights, numbers.sizes, 0
    if full := shards(recipe, processes):
        sharded, sizes = sum(numbers.layers), numbers.whole
        whole, part = whole - numbers.item * sharded, -(-sharded // processes)
    trains = 0 if recipe.lora else part
    owned = Counter[int]()
    for size, owner in zip(sizes, shares(sizes, processes), strict=True):
        owned[owner] += size
    stepped = max(owned.values(), default=0) if full or not recipe.lora else sum(sizes)
    copies = not recipe.lora and numbers.item != FLOAT32  # of 16-bit weights
    in_flight = max(numbers.layers, default=0) * (2 * numbers.item + (numbers.item + FLOAT32 if trains else 0))
    return Sizes(
        {
            "weights": whole + part * (FLOAT32 if trains else numbers.item) + numbers.adapter,
            "gathered layers": in_flight if full else 0,
            "gradients": FLOAT32 * (sum(sizes) + trains),
            "optimizer": FLOAT32 * (_moments(recipe) * (stepped + trains) + copies * stepped),
            "merged experts": numbers.merged,
            "reference model": whole + numbers.item * part if recipe.grpo.get("beta") and not recipe.lora else 0,
            "CUDA": CUDA if cuda else 0,
        }
    )


def shards(recipe: Recipe, processes: int) -> bool:
    """Return True when the processes share out the weights of the layers."""
    return processes > 1 and recipe.grpo.get("sharding") == "full"


def gathered_bytes(recipe: Recipe, numbers: ModelNumbers, processes: int, traces: Rows, sizes: Variable) -> int:
    """Return what a process receives in an optimizer step to have each layer whole, where weights are sharded."""
    if not shards(recipe, processes):
        return 0
    grpo = recipe.grpo
    # segments: the first pass, the second and the gradients; one more for states, for a reference, for `mismatch`
    batches, passes = -(-traces.count * traces.longest // sizes.tokens_per_segment), 3
    if grpo.get("forward") == "padded":
        batches, passes = 1, 2
    passes += (sizes.tokens_in_memory is not None) + bool(grpo.get("beta")) + (grpo.get("mismatch", "clip") != "clip")
    passes *= batches * int(grpo.get("gradient_accumulation_steps", 1))
    return int(passes * numbers.item * sum(numbers.layers) * (processes - 1) / processes)


def rows(recipe: Recipe, numbers: ModelNumbers, processes: int) -> Rows:
    """Return the traces of a process's largest forward pass: one trace a session, each of `max_tokens`."""
    parts = processes * int(recipe.grpo.get("gradient_accumulation_steps", 1))
    count = -(-recipe.groups_per_step * recipe.sessions // parts)
    return Rows(count, min(recipe.max_tokens or numbers.context, numbers.context))


def variable(recipe: Recipe, numbers: ModelNumbers, traces: Rows, memory: float | None) -> Variable:
    """Return the sizes that the trainer chooses for these traces and `memory` bytes (`Costs.sizes`).

    Without a number of bytes, as on a CPU, segments have one size and all states are kept.
    """
    costs, grpo, tokens = numbers.costs, recipe.grpo, traces.count * traces.longest
    size, in_memory, offload = grpo.get("tokens_per_segment"), None, bool(grpo.get("offload_states"))
    if grpo.get("activation_checkpointing") is False or grpo.get("forward") == "padded":
        size, memory = tokens, None  # the activations of all tokens are kept at once
    if memory is None:
        size = size or TOKENS_PER_SEGMENT
        parts = costs.parts(size, tokens, traces.longest, offload_states=offload)
    else:
        among = (size,) if size else SIZES
        size, in_memory, _, parts = costs.sizes(memory, tokens, traces.longest, offload_states=offload, among=among)
    return Variable(size, in_memory, Sizes({name: ceil(value) for name, value in parts._asdict().items()}))


def gib(size: float, digits: int = 1) -> str:
    """Return a number of bytes for people."""
    return f"{size / GIB:.{digits}f} GiB"


def checkpoints_of(recipe: Recipe, numbers: ModelNumbers) -> dict[str, int]:
    """Return how many checkpoints a training writes, the most at once, and the bytes of one, with the optimizer."""
    written = -(-recipe.steps // recipe.save_steps)  # after the last step too
    limit, full = int(recipe.grpo.get("save_total_limit", SAVE_TOTAL_LIMIT)), recipe.grpo.get("sharding") == "full"
    return {
        "checkpoints": written,
        # an old one is removed after a new one is written
        "checkpoints_at_once": min(written, limit + 1) if limit > 0 else written,
        "checkpoint_bytes": (0 if full else numbers.adapter if recipe.lora else numbers.weights)
        + FLOAT32 * (_moments(recipe) + (full or not recipe.lora)) * numbers.trained,
    }


def _moments(recipe: Recipe) -> int:
    return MOMENTS.get(str(recipe.grpo.get("optim", "adamw")), 2)
