"""Memory of a training process and of an engine, how one GPU is divided between them, and the files they write.

All sizes are bytes. A trace is as long as the recipe allows, and shares no prefix with another one.
"""

from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from rolltap.trainer.training.arguments import SAVE_TOTAL_LIMIT
from rolltap.trainer.training.dry_run.model import FLOAT32, ModelNumbers
from rolltap.trainer.training.forward.sizes import SIZES, WORKING, Sizes
from rolltap.trainer.training.grpo.forward import TOKENS_PER_SEGMENT
from rolltap.trainer.training.grpo.optimizer import shares
from rolltap.trainer.training.recipe import Recipe

GIB = 2**30

CUDA = int(1.5 * GIB)
"""A process on a GPU before it has any tensor, with the workspaces of its libraries. Assumed, not measured."""

SLACK = 0.95
"""Share of a GPU that is planned with: the rest is lost to fragments. Assumed, not measured."""

MOMENTS = {"sgd": 0, "adafactor": 0, "adagrad": 1, "rmsprop": 1}
"""Values that an optimizer keeps for each trained one. Others are counted as AdamW, which keeps two."""

SERVING = 4 * GIB
"""Activations, CUDA graphs and libraries of an engine. Assumed, not measured."""

UTILIZATION = 0.92
"""vLLM's default of `--gpu-memory-utilization`: the share of a GPU that an engine takes. vLLM 0.32."""

COMFORTABLE = TOKENS_PER_SEGMENT
"""Tokens of a segment from which larger ones gain little. The engine of a shared GPU gets the rest."""

PUBLISHED = 2
"""Published checkpoints that exist at once: the previous one until all engines took the new one."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Memory that a training process always holds, whatever the length of its traces.

    Gradients are float32. The optimizer's state has float32 copies of the weights; with full weights it is the share of
    the process that has the largest. The reference model comes with `grpo.beta` and full weights.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    cuda: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.cuda


@dataclass(frozen=True, slots=True)
class Rows:
    """Traces of one forward pass. `longest` is the tokens of each."""

    count: int
    longest: int

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return self.count * self.longest


@dataclass(frozen=True, slots=True)
class Variable:
    """Memory of the traces of one forward pass, and how they are cut.

    Attributes:
        tokens_in_memory: None if the states of all rows are kept at once.
        states: Keys and values or recurrent states of the tokens in memory, and their gradients.
        activations: Tensors that one batch of segments saves for its backward pass.
        working: Needed by the running layer besides.
        logits: One chunk of logits, and the head's gradient.
    """

    tokens_per_segment: int
    tokens_in_memory: int | None
    states: int
    activations: int
    working: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all sizes."""
        return self.states + self.activations + self.working + self.logits


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Memory that an engine takes of its GPU.

    Attributes:
        cache: Keys and values, and states of linear attention.
        cached_tokens: Tokens of the longest sessions that fit into the cache; `sessions` is the number of these.
        utilization: Value of `--gpu-memory-utilization` that gives the engine this much.
    """

    weights: int
    adapters: int
    working: int
    cache: int
    cached_tokens: int
    sessions: int
    utilization: float

    @property
    def total(self) -> int:
        """Sum of all sizes."""
        return self.weights + self.adapters + self.working + self.cache


@dataclass(frozen=True, slots=True)
class Disk:
    """Files of a training, at most and besides the recorded run.

    Published weights are memory if `publish_folder` is in /dev/shm. Checkpoints have weights and the optimizer's state.
    """

    published: int
    checkpoints: int
    finished: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a training process and of an engine, and the files.

    Attributes:
        planned_traces: Left for the traces; None when the GPU's memory is not known.
        suggested_memory_gib: Value of `grpo.memory_gib` on a shared GPU, if the recipe gives none.
        engine: None when the GPU's memory is not known, and for recorded runs.
    """

    always: Fixed
    traces: Variable
    planned_traces: int | None
    suggested_memory_gib: float | None
    engine: EngineShare | None
    disk: Disk


def memory_of(
    recipe: Recipe,
    numbers: ModelNumbers,
    traces: Rows,
    *,
    processes: int,
    engines: int,
    gpu: float | None,
    shared: bool,
) -> Memory:
    """Return what each of so many processes and engines takes of a GPU of `gpu` bytes, None if that is not known.

    With `shared`, an engine and a training process have one GPU: the trainer gets what its longest trace needs in
    segments of `COMFORTABLE` tokens, or in smaller ones if the engine could not hold a session otherwise; the engine
    what its sessions need; and the trainer the rest. A total that is larger than the GPU does not fit.
    """
    always = fixed(recipe, numbers, processes, cuda=gpu is not None)
    files = disk(recipe, numbers, online=engines > 0)
    given = recipe.grpo.get("memory_gib")
    memory = int(given * GIB) if given else None
    if gpu is None:
        return Memory(always, variable(recipe, numbers, traces, memory), memory, None, None, files)
    suggested, engine = None, None
    if shared:
        one = session_bytes(numbers, traces.longest)
        rest = int(SLACK * gpu) - always.total - sum(_engine_holds(recipe, numbers))
        if memory is None:
            needs = [_longest_alone(recipe, numbers, traces, size).total for size in SIZES if size <= COMFORTABLE]
            need = next((need for need in needs if need + one <= rest), needs[-1])
            cache = max(0, min(-(-recipe.concurrency // engines) * one, rest - need))
            memory = max(0, rest - cache)
            suggested = memory // (GIB // 10) / 10
        else:
            cache = max(0, rest - memory)
        engine = _engine_share(recipe, numbers, traces, cache, gpu)
    else:
        if engines:
            cache = max(0, int(UTILIZATION * gpu) - sum(_engine_holds(recipe, numbers)))
            engine = _engine_share(recipe, numbers, traces, cache, gpu, UTILIZATION)
        if memory is None:
            memory = max(0, int(SLACK * gpu) - always.total)
    return Memory(always, variable(recipe, numbers, traces, memory), memory, suggested, engine, files)


def fixed(recipe: Recipe, numbers: ModelNumbers, processes: int, *, cuda: bool) -> Fixed:
    """Return what each of the training processes always holds."""
    stepped = numbers.trained
    if not recipe.lora:
        owned = [0] * processes
        for owner, size in zip(shares(numbers.sizes, processes), numbers.sizes, strict=True):
            owned[owner] += size
        stepped = max(owned)
    reference = bool(recipe.grpo.get("beta")) and not recipe.lora
    return Fixed(
        weights=numbers.weights + numbers.adapter,
        gradients=FLOAT32 * numbers.trained,
        optimizer=_optimizer_state(recipe, numbers, stepped),
        reference=numbers.weights if reference else 0,
        cuda=CUDA if cuda else 0,
    )


def rows(recipe: Recipe, numbers: ModelNumbers, processes: int) -> Rows:
    """Return the traces of a process's largest forward pass: one trace a session, each of `max_tokens`.

    Groups that are replaced are not trained. A session has more traces where it has sub-agents, or where a call does
    not continue the one before it.
    """
    sessions = recipe.groups_per_step * recipe.sessions
    parts = processes * int(recipe.grpo.get("gradient_accumulation_steps", 1))
    return Rows(-(-sessions // parts), min(recipe.max_tokens or numbers.context, numbers.context))


def variable(recipe: Recipe, numbers: ModelNumbers, traces: Rows, memory: float | None) -> Variable:
    """Return the sizes that the trainer chooses for these traces and `memory` bytes, and what they take.

    Without a number of bytes, as on a CPU, segments have one size and all states are kept. If nothing fits, the
    smallest sizes: their total is then more than `memory`.
    """
    grpo, given = recipe.grpo, recipe.grpo.get("tokens_per_segment")
    if grpo.get("activation_checkpointing") is False or grpo.get("forward") == "padded":
        sizes = Sizes(traces.tokens, None, 0)  # the activations of all tokens are kept at once
    elif memory is None:
        sizes = Sizes(given or TOKENS_PER_SEGMENT, None, 0)
    else:
        among = (given,) if given else SIZES
        offload = bool(grpo.get("offload_states"))
        sizes = numbers.costs.sizes_of(memory, traces.tokens, traces.longest, offload_states=offload, among=among)
    return _parts(numbers, traces, sizes, grpo)


def session_bytes(numbers: ModelNumbers, tokens: int) -> int:
    """Return what a session of this many tokens takes in the engine's cache."""
    return int(numbers.costs.state_per_token * tokens + numbers.costs.state_per_segment)


def disk(recipe: Recipe, numbers: ModelNumbers, *, online: bool = True) -> Disk:
    """Return the files of a recipe's training. Without `online` nothing is published."""
    published = {"lora": recipe.adapters * numbers.adapter, "checkpoint": PUBLISHED * numbers.weights, "nccl": 0}
    one = (numbers.adapter if recipe.lora else numbers.weights) + _optimizer_state(recipe, numbers, numbers.trained)
    return Disk(
        published=published[recipe.publish] if online else 0,
        checkpoints=checkpoints_at_once(recipe) * one,
        finished=numbers.weights + numbers.other_towers + numbers.adapter,  # an adapter is merged into it, and beside
    )


def checkpoints_written(recipe: Recipe) -> int:
    """Return the number of checkpoints of a whole training: one after the last step too."""
    return -(-recipe.steps // recipe.save_steps)


def checkpoints_at_once(recipe: Recipe) -> int:
    """Return the most checkpoints that exist at once: an old one is removed after a new one is written."""
    written = checkpoints_written(recipe)
    limit = int(recipe.grpo.get("save_total_limit", SAVE_TOTAL_LIMIT))
    return min(written, limit + 1) if limit > 0 else written


def _optimizer_state(recipe: Recipe, numbers: ModelNumbers, stepped: int) -> int:
    """Return the bytes of the optimizer's state for this many trained values, with float32 copies of 16-bit weights."""
    moments = MOMENTS.get(str(recipe.grpo.get("optim", "adamw")), 2)
    copies = not recipe.lora and numbers.item != FLOAT32
    return (moments + copies) * FLOAT32 * stepped


def _longest_alone(recipe: Recipe, numbers: ModelNumbers, traces: Rows, size: int) -> Variable:
    """Return what the longest trace alone takes, in segments of `size` tokens or of the recipe's."""
    size = recipe.grpo.get("tokens_per_segment") or size
    return _parts(numbers, Rows(1, traces.longest), Sizes(size, None, 0), recipe.grpo)


def _parts(numbers: ModelNumbers, traces: Rows, chosen: Sizes, grpo: dict[str, Any]) -> Variable:
    costs, size = numbers.costs, chosen.tokens_per_segment
    kept = min(traces.tokens, chosen.tokens_in_memory or traces.tokens)
    logits = costs.head_gradient + costs.logits_per_token * min(size, costs.logits_tokens)
    graph = (costs.of_batch(size, traces.longest) - logits) / WORKING
    return Variable(
        tokens_per_segment=size,
        tokens_in_memory=chosen.tokens_in_memory,
        states=0 if grpo.get("offload_states") else ceil(costs.of_states(kept, size, traces.longest)),
        activations=ceil(graph),
        working=ceil(graph * (WORKING - 1)),
        logits=ceil(logits),
    )


def _engine_holds(recipe: Recipe, numbers: ModelNumbers) -> tuple[int, int, int]:
    """Return the bytes of an engine's weights, of its adapters, and of what it needs besides the cache."""
    adapters = recipe.adapters * numbers.adapter * numbers.item // FLOAT32 if recipe.publish == "lora" else 0
    return numbers.weights, adapters, SERVING


def _engine_share(
    recipe: Recipe, numbers: ModelNumbers, traces: Rows, cache: int, gpu: float, utilization: float | None = None
) -> EngineShare:
    """Return the share of an engine with this cache. Without `utilization`, the one that its total needs."""
    weights, adapters, working = _engine_holds(recipe, numbers)
    one = session_bytes(numbers, traces.longest)
    return EngineShare(
        weights=weights,
        adapters=adapters,
        working=working,
        cache=cache,
        cached_tokens=cache * traces.longest // one,
        sessions=cache // one,
        utilization=utilization or floor(100 * (weights + adapters + working + cache) / gpu) / 100,
    )
