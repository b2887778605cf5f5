"""A recipe's arguments for TRL, PEFT and the recorder, and its checkpoints. All is checked before
anything starts."""

import difflib
import inspect
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch
from peft import LoraConfig, inject_adapter_in_model
from pydantic import TypeAdapter, ValidationError
from transformers.trainer_utils import rotate_checkpoints

from rolltap.addons.errors import InputError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.trainer.models.loading import Dtype, frozen_modules, meta_policy
from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.training.recipe import CHECKPOINTS, Machine, Recipe, checkpoint_step
from rolltap.trainer.training.step.config import (
    ACCEPTED,
    CHANGE_BASE,
    TraceGRPOConfig,
    check_model,
    check_type,
    why_refused,
)
from rolltap.trainer.training.step.routing import Replay

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for `--max-lora-rank`: the last is the largest of an adapter. vLLM 0.32.
"""
_ABSENT = """
    use_dora lora_bias modules_to_save trainable_token_indices layer_replication
    alora_invocation_tokens use_bdlora use_qalora
"""
"""Fields of PEFT's `LoraConfig` that vLLM does not know or refuses. Source: vLLM 0.32,
`PEFTHelper`."""


def _is_too_high(rank: int) -> bool:
    return rank > LORA_RANKS[-1]


def _has_too_high(ranks: Mapping[str, int] | None) -> bool:
    return any(map(_is_too_high, (ranks or {}).values()))


_UNSERVED: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_ABSENT.split(), bool),
    **CHANGE_BASE,
    "r": _is_too_high,
    "rank_pattern": _has_too_high,
}


def require_servable(lora: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments of `LoraConfig` whose adapter vLLM does not serve. Their
    types are right."""
    for key, value in lora.items():
        if key in _UNSERVED and _UNSERVED[key](value):
            what = f"vLLM does not serve an adapter with lora.{key} = {value!r}"
            raise InputError(f'{what}: leave it out, or set publish = "checkpoint"')


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, or None."""
    return max(filter(_whole, folder.glob("checkpoint-*")), key=checkpoint_step, default=None)


def remove_incomplete(folder: Path, limit: int | None = None) -> Path | None:
    """Remove checkpoints that a killed training left incomplete, and the oldest ones beyond the
    limit, of which it may have removed a part. Return the newest one, or None."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not _whole(checkpoint):
            shutil.rmtree(checkpoint)
    rotate_checkpoints(str(folder), limit)
    return last_checkpoint(folder)


def _whole(checkpoint: Path) -> bool:
    # `Checkpoints` writes trainer_state.json after all other files, and no beginning of a JSON
    # object is JSON
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


SAVE_TOTAL_LIMIT = 2
"""Checkpoints that are kept, if the recipe has no `grpo.save_total_limit`."""


def check_arguments(
    recipe: Recipe,
    processes: int = 1,
    engines: int | None = None,
    nodes: int | None = None,
) -> None:
    """Raise `InputError` for a model folder, and values of [grpo] and [lora], that no training can
    start with, and for other numbers than the table [machine] gives. A number is None where there
    are no engines, or no start."""
    _check_machine(
        recipe.machine or Machine(), {"nodes": nodes, "processes": processes, "engines": engines}
    )
    args = training_arguments(recipe, Path("run"), 0)
    model = meta_policy(recipe.model, dtype_of(recipe), **model_arguments(recipe))
    add_adapter(recipe, model)
    if recipe.publish == "lora":
        require_servable(recipe.lora)
    if recipe.replays_routing:
        Replay().attach(model)
    check_model(model, args.beta)
    if recipe.publish == "lora" and merge_again(model):
        raise InputError(
            "vLLM does not serve an adapter on parameters, such as the experts of a layer: set"
            " lora.target_modules to linear layers, such as those of attention, or publish ="
            ' "checkpoint"'
        )


def _check_machine(machine: Machine, numbers: Mapping[str, int | None]) -> None:
    each = machine.processes // machine.nodes
    uneven = machine.processes % machine.nodes
    if uneven:
        what = f"processes = {machine.processes} is no multiple of nodes = {machine.nodes}"
        raise InputError(f"{what}: change [machine]")
    for key, number in numbers.items():
        given = getattr(machine, key)
        if key not in machine.model_fields_set or number in (None, given):
            continue
        launcher = f"torchrun --nnodes {machine.nodes} --nproc-per-node {each}"
        fix = f"start with `{launcher} -m rolltap train ...`"
        if key == "engines":
            fix = "give --engine as many URLs, separated by commas"
        what = f"machine.{key} is {given}, but there are {number}"
        raise InputError(f"{what}: {fix}, or change the recipe")


def dtype_of(recipe: Recipe) -> Dtype:
    """Return the type of the weights: the recipe's, or bfloat16 on a CUDA GPU and float32 without
    one."""
    if recipe.dtype is not None:
        return recipe.dtype
    if torch.cuda.is_available() and not recipe.grpo.get("use_cpu", False):
        return "bfloat16"
    return "float32"


def require_rows(recipe: Recipe, rows: int, what: str) -> None:
    """Raise `InputError` for fewer rows than a step needs. `what` says how many there are."""
    if recipe.groups_per_step > rows:
        raise InputError(f"groups_per_step is {recipe.groups_per_step}, but {what}")


_LENGTHS = (
    "the longest reply is max_tokens of recorder.rolltap_sampling, the longest trace the recipe's"
    " max_tokens, and a session's tokens are budget.tokens"
)
_ELSEWHERE = {
    **dict.fromkeys(["max_steps", "num_train_epochs"], "write the recipe's key steps"),
    **dict.fromkeys(["save_steps", "save_strategy"], "write the recipe's key save_steps"),
    **dict.fromkeys(["num_generations", "num_generations_eval"], "write the recipe's key sessions"),
    **dict.fromkeys(
        ["generation_batch_size", "steps_per_generation"], "write the recipe's key groups_per_step"
    ),
    **dict.fromkeys(
        ["per_device_train_batch_size", "per_device_eval_batch_size"],
        "write the recipe's keys groups_per_step and sessions, and"
        " grpo.gradient_accumulation_steps",
    ),
    **dict.fromkeys(["bf16", "fp16"], "write the recipe's key dtype: bfloat16 (bf16) or float32"),
    "output_dir": "give --out",
    "seed": "give --seed",
    "max_prompt_length": _LENGTHS,
}
"""Field of `GRPOConfig` that does nothing in a recipe -> what does it here."""


def _require_used(grpo: Mapping[str, Any]) -> None:
    """Raise `InputError` for a key of [grpo] that would do nothing, also when its value is TRL's
    default."""
    for key, value in grpo.items():
        what = f"grpo.{key} = {value!r}"
        if key in _ELSEWHERE:
            raise InputError(f"{what} does nothing here: {_ELSEWHERE[key]}")
        if key == "max_completion_length" and grpo.get("loss_type") != "dr_grpo":
            raise InputError(f"{what} has no effect without grpo.loss_type = 'dr_grpo': {_LENGTHS}")
    _check_names("grpo", TraceGRPOConfig, grpo)
    for key in grpo:
        if key not in ACCEPTED:
            raise InputError(f"grpo.{key} = {grpo[key]!r}: {why_refused(key)}; leave it out")


def training_arguments(recipe: Recipe, run: Path, seed: int) -> TraceGRPOConfig:
    """Return TRL's arguments: the recipe's, and those that follow from it. Raises `InputError` for
    what TRL refuses."""
    set_here: dict[str, Any] = {
        "output_dir": str(run / CHECKPOINTS),
        "max_steps": recipe.steps * recipe.iterations,
        "seed": seed,
        "save_strategy": "steps",
        "save_steps": recipe.save_steps * recipe.iterations,
    }
    _require_used(recipe.grpo)
    defaults: dict[str, Any] = {
        "use_cpu": not torch.cuda.is_available(),
        "run_name": run.name,
        "project": "rolltap",
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_total_limit": SAVE_TOTAL_LIMIT,
        "teacher_share": float(recipe.teacher is not None),
    }
    try:
        args = TraceGRPOConfig(**defaults | recipe.grpo | set_here)
    except InputError as error:
        raise InputError(f"grpo.{error}") from error
    args.model_init_kwargs = None  # they are for the model, which TRL gets as it is
    return args


def model_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return further arguments of `from_pretrained`: those of `grpo.model_init_kwargs`."""
    return dict(recipe.grpo.get("model_init_kwargs") or {})


def lora_config(recipe: Recipe, model: Any) -> LoraConfig | None:
    """Return the configuration of the recipe's adapter on the text part of `model`, or None. Raises
    `InputError`."""
    if not recipe.lora:
        return None
    _check_names("lora", LoraConfig, recipe.lora)
    types = get_type_hints(LoraConfig)
    for key, value in recipe.lora.items():
        if key == "init_lora_weights" and isinstance(value, str):
            value = re.sub(
                r"pissa_niter_\d+$", "pissa", value
            )  # PEFT reads any number of iterations
            if value in ("corda", "eva", "lora_ga"):
                what = f"lora.{key} = {value!r} needs a pass over data before the training"
                raise InputError(f"{what}: choose another")
        check_type(f"lora.{key}", value, types[key])
    if recipe.lora.get("alora_invocation_tokens"):
        what = "such an adapter cannot be merged into the model"
        raise InputError(f"lora.alora_invocation_tokens: {what}: remove it")
    try:
        config = LoraConfig(**recipe.lora)
    except (TypeError, ValueError, ImportError) as error:
        raise InputError(f"the recipe's [lora] table: {error}") from error
    frozen = frozen_modules(model)
    excluded = config.exclude_modules or []
    if frozen and isinstance(excluded, str):
        config.exclude_modules = "|".join([excluded, *map(re.escape, frozen)])
    elif frozen:
        config.exclude_modules = [*excluded, *frozen]
    return config


def sampling(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's sampling parameters, with the trainer's temperature, and all others
    neutral.

    Raises `InputError` if two temperatures differ, and for parameters that would bias the loss.
    """
    text = recipe.recorder.get("rolltap_sampling", "{}")
    try:
        own = TypeAdapter(dict[str, Any]).validate_json(str(text))
    except ValidationError as error:
        raise InputError(
            f"recorder.rolltap_sampling = {text!r}: give one JSON object as text"
        ) from error
    temperature = recipe.grpo.get("temperature", 1.0)
    require_unbiased("recorder.rolltap_sampling samples", own, temperature, "remove it")
    return {**NEUTRAL_SAMPLING, **own, "temperature": temperature}


def require_unbiased(
    what: str,
    sampled: Mapping[str, Any],
    temperature: float,
    fix: str,
) -> None:
    """Raise `InputError` for parameters with which tokens are not independent samples of the policy
    at a temperature.

    `what` is the beginning of the message, up to the verb.
    """
    given = sampled.get("temperature", temperature)
    if given != temperature:
        raise InputError(
            f"{what} at temperature {given!r}, but grpo.temperature is {temperature!r}: the trainer"
            " would divide the logits by another number than the engine did"
        )
    neutral = {**NEUTRAL_SAMPLING, "seed": None, "temperature": temperature}
    for key, usual in neutral.items():
        value = sampled.get(key, usual)
        if value != usual and (key, value) != ("top_k", -1):  # which is vLLM's as well
            raise InputError(
                f"{what} with {key} = {value!r}: the loss would be biased, because tokens are not"
                f" sampled by the probabilities that are trained; {fix}"
            )


def _check_names(table: str, kind: type, values: Mapping[str, Any]) -> None:
    """Raise `InputError` for a key that is no argument of `kind`, with the argument that resembles
    it."""
    known = list(inspect.signature(kind).parameters)
    for key in sorted(values.keys() - known):
        near = difflib.get_close_matches(key, known, 1)
        fix = "correct or remove it"
        if near:
            fix = f"write {table}.{near[0]}, or remove it"
        what = f"{table}.{key} = {values[key]!r}"
        raise InputError(f"{what} is no argument of {kind.__name__}: {fix}")


def add_adapter(recipe: Recipe, model: Any) -> None:
    """Add the recipe's adapter, if any, to a model on the meta device. Raises `InputError` if it
    does not fit."""
    if not (config := lora_config(recipe, model)):
        return
    init, config.init_lora_weights = (
        config.init_lora_weights,
        False,
    )  # there are no weights to begin from
    try:
        with torch.device("meta"):
            inject_adapter_in_model(config, model)
        config.init_lora_weights = init
    except Exception as error:  # PEFT checks little: wrong values end in errors of all kinds
        named = ", ".join(f"lora.{key} = {value!r}" for key, value in recipe.lora.items())
        raise InputError(f"{named} does not fit the model {recipe.model}: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # as PEFT does for a model that it wraps
