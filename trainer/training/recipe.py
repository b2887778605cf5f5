"""Training recipe: one TOML file with the model, the tasks, the harness and TRL's arguments."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import CallRole
from rolltap.trainer.settings import load_toml
from rolltap.trainer.traces.build import TRAINED_ROLES, Strategy

FINISHED = "model"
"""Folder in the run with the trained model. It exists once the training is finished."""


class Recipe(BaseModel):
    """Keys of a recipe. Paths are relative to the recipe's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    """Folder of the model to train; the engine serves the same model."""
    tasks: Path | None = None
    """Task file (JSON Lines). Required to roll out; recorded runs need none."""
    harness: str | None = None
    """Name of a harness preset, or path of a preset file that ends in `.toml`. Required to roll out."""
    steps: int = Field(ge=1)
    """Number of rollout and training rounds. Each trains on newly recorded sessions, `grpo.num_iterations` times.
    Recorded runs are passed over until there are as many."""
    groups_per_step: int = Field(default=1, ge=1)
    """Groups per step, each of one task."""
    sessions_per_group: int = Field(default=8, ge=2)
    """Sessions of a group, which GRPO compares with each other."""
    replace_zero_variance: int = Field(default=0, ge=0)
    """Maximum number of further groups of a step, of tasks drawn by seed and step. One is run for each group whose
    rewards are all equal, which trains nothing."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum number of sessions that run at the same time."""
    recorders: int = Field(default=1, ge=1)
    """Number of the recorder's processes. Each uses one core; a session's id names its process."""
    session_timeout: float = Field(default=1800.0, gt=0)
    """Seconds after which a harness is stopped."""
    strategy: Strategy = "prefix_merging"
    """Way from calls to traces: see `Strategy`."""
    roles: tuple[CallRole, ...] = Field(default=TRAINED_ROLES, min_length=1)
    """Roles of the calls to train. Tokens of other calls are context, with mask 0, where a trained call continues
    them."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum length of a trace in tokens, prompt included. Longer ones are truncated at the end."""
    publish: Literal["checkpoint", "lora"] = "checkpoint"
    """Way of new weights to the engine: a full checkpoint that it reloads, or a LoRA adapter that it loads."""
    save_steps: int = Field(default=1, ge=1)
    """Steps between the checkpoints from which a stopped training resumes."""
    recorder: dict[str, str | list[str]] = {}
    """Further options of the recorder, for example `rolltap_sampling` or `rolltap_renderer`."""
    grpo: dict[str, Any] = {}
    """Arguments of `rolltap.TraceGRPOConfig`: those of TRL's `GRPOConfig`, and its own."""
    lora: dict[str, Any] = {}
    """Arguments of PEFT's `LoraConfig`. If given, an adapter is trained instead of the full model."""


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML file, with paths made absolute. Raises `InputError`."""
    recipe = load_toml(path, Recipe)
    if recipe.publish == "lora" and not recipe.lora:
        raise InputError(f'{path}: publish = "lora" needs a [lora] table; publish = "checkpoint" trains without one')
    paths: dict[str, Any] = {
        name: (path.parent / getattr(recipe, name)).resolve() for name in ("model", "tasks") if getattr(recipe, name)
    }
    if recipe.harness is not None and recipe.harness.endswith(".toml"):
        paths["harness"] = str((path.parent / recipe.harness).resolve())
    return recipe.model_copy(update=paths)
