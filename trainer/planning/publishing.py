"""Bytes that a training writes: weights on their way to the engines, and checkpoints."""

from dataclasses import dataclass

from rolltap.trainer.planning.memory import Fixed
from rolltap.trainer.planning.numbers import ModelNumbers
from rolltap.trainer.training.recipe import Recipe

KEPT = 2
"""Published checkpoints that exist at once, the previous one until all engines took the new one; and checkpoints of
the trainer."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of files."""

    published: int
    """In `publish_folder`, at most. Memory, if that is in /dev/shm."""
    checkpoints: int
    """In the run folder, at most: weights and the optimizer's state."""


def disk(recipe: Recipe, numbers: ModelNumbers, always: Fixed, processes: int) -> Disk:
    """Return the bytes that a recipe's training has on disk at most, besides the recorded run."""
    trained = numbers.adapter if recipe.lora else numbers.weights
    optimizer = always.optimizer if recipe.lora else always.optimizer * processes
    match recipe.publish:
        case "lora":
            published = recipe.adapters * numbers.adapter
        case "checkpoint":
            published = KEPT * numbers.weights
        case "nccl":
            published = 0
    return Disk(published, KEPT * (trained + optimizer))
