"""A recipe's arguments for TRL, PEFT and the recorder. They are checked before anything starts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from pydantic import TypeAdapter, ValidationError

from rolltap.addons.errors import InputError
from rolltap.trainer.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.checkpoints import CHECKPOINTS
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report_to import check_report_to

_SET_HERE = ("output_dir", "max_steps", "seed", "save_strategy", "save_steps")
_WIDER_THAN_DECLARED = ("scale_rewards", "init_lora_weights")
"""Fields that take more types than they declare. TRL and PEFT check them."""


def check_arguments(recipe: Recipe) -> None:
    """Raise `InputError` for a model folder, and values of [grpo] and [lora], that no training can start with."""
    if not recipe.model.is_dir():
        raise InputError(f"model: the folder {recipe.model} does not exist: correct the key in the recipe")
    if not (recipe.model / "config.json").is_file():
        raise InputError(f"model: the folder {recipe.model} has no config.json: give the folder of a saved model")
    for key in _SET_HERE:
        if key in recipe.grpo:
            raise InputError(f"grpo.{key} is set by rolltap: remove it")
    _check_types("grpo", TraceGRPOConfig, recipe.grpo)
    for key in ("num_iterations", "gradient_accumulation_steps"):
        if recipe.grpo.get(key, 1) < 1:
            raise InputError(f"grpo.{key} = {recipe.grpo[key]}: give at least 1")
    if not recipe.grpo.get("temperature", 1.0) > 0:
        raise InputError(f"grpo.temperature = {recipe.grpo['temperature']}: give a number above 0")
    check_report_to(recipe.grpo.get("report_to", "none"))
    if config := lora_config(recipe):
        _check_adapter(recipe, config)


def training_arguments(recipe: Recipe, run: Path, seed: int, rows: Sequence[object]) -> TraceGRPOConfig:
    """Return TRL's arguments: the recipe's, and those that follow from it. `check_arguments` comes first.

    Raises `InputError` for what TRL refuses.
    """
    if recipe.groups_per_step > len(rows):
        raise InputError(f"groups_per_step is {recipe.groups_per_step}, but {recipe.tasks} has {len(rows)} tasks")
    cuda = torch.cuda.is_available()
    defaults: dict[str, Any] = {
        "bf16": cuda,
        "use_cpu": not cuda,
        "report_to": "none",
        "run_name": run.name,
        "project": "rolltap",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_total_limit": 2,
    }
    try:
        return TraceGRPOConfig(
            **defaults | recipe.grpo,
            output_dir=str(run / CHECKPOINTS),
            max_steps=recipe.steps * recipe.grpo.get("num_iterations", 1),
            seed=seed,
            save_strategy="steps",
            save_steps=recipe.save_steps * recipe.grpo.get("num_iterations", 1),
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"the recipe's [grpo] table: {error}") from error


def lora_config(recipe: Recipe) -> LoraConfig | None:
    """Return the configuration of the recipe's adapter; None when the full model is trained. Raises `InputError`."""
    if not recipe.lora:
        return None
    if unknown := recipe.lora.keys() - get_type_hints(LoraConfig).keys():
        raise InputError(f"lora.{min(unknown)} is not an argument of PEFT's LoraConfig: correct or remove it")
    _check_types("lora", LoraConfig, recipe.lora)
    try:
        return LoraConfig(**recipe.lora)
    except (TypeError, ValueError) as error:
        raise InputError(f"the recipe's [lora] table: {error}") from error


def sampling(recipe: Recipe) -> dict[str, Any]:
    """Return the recorder's sampling parameters: the recipe's own, and the temperature by which the trainer divides.

    Raises `InputError` when the two temperatures differ.
    """
    text = recipe.recorder.get("rolltap_sampling", "{}")
    try:
        own = json.loads(text) if isinstance(text, str) else None
    except ValueError as error:
        raise InputError(f"recorder.rolltap_sampling is not JSON: {error}") from error
    if not isinstance(own, dict):
        raise InputError(f"recorder.rolltap_sampling = {text!r}: give one JSON object as text")
    temperature = recipe.grpo.get("temperature", 1.0)
    if own.get("temperature", temperature) != temperature:
        raise InputError(
            f"recorder.rolltap_sampling samples at temperature {own['temperature']!r}, but grpo.temperature is "
            f"{temperature!r}: the trainer would divide the logits by another number than the engine"
        )
    return {**own, "temperature": temperature}


def _check_types(table: str, kind: type, values: Mapping[str, Any]) -> None:
    """Raise `InputError` for a value that is not of its field's type. Keys that are not fields are left out."""
    types = get_type_hints(kind)
    for key in values.keys() & types.keys() - {*_WIDER_THAN_DECLARED}:
        try:
            TypeAdapter(types[key]).validate_python(values[key], strict=True)
        except ValidationError as error:
            faults = dict.fromkeys(fault["msg"] for fault in error.errors() if fault["type"] != "none_required")
            raise InputError(f"{table}.{key} = {values[key]!r}: {' or '.join(faults)}") from error


def _check_adapter(recipe: Recipe, config: LoraConfig) -> None:
    """Raise `InputError` when the model cannot get the adapter. The model is built without its weights."""
    try:
        described = transformers.AutoConfig.from_pretrained(recipe.model)
        # TRL makes a model of this class. It is not in transformers when the model brings its own code.
        if architecture := getattr(transformers, (described.architectures or [""])[0], None):
            config.init_lora_weights = False  # there are none to begin from
            with torch.device("meta"):
                inject_adapter_in_model(config, architecture(described))
    except (OSError, ValueError) as error:
        named = ", ".join(f"lora.{key} = {value!r}" for key, value in recipe.lora.items())
        raise InputError(f"{named} does not fit the model {recipe.model}: {error}") from error
