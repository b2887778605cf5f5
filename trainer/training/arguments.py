"""A recipe's arguments for TRL, PEFT and the recorder, and its checkpoints. All is checked before anything starts.

Transformers checks the names of a training's arguments when they are made, and the rest (log level, optimizer,
schedule) when the first step begins and sessions have run already: a trial makes these here.
"""

import difflib
import inspect
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import torch
from peft import LoraConfig, inject_adapter_in_model
from pydantic import TypeAdapter, ValidationError
from transformers import Trainer, TrainingArguments, get_scheduler, integrations

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import Dtype, frozen_modules, meta_policy
from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from rolltap.trainer.training.recipe import Machine, Recipe

LARGEST_RANK = 512
"""Of an adapter that vLLM loads."""

_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of `init_lora_weights` that leave the base weights as they are. The others change those of the trainer."""
_ABSENT = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_bdlora",
    "use_qalora",
)
"""Fields of PEFT's `LoraConfig` that vLLM does not know or refuses. Source: vLLM 0.32, `PEFTHelper`."""


def require_servable(lora: Mapping[str, Any]) -> None:
    """Raise `InputError` for arguments of `LoraConfig` whose adapter vLLM does not serve. Their types are right."""
    fixes = {key: "remove it" for key in _ABSENT if lora.get(key)}
    if lora.get("bias", "none") != "none":
        fixes["bias"] = 'set it to "none"'
    init = lora.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _INITS:
        fixes["init_lora_weights"] = f"leave it out, choose one of {', '.join(_INITS)}"
    if lora.get("r", 8) > LARGEST_RANK:
        fixes["r"] = f"set {LARGEST_RANK} or less"
    if any(rank > LARGEST_RANK for rank in (lora.get("rank_pattern") or {}).values()):
        fixes["rank_pattern"] = f"set {LARGEST_RANK} or less"
    for key, fix in fixes.items():
        raise InputError(
            f'vLLM does not serve an adapter with lora.{key} = {lora[key]!r}: {fix}, or set publish = "checkpoint"'
        )


CHECKPOINTS = "checkpoints"
"""Folder in the run with the trainer's checkpoints."""


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint, or None."""
    return max(filter(_whole, folder.glob("checkpoint-*")), key=checkpoint_step, default=None)


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints that a killed training left incomplete. The trainer would write into them."""
    for checkpoint in folder.glob("checkpoint-*"):
        if not _whole(checkpoint):
            shutil.rmtree(checkpoint)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def _whole(checkpoint: Path) -> bool:
    # transformers writes trainer_state.json after all other files, and no beginning of a JSON object is JSON.
    # Source: transformers 5.23, Trainer._save_checkpoint. It removes old checkpoints only after that.
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return True


_EXTRAS = ("tensorboard", "trackio", "wandb")
"""Reporters that are extras of this package."""


def check_report_to(value: Any) -> None:
    """Raise `InputError` for a `report_to` with a reporter that does not exist or is not installed.

    `value` is a name, a list of names, `none`, or `all` for the reporters that are installed.
    """
    names = [value] if isinstance(value, str) else value
    if names in (["none"], ["all"]):
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"grpo.report_to = {value!r}: give a name or a list of names")
    for name in names:
        if name not in integrations.INTEGRATION_TO_CALLBACK:
            choices = ", ".join(_EXTRAS)
            raise InputError(
                f"grpo.report_to = {value!r}: there is no reporter {name!r}; choose from {choices}, or 'none' alone"
            )
        if name not in integrations.get_available_reporting_integrations():
            what = "it is not installed or not configured; transformers' documentation of callbacks says what it needs"
            what = f"it is not installed: pip install '.[{name}]'" if name in _EXTRAS else what
            raise InputError(f"grpo.report_to = {name!r}: {what}")


_OPTIMIZER = ("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")


def check_made(args: TrainingArguments) -> None:
    """Make the log level, the optimizer and the schedule of `args` for a model of one layer.

    Raises `InputError` for what transformers and torch refuse, with the arguments that it was made of.
    """
    layer = torch.nn.Linear(2, 2)

    def optimizer() -> torch.optim.Optimizer:
        kind, given = Trainer.get_optimizer_cls_and_kwargs(args, layer)
        made: torch.optim.Optimizer = kind(given.pop("params", layer.parameters()), **given)
        return made

    _try(args, ("log_level",), args.get_process_log_level)
    optimizer_made = _try(args, _OPTIMIZER, optimizer)
    steps: Mapping[str, Any] = {
        "num_warmup_steps": args.get_warmup_steps(args.max_steps),
        "num_training_steps": args.max_steps,
        "scheduler_specific_kwargs": args.lr_scheduler_kwargs,
    }
    _try(args, _SCHEDULE, lambda: get_scheduler(args.lr_scheduler_type, optimizer=optimizer_made, **steps))


def _try(args: TrainingArguments, names: tuple[str, ...], make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # of all kinds: a missing package, an unknown name, a number out of range
        values = {name: getattr(args, name) for name in names}
        given = ", ".join(f"{name} = {getattr(value, 'value', value)!r}" for name, value in values.items())
        raise InputError(f"the recipe's [grpo] table cannot be used ({given}): {error}") from error


_SET_HERE = ("output_dir", "max_steps", "seed", "save_strategy", "save_steps", "ddp_backend", "ddp_timeout")
SAVE_TOTAL_LIMIT = 2
"""Checkpoints that are kept, if the recipe has no `grpo.save_total_limit`."""
_SCALES = (True, False, "group", "batch", "none")
"""Values of TRL's `scale_rewards`: more types than it declares."""


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
        add_adapter(recipe, config, model)


def require_machine(machine: Machine | None, processes: int, urls: int | None = None) -> None:
    """Raise `InputError` for other numbers of processes and engine URLs than a recipe's table [machine] gives.

    `urls` None is a training without engines.
    """
    given = {} if machine is None else machine.model_dump(exclude_unset=True)
    if (declared := given.get("processes", processes)) != processes:
        raise InputError(
            f"machine.processes is {declared}, but the number of training processes is {processes}: start them with "
            f"`torchrun --nproc-per-node {declared} -m rolltap train ...`, or change the recipe"
        )
    if urls is not None and (engines := given.get("engines", urls)) != urls:
        raise InputError(
            f"machine.engines is {engines}, but the number of engine URLs is {urls}: give --engine as many, separated "
            "by commas, or change the recipe"
        )


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
            max_steps=recipe.steps * recipe.iterations,
            seed=seed,
            save_strategy="steps",
            save_steps=recipe.save_steps * recipe.iterations,
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
    for key in values.keys() & types.keys() - {"scale_rewards"}:
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


def add_adapter(recipe: Recipe, config: LoraConfig, model: Any) -> None:
    """Add an adapter without weights to a model on the meta device. Raises `InputError` when it does not fit."""
    try:
        config.init_lora_weights = False  # there are none to begin from
        without_frozen(config, model)
        with torch.device("meta"):
            inject_adapter_in_model(config, model)
    except Exception as error:  # PEFT checks little: wrong values end in errors of all kinds
        named = ", ".join(f"lora.{key} = {value!r}" for key, value in recipe.lora.items())
        raise InputError(f"{named} does not fit the model {recipe.model}: {error}") from error
