"""The values that decide the steps of a training. A folder that was begun with others is not gone on with."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.keys import FREE_OPTIONS
from rolltap.trainer.rollouts.tasks.task import Task
from rolltap.trainer.training.arguments import dtype_of
from rolltap.trainer.training.recipe import Recipe

_CONSTANT = ("constant", "constant_with_warmup")
"""Values of `lr_scheduler_type` whose learning rates do not depend on the number of steps."""
_KEYS = ("groups_per_step", "strategy", "roles", "max_tokens", "suspicious")
_ROLLOUT_KEYS = ("sessions_per_group", "replace_zero_variance", "runtime")
_DIGEST = "sha256:"

_MAY_CHANGE = frozenset(
    [
        "grpo.gradient_accumulation_steps",
        "grpo.steps_per_generation",
        "grpo.forward",
        "grpo.tokens_per_segment",
        "grpo.memory_gib",
        "grpo.offload_states",
        "grpo.activation_checkpointing",
        "grpo.activation_checkpointing_kwargs",
        "grpo.torch_empty_cache_steps",
        "grpo.use_cpu",
        "grpo.full_determinism",
        "grpo.skip_memory_metrics",
        "grpo.debug",
        "grpo.local_rank",
        "grpo.report_to",
        "grpo.run_name",
        "grpo.project",
        "grpo.disable_tqdm",
        "grpo.push_to_hub",
        *(f"recorder.{name}" for name in FREE_OPTIONS),
    ]
)
_MAY_CHANGE_FAMILIES = ("grpo.logging_", "grpo.log_", "grpo.save_", "grpo.hub_", "grpo.trackio_")
"""How a step is computed, logged and saved, not which step it is."""


def begun_online(recipe: Recipe, tasks: Sequence[Task], harness: Harness, seed: int) -> dict[str, Any]:
    """Return what decides the steps of an online training: key -> JSON value, or the digest of a long one.

    Of folders that a task names the content counts, wherever they are. Raises `InputError` for one that cannot be read.
    """
    return {
        "kind": "online",
        "tasks": _digest([task.digest() for task in tasks]),
        "harness": _DIGEST + harness.digest(),
        **{key: getattr(recipe, key) for key in _ROLLOUT_KEYS},
        **_table("recorder", recipe.recorder),
        **_table("budget", recipe.budget.model_dump(exclude_none=True)),
        **_common(recipe, seed),
    }


def begun_offline(recipe: Recipe, groups: Sequence[Sequence[object]], seed: int) -> dict[str, Any]:
    """Return what decides the steps of an offline training, as `begun_online`. `groups` are its rows, as JSON."""
    return {"kind": "offline", "the recorded groups": _digest(groups), **_common(recipe, seed)}


def require_same(where: object, known: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    """Raise `InputError`, which names the keys, unless a training is begun with the values that are `known`."""
    differ = [key for key in known.keys() | begun.keys() if _json(known.get(key)) != _json(begun.get(key))]
    if "kind" in differ:
        differ = ["kind"]
    if differ:
        named = ", ".join(_named(known, key) for key in sorted(differ))
        raise InputError(f"{where} was begun with other values of {named}: start in another folder, or put them back")


def _common(recipe: Recipe, seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "model": str(recipe.model),
        "dtype": dtype_of(recipe),
        **({} if _same_rates(recipe) else {"steps": recipe.steps}),
        **{key: getattr(recipe, key) for key in _KEYS},
        **_table("outcomes", recipe.outcomes.model_dump()),
        **_table("lora", recipe.lora),
        **_table("grpo", recipe.grpo),
    }


def _same_rates(recipe: Recipe) -> bool:
    """Return True when the learning rate of a step does not depend on the recipe's number of steps."""
    part_of_all = 0 < recipe.grpo.get("warmup_steps", 0) < 1
    return recipe.grpo.get("lr_scheduler_type") in _CONSTANT and not part_of_all


def _table(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"{name}.{key}": value for key, value in values.items()}
    return {
        key: value
        for key, value in named.items()
        if key not in _MAY_CHANGE and not key.startswith(_MAY_CHANGE_FAMILIES)
    }


def _named(known: Mapping[str, Any], key: str) -> str:
    if key not in known:
        return f"{key} (it was not given)"
    value = _json(known[key])
    if key == "steps":
        return f"steps (it was {value}, and the learning rates follow from it unless lr_scheduler_type is constant)"
    return key if value.startswith(f'"{_DIGEST}') else f"{key} (it was {value})"


def _digest(value: Any) -> str:
    return _DIGEST + sha256(_json(value).encode()).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
