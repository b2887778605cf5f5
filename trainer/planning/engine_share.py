"""Memory of an engine: its weights and its cache, and how one GPU is divided between an engine and a trainer."""

from dataclasses import dataclass
from math import floor

from rolltap.trainer.grpo.forward import TOKENS_PER_SEGMENT
from rolltap.trainer.grpo.plan import SIZES
from rolltap.trainer.planning.memory import GIB, SLACK, Fixed, Rows, Variable, least, variable
from rolltap.trainer.planning.numbers import FLOAT32, ModelNumbers
from rolltap.trainer.training.recipe import Recipe

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
