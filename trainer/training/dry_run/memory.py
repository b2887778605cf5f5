"""Memory of a training process: bytes by what they are for.

Memory of an engine: its weights and its cache, and how one GPU is divided between an engine and a trainer.

Bytes that a training writes: weights on their way to the engines, and checkpoints.
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


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that a training process always holds, whatever the length of its traces."""

    weights: int
    """In the recipe's type, and those of an adapter in float32."""
    gradients: int
    """In float32, of the trained weights."""
    optimizer: int
    """State of the optimizer, and float32 copies of the weights: with full weights, the largest process's share."""
    reference: int
    """Weights of the reference model, with `grpo.beta` and full weights."""
    cuda: int
    """See `CUDA`; 0 on a CPU."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.cuda


@dataclass(frozen=True, slots=True)
class Rows:
    """Traces of one forward pass, as long as they may be, without shared prefixes."""

    count: int
    longest: int
    """Tokens of each."""

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return self.count * self.longest


@dataclass(frozen=True, slots=True)
class Variable:
    """Bytes for the traces of one forward pass, and how it is cut."""

    tokens_per_segment: int
    tokens_in_memory: int | None
    """None if the states of all rows are kept at once."""
    states: int
    """Keys and values or recurrent states of the tokens in memory, and their gradients."""
    activations: int
    """Tensors that one batch of segments saves for its backward pass."""
    working: int
    """Room that the running layer may need besides."""
    logits: int
    """One chunk of logits, and the head's gradient."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.states + self.activations + self.working + self.logits


def fixed(recipe: Recipe, numbers: ModelNumbers, processes: int, *, cuda: bool) -> Fixed:
    """Return what each of the training processes holds."""
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
        optimizer=optimizer_state(recipe, numbers, stepped),
        reference=numbers.weights if reference else 0,
        cuda=CUDA if cuda else 0,
    )


def optimizer_state(recipe: Recipe, numbers: ModelNumbers, stepped: int) -> int:
    """Return the bytes of the optimizer's state for this many trained values, with float32 copies of 16-bit weights."""
    moments = MOMENTS.get(str(recipe.grpo.get("optim", "adamw")), 2)
    copies = not recipe.lora and numbers.item != FLOAT32
    return (moments + copies) * FLOAT32 * stepped


def rows(recipe: Recipe, numbers: ModelNumbers, processes: int) -> Rows:
    """Return the traces of a process's largest forward pass: one trace a session, each of `max_tokens`.

    Groups that are replaced are not trained. A session has more traces where it has sub-agents, or where a call does
    not continue the one before it.
    """
    sessions = recipe.groups_per_step * recipe.sessions
    parts = processes * int(recipe.grpo.get("gradient_accumulation_steps", 1))
    return Rows(-(-sessions // parts), longest(recipe, numbers))


def longest(recipe: Recipe, numbers: ModelNumbers) -> int:
    """Return the tokens of the longest trace that the recipe allows."""
    return min(recipe.max_tokens or numbers.context, numbers.context)


def variable(recipe: Recipe, numbers: ModelNumbers, traces: Rows, memory: float | None) -> Variable:
    """Return the sizes that the trainer chooses for these traces and `memory` bytes, and what they take.

    Without a number of bytes, as on a CPU, segments have one size and all states are kept. If nothing fits, the
    smallest sizes: their total is then more than `memory`.
    """
    return _parts(numbers, traces, _sizes(recipe, numbers, traces, memory), recipe.grpo)


def least(recipe: Recipe, numbers: ModelNumbers, traces: Rows, size: int = SIZES[-1]) -> Variable:
    """Return what the longest trace alone takes, in segments of `size` tokens or of the recipe's."""
    size = recipe.grpo.get("tokens_per_segment") or size
    return _parts(numbers, Rows(1, traces.longest), Sizes(size, None, 0), recipe.grpo)


def _sizes(recipe: Recipe, numbers: ModelNumbers, traces: Rows, memory: float | None) -> Sizes:
    if recipe.grpo.get("activation_checkpointing") is False or recipe.grpo.get("forward") == "padded":
        return Sizes(traces.tokens, None, 0)  # the activations of all tokens are kept at once
    given = recipe.grpo.get("tokens_per_segment")
    if memory is None:
        return Sizes(given or TOKENS_PER_SEGMENT, None, 0)
    return numbers.costs.sizes_of(
        memory,
        traces.tokens,
        traces.longest,
        offload_states=bool(recipe.grpo.get("offload_states")),
        among=(given,) if given else SIZES,
    )


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


SERVING = 4 * GIB
"""Activations, CUDA graphs and libraries of an engine. Assumed, not measured."""

UTILIZATION = 0.92
"""vLLM's default of `--gpu-memory-utilization`: the share of a GPU that an engine takes. vLLM 0.32."""

COMFORTABLE = TOKENS_PER_SEGMENT
"""Tokens of a segment from which larger ones gain little. The engine of a shared GPU gets the rest."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Bytes of an engine on its GPU."""

    weights: int
    adapters: int
    """Adapters that are loaded at the same time."""
    working: int
    """See `SERVING`."""
    cache: int
    """Keys and values, and states of linear attention."""
    cached_tokens: int
    """Tokens of such sessions that fit into the cache."""
    sessions: int
    """Sessions of the longest length that fit at once."""
    utilization: float
    """Value of `--gpu-memory-utilization` that gives the engine this much."""

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.weights + self.adapters + self.working + self.cache


@dataclass(frozen=True, slots=True)
class Division:
    """One GPU for an engine and a training process."""

    engine: EngineShare
    trainer: Variable
    memory: int
    """Bytes that `grpo.memory_gib` should give to the traces."""


def session_bytes(numbers: ModelNumbers, tokens: int) -> int:
    """Return what a session of this many tokens takes in the engine's cache."""
    return int(numbers.costs.state_per_token * tokens + numbers.costs.state_per_segment)


def own_gpu(recipe: Recipe, numbers: ModelNumbers, gpu: float, longest: int) -> EngineShare:
    """Return the memory of an engine that has a GPU of `gpu` bytes to itself."""
    held = _held(recipe, numbers)
    return _share(numbers, held, max(0, int(UTILIZATION * gpu) - sum(held)), longest, UTILIZATION)


def divide(recipe: Recipe, numbers: ModelNumbers, always: Fixed, traces: Rows, gpu: float, at_once: int) -> Division:
    """Divide a GPU of `gpu` bytes. `at_once` is the number of sessions that an engine serves at the same time.

    The trainer gets what its longest trace needs in segments of `COMFORTABLE` tokens, or smaller ones if the engine
    could not hold one session otherwise; the engine what its sessions need; and the trainer what is left. A total that
    is larger than the GPU does not fit.
    """
    held = _held(recipe, numbers)
    rest = int(SLACK * gpu) - always.total - sum(held)
    one = session_bytes(numbers, traces.longest)
    if given := recipe.grpo.get("memory_gib"):
        memory = int(given * GIB)
        cache = max(0, rest - memory)
    else:
        needs = [least(recipe, numbers, traces, size).total for size in SIZES if size <= COMFORTABLE]
        need = next((need for need in needs if need + one <= rest), needs[-1])
        cache = max(0, min(at_once * one, rest - need))
        memory = max(0, rest - cache)
    utilization = floor(100 * (sum(held) + cache) / gpu) / 100
    return Division(
        _share(numbers, held, cache, traces.longest, utilization), variable(recipe, numbers, traces, memory), memory
    )


def _held(recipe: Recipe, numbers: ModelNumbers) -> tuple[int, int, int]:
    """Return the bytes of weights, adapters and of what is needed besides."""
    adapters = recipe.adapters * numbers.adapter * numbers.item // FLOAT32 if recipe.publish == "lora" else 0
    return numbers.served, adapters, SERVING


def _share(
    numbers: ModelNumbers, held: tuple[int, int, int], cache: int, longest: int, utilization: float
) -> EngineShare:
    weights, adapters, working = held
    return EngineShare(
        weights=weights,
        adapters=adapters,
        working=working,
        cache=cache,
        cached_tokens=cache * longest // session_bytes(numbers, longest),
        sessions=cache // session_bytes(numbers, longest),
        utilization=utilization,
    )


PUBLISHED = 2
"""Published checkpoints that exist at once: the previous one until all engines took the new one."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of files."""

    published: int
    """In `publish_folder`, at most. Memory, if that is in /dev/shm."""
    checkpoints: int
    """In the run folder, at most: weights and the optimizer's state, of all that are there while one is written."""
    finished: int
    """The finished model in the run folder."""


def disk(recipe: Recipe, numbers: ModelNumbers, *, online: bool = True) -> Disk:
    """Return the bytes that a recipe's training has on disk at most, besides the recorded run."""
    trained = numbers.adapter if recipe.lora else numbers.weights
    match recipe.publish if online else "nothing":
        case "lora":
            published = recipe.adapters * numbers.adapter
        case "checkpoint":
            published = PUBLISHED * numbers.weights
        case "nccl" | "nothing":
            published = 0
    one = trained + optimizer_state(recipe, numbers, numbers.trained)
    finished = numbers.weights + numbers.other_towers + numbers.adapter  # an adapter is merged into it, and beside it
    return Disk(published, checkpoints_at_once(recipe) * one, finished)


def checkpoints_written(recipe: Recipe) -> int:
    """Return the number of checkpoints of a whole training: one after the last step too."""
    return -(-recipe.steps // recipe.save_steps)


def checkpoints_at_once(recipe: Recipe) -> int:
    """Return the most checkpoints that exist at once: an old one is removed after a new one is written."""
    written = checkpoints_written(recipe)
    limit = int(recipe.grpo.get("save_total_limit", SAVE_TOTAL_LIMIT))
    return min(written, limit + 1) if limit > 0 else written
