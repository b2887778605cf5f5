"""The plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltap.trainer.training.recipe import Recipe


@dataclass(frozen=True)
class TrainingPlan:
    """A plan."""

    recipe: Recipe
    can_start: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return it."""
        return {"can_start": self.can_start}


def plan(
    recipe: Recipe, *, engine: str | None = None, processes: int | None = None, file: Path | None = None
) -> TrainingPlan:
    """Return it."""
    return TrainingPlan(recipe)
