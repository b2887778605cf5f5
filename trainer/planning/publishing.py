"""Bytes that a training writes: weights on their way to the engines, and checkpoints."""

from dataclasses import dataclass

from rolltap.trainer.planning.memory import optimizer_state
from rolltap.trainer.planning.numbers import ModelNumbers
from rolltap.trainer.training.arguments import SAVE_TOTAL_LIMIT
from rolltap.trainer.training.recipe import Recipe

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
