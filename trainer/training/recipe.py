"""A training recipe: one TOML file that names the model, the tasks, the harness and TRL's arguments."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import CallRole
from rolltap.trainer.settings import load_toml
from rolltap.trainer.traces.build import TRAINED_ROLES, Strategy

FINISHED = "model"
"""Folder in the run that holds the trained model; it is there when the training came to its end."""


class Recipe(BaseModel):
    """Paths are relative to the recipe's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    """Folder of the model to train, which the engine serves as well."""
    tasks: Path
    """Task file (JSON Lines)."""
    harness: str
    """Name of a harness preset, or a preset of your own: a file that ends in `.toml`."""
    steps: int = Field(ge=1)
    """Optimizer steps. Each trains on freshly recorded sessions (`grpo.num_iterations` times)."""
    groups_per_step: int = Field(default=1, ge=1)
    """Tasks a step; each makes a group."""
    sessions_per_group: int = Field(default=8, ge=2)
    """Sessions that GRPO compares with each other."""
    concurrency: int = Field(default=8, ge=1)
    """Sessions that run at the same time."""
    session_timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which a harness is stopped."""
    strategy: Strategy = "prefix_merging"
    """How calls become traces."""
    roles: tuple[CallRole, ...] = Field(default=TRAINED_ROLES, min_length=1)
    """Roles of the calls that are trained. What the others sampled stays as context where a trained call continues
    it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a trace may have, its prompt included; a longer one is cut at its end."""
    publish: Literal["checkpoint", "lora"] = "checkpoint"
    """How new weights reach the engine: a full checkpoint that it reloads, or a LoRA adapter that it loads."""
    save_steps: int = Field(default=1, ge=1)
    """Steps between checkpoints to resume from."""
    recorder: dict[str, str] = {}
    """Further options of the recorder, for instance `rolltap_sampling` or `rolltap_renderer`."""
    grpo: dict[str, Any] = {}
    """Arguments of TRL's `GRPOConfig`."""
    lora: dict[str, Any] = {}
    """Arguments of PEFT's `LoraConfig`; with them an adapter is trained instead of the model."""


def load_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file, its paths made absolute. Raises `InputError`."""
    recipe = load_toml(path, Recipe)
    if recipe.publish == "lora" and not recipe.lora:
        raise InputError(f'{path}: publish = "lora" needs a [lora] table; publish = "checkpoint" trains without one')
    paths: dict[str, Any] = {name: (path.parent / getattr(recipe, name)).resolve() for name in ("model", "tasks")}
    if recipe.harness.endswith(".toml"):
        paths["harness"] = str((path.parent / recipe.harness).resolve())
    return recipe.model_copy(update=paths)
