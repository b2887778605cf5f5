"""A recipe's arguments for TRL, PEFT and the recorder. They are checked before anything starts."""

import difflib
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
from peft import LoraConfig, inject_adapter_in_model
from pydantic import TypeAdapter, ValidationError

from rolltap.addons.errors import InputError
from rolltap.trainer.grpo.config import TraceGRPOConfig
from rolltap.trainer.models.loading import Dtype, frozen_modules, meta_policy
from rolltap.trainer.training.adapter import require_servable
from rolltap.trainer.training.checkpoints import CHECKPOINTS
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.report_to import check_report_to
from rolltap.trainer.training.trial import check_made

_SET_HERE = ("output_dir", "max_steps", "seed", "save_strategy", "save_steps", "ddp_backend", "ddp_timeout")
SAVE_TOTAL_LIMIT = 2
"""Checkpoints that are kept, if the recipe has no `grpo.save_total_limit`."""
_WIDER_THAN_DECLARED = ("scale_rewards",)
"""Fields that take more types than they declare."""
_SCALES = (True, False, "group", "batch", "none")
"""Values of TRL's `scale_rewards`."""


def check_arguments(recipe: Recipe) -> None:
    """Raise `InputError` for a model folder, and values of [grpo] and [lora], that no training can start with."""
    for key in _SET_HERE:
        if key in recipe.grpo:
            raise InputError(f"grpo.{key} is set by rolltap: remove it")
    _check_names("grpo", TraceGRPOConfig, recipe.grpo)
    _check_types("grpo", TraceGRPOConfig, recipe.grpo)
    for key in ("num_iterations", "gradient_accumulation_steps"):
        if recipe.grpo.get(key, 1) < 1:
            raise InputError(f"grpo.{key} = {recipe.grpo[key]}: give at least 1")
    if not recipe.grpo.get("temperature", 1.0) > 0:
        raise InputError(f"grpo.temperature = {recipe.grpo['temperature']}: give a number above 0")
    if recipe.grpo.get("beta", 0.0) < 0:
        raise InputError(f"grpo.beta = {recipe.grpo['beta']}: give 0 or more")
    if (scale := recipe.grpo.get("scale_rewards", True)) not in _SCALES:
        raise InputError(f'grpo.scale_rewards = {scale!r}: choose "group", "batch" or "none"')
    check_report_to(recipe.grpo.get("report_to", "none"))
    _check_dtype(recipe)
    config = lora_config(recipe)
    if recipe.publish == "lora":
        require_servable(recipe.lora)
    model = meta_policy(recipe.model, dtype_of(recipe), **model_arguments(recipe))
    if config:
        _check_adapter(recipe, config, model)


def dtype_of(recipe: Recipe) -> Dtype:
    """Return the type of the weights: the recipe's, or bfloat16 on a CUDA GPU and float32 without one."""
    return recipe.dtype or ("bfloat16" if _on_cuda(recipe) else "float32")


def training_arguments(recipe: Recipe, run: Path, seed: int, rows: Sequence[object]) -> TraceGRPOConfig:
    """Return TRL's arguments: the recipe's, and those that follow from it. `check_arguments` comes first.

    Raises `InputError` for what TRL refuses.
    """
    if recipe.groups_per_step > len(rows):
        raise InputError(f"groups_per_step is {recipe.groups_per_step}, but {recipe.tasks} has {len(rows)} tasks")
    defaults: dict[str, Any] = {
        "bf16": dtype_of(recipe) == "bfloat16",
        "use_cpu": not _on_cuda(recipe),
        "report_to": "none",
        "run_name": run.name,
        "project": "rolltap",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_total_limit": SAVE_TOTAL_LIMIT,
    }
    try:
        args = TraceGRPOConfig(
            **defaults | {key: value for key, value in recipe.grpo.items() if key != "model_init_kwargs"},
            output_dir=str(run / CHECKPOINTS),
            max_steps=recipe.steps * recipe.grpo.get("num_iterations", 1),
            seed=seed,
            save_strategy="steps",
            save_steps=recipe.save_steps * recipe.grpo.get("num_iterations", 1),
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"the recipe's [grpo] table: {error}") from error
    check_made(args)
    # the dtype decides, not the settings of `accelerate config` and `accelerate launch`, which transformers reads
    args.mixed_precision = "bf16" if args.bf16 else "no"
    return args


def model_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return further arguments of `from_pretrained`: those of `grpo.model_init_kwargs`."""
    return dict(recipe.grpo.get("model_init_kwargs") or {})


def lora_config(recipe: Recipe) -> LoraConfig | None:
    """Return the configuration of the recipe's adapter; None when the full model is trained. Raises `InputError`."""
    if not recipe.lora:
        return None
    _check_names("lora", LoraConfig, recipe.lora)
    # PEFT reads any number of iterations, in any case
    init = re.sub(r"pissa_niter_\d+", "pissa", str(recipe.lora.get("init_lora_weights", True)).lower())
    known = recipe.lora if isinstance(recipe.lora.get("init_lora_weights", True), bool) else {"init_lora_weights": init}
    _check_types("lora", LoraConfig, recipe.lora | known)
    if recipe.lora.get("alora_invocation_tokens"):
        raise InputError("lora.alora_invocation_tokens: such an adapter cannot be merged into the model: remove it")
    try:
        return LoraConfig(**recipe.lora)
    except (TypeError, ValueError, ImportError) as error:
        raise InputError(f"the recipe's [lora] table: {error}") from error


def without_frozen(config: LoraConfig, model: Any) -> LoraConfig:
    """Leave what is outside of the text part of `model` out of an adapter's configuration, and return it."""
    frozen, own = frozen_modules(model), config.exclude_modules or []
    if frozen:
        config.exclude_modules = "|".join([own, *map(re.escape, frozen)]) if isinstance(own, str) else [*own, *frozen]
    return config


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


def _check_names(table: str, kind: type, values: Mapping[str, Any]) -> None:
    """Raise `InputError` for a key that is no argument of `kind`, with the argument that resembles it."""
    known = list(inspect.signature(kind).parameters)
    for key in sorted(values.keys() - known):
        near = difflib.get_close_matches(key, known, 1)
        fix = f"write {table}.{near[0]}, or remove it" if near else "correct or remove it"
        raise InputError(f"{table}.{key} is no argument of {kind.__name__}: {fix}")


def _check_types(table: str, kind: type, values: Mapping[str, Any]) -> None:
    """Raise `InputError` for a value that is not of its field's type. Keys that are not fields are left out."""
    types = get_type_hints(kind)
    for key in values.keys() & types.keys() - {*_WIDER_THAN_DECLARED}:
        try:
            TypeAdapter(types[key]).validate_python(values[key], strict=True)
        except ValidationError as error:
            faults = dict.fromkeys(fault["msg"] for fault in error.errors() if fault["type"] != "none_required")
            raise InputError(f"{table}.{key} = {values[key]!r}: {' or '.join(faults)}") from error
        if isinstance(values[key], float) and not math.isfinite(values[key]):
            raise InputError(f"{table}.{key} = {values[key]}: give a finite number")


def _on_cuda(recipe: Recipe) -> bool:
    return torch.cuda.is_available() and not recipe.grpo.get("use_cpu", False)


def _check_dtype(recipe: Recipe) -> None:
    if "dtype" in model_arguments(recipe):
        raise InputError("grpo.model_init_kwargs.dtype: set `dtype` in the recipe instead")
    if dtype_of(recipe) != "float16":
        return
    if not recipe.lora:
        raise InputError(
            'dtype = "float16" without a [lora] table: an optimizer step is lost in float16 weights; add [lora], or '
            'set dtype = "bfloat16"'
        )
    if recipe.grpo.get("bf16"):
        raise InputError('grpo.bf16 = true with dtype = "float16": leave one of them out')


def _check_adapter(recipe: Recipe, config: LoraConfig, model: Any) -> None:
    """Raise `InputError` when the model, which is on the meta device, cannot get the adapter."""
    try:
        config.init_lora_weights = False  # there are none to begin from
        without_frozen(config, model)
        with torch.device("meta"):
            inject_adapter_in_model(config, model)
    except Exception as error:  # PEFT checks little: wrong values end in errors of all kinds
        named = ", ".join(f"lora.{key} = {value!r}" for key, value in recipe.lora.items())
        raise InputError(f"{named} does not fit the model {recipe.model}: {error}") from error
