"""The trainer's arguments: the fields of TRL's `GRPOConfig` that a training on traces uses, and its own; model checks.

Sampling, data and distribution are decided elsewhere: TRL's fields for them must keep their defaults. A combination
whose gradient would depend on how a batch is cut into micro-batches is refused (`_contradictions`).
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import Field as Limit
from pydantic import TypeAdapter, ValidationError
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from trl import GRPOConfig

from rolltap.addons.errors import InputError

_NotNegative = Annotated[float, Limit(ge=0)]
_Positive = Annotated[float, Limit(gt=0)]
_Share = Annotated[float, Limit(ge=0, le=1)]
_Count = Annotated[int, Limit(ge=1)]


@dataclass(kw_only=True)
class TraceGRPOConfig(GRPOConfig):
    """Arguments of `TraceGRPOTrainer`. The type of the loaded weights decides the precision: there is no `bf16`.

    Raises `InputError`, which begins with the name of the field, for a field of `GRPOConfig` that has to keep its
    default, for a value that is not of its type or beyond its limits, for one that has no effect with another one, and
    for what TRL, transformers or torch refuse.
    """

    forward: Literal["packed", "padded"] = "packed"
    """Way of traces through the model. `packed`: the traces of a micro-batch are one row, in which a prefix that
    several share is computed once. `padded`: each trace is a row."""
    offload_checkpoints: bool = False
    """Keep the activations that a layer is computed again from in pinned host memory, where the model is on a GPU."""
    sharding: Literal["none", "full"] = "none"
    """Share of each process. `none`: each has the whole model. `full`: of weights, gradients and the optimizer's state,
    by FSDP2; layers are gathered as they run."""
    routing: Literal["own", "recorded"] = "own"
    """Experts that compute a token. `own`: the trainer's router chooses them. `recorded`: the
    engine has chosen them, so that trainer and engine compute the same. An online training records
    them; recorded runs need `rolltap_routing`. The engine needs `rolltap serve --routing`."""
    teacher_share: _Share = 0.0
    """Share of a teacher in place of the rewards, for traces with its scores: the advantages of sessions count
    (1 - share), and share * the reverse KL divergence from the teacher is added, by the trainer's weights as they are.
    A recipe with `teacher` has 1 by default."""

    # TRL's, with limits
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    importance_sampling_level: Literal["token", "sequence"] = "token"
    epsilon: _NotNegative = 0.2
    epsilon_high: _NotNegative | None = None
    delta: _Positive | None = None
    beta: _NotNegative = 0.0
    use_bias_correction_kl: bool = True
    sapo_temperature_neg: _Positive = 1.05
    sapo_temperature_pos: _Positive = 1.0
    vespo_k_pos: _NotNegative = 2.0
    vespo_lambda_pos: _NotNegative = 3.0
    vespo_k_neg: _NotNegative = 3.0
    vespo_lambda_neg: _NotNegative = 2.0
    top_entropy_quantile: _Share = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: _NotNegative = 0.0
    entropy_coef_max: _NotNegative = 1.0
    entropy_coef_delta: _NotNegative = 0.005
    entropy_target: _NotNegative = 0.2
    off_policy_mask_threshold: _NotNegative | None = None
    vllm_importance_sampling_correction: bool = False
    """Correction of the difference between engine and trainer. Without it, the loss's ratio is to the engine's
    probability, and is clipped. With it, the ratio is to the trainer's own probability before the step, which takes one
    more forward pass, and the loss is weighted by trainer / engine, as TRL does it for vLLM."""
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    vllm_importance_sampling_clip_min: _Share | None = None
    vllm_importance_sampling_clip_max: Annotated[float, Limit(ge=1)] | None = 3.0
    scale_rewards: Literal[True, False, "group", "batch", "none"] = "group"
    temperature: _Positive = 1.0
    max_completion_length: _Count | None = None
    num_iterations: _Count = 1
    gradient_accumulation_steps: _Count = 1
    activation_checkpointing: bool = True
    model_init_kwargs: dict[str, Any] | None = None
    learning_rate: _Positive = 1e-6
    weight_decay: _NotNegative = 0.0
    max_grad_norm: _NotNegative = 1.0
    warmup_steps: _NotNegative = 0

    def __post_init__(self) -> None:
        """Check the fields as they were given, then let TRL derive its own, and try out what they make."""
        defaults = {}
        for field in fields(self):
            defaults[field.name] = field.default if field.default_factory is MISSING else field.default_factory()
        changed = {name: value for name, value in vars(self).items() if value != defaults.get(name, value)}
        for name, value in changed.items():
            if name not in ACCEPTED:
                raise InputError(f"{name} = {value!r}: {why_refused(name)}; leave it out")
            check_type(name, value, _TYPES[name])
        for name, why in self._contradictions(changed.keys()):
            raise InputError(f"{name} = {getattr(self, name)!r} {why}")
        given = copy.copy(self)
        try:
            made = self._derive()
        except Exception as error:  # of all kinds: a missing package, an unknown name, a number out of range
            named = dict(changed)
            for name in changed:
                without = copy.copy(given)
                setattr(without, name, defaults[name])
                with suppress(Exception):
                    without._derive()
                    named = {name: changed[name]}
            raise InputError(f"{', '.join(f'{name} = {value!r}' for name, value in named.items())}: {error}") from error
        for setting, names in _MADE.items():
            for name in changed.keys() & names:
                without = copy.copy(given)
                setattr(without, name, defaults[name])
                if without._derive() == made:
                    chosen = f"{setting} = {getattr(given, setting)!r}"
                    raise InputError(f"{name} = {changed[name]!r} has no effect with {chosen}: leave one of them out")

    @property
    def uses_entropy(self) -> bool:
        """True if entropies are in the loss."""
        return self.top_entropy_quantile < 1 or self.entropy_coef != 0 or self.use_adaptive_entropy

    @property
    def computes_all(self) -> bool:
        """True if tokens of sessions whose advantage is 0 have a gradient, or decide on others'."""
        return self.beta > 0 or self.teacher_share > 0 or self.uses_entropy

    def _derive(self) -> tuple[str, list[float]]:
        """Let TRL derive its own fields, and return what they make. Raises whatever a library does."""
        # the weights decide the precision, and rows are chosen from seed and step
        self.bf16 = False
        self.ignore_data_skip = True
        self.router_aux_loss_coef = 0.0
        super().__post_init__()
        return _try_out(self)

    def _contradictions(self, changed: Collection[str]) -> Iterator[tuple[str, str]]:
        for setting, values, names in _WITHOUT_EFFECT:
            value = getattr(self, setting)
            for name in names.split():
                if value in values and name in changed:
                    yield name, f"has no effect with {setting} = {value!r}: leave one of them out"
        if self.loss_type == "cispo" and not (self.epsilon_high or 0) > 1:
            # TRL takes epsilon in its place
            yield "epsilon_high", "with loss_type = 'cispo', where it is a token's largest weight: give more than 1"
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            yield "max_completion_length", "with loss_type = 'dr_grpo', which divides by it: give a number of tokens"
        if self.loss_type != "dr_grpo" and "max_completion_length" in changed:
            yield "max_completion_length", "has no effect without loss_type = 'dr_grpo': leave one of them out"
        if self.loss_type == "vespo" and self.vllm_importance_sampling_mode.startswith("sequence"):
            yield "vllm_importance_sampling_mode", "with loss_type = 'vespo': give 'token_truncate' or 'token_mask'"
        if self.uses_entropy and self.gradient_accumulation_steps > 1:
            yield (
                "gradient_accumulation_steps",
                "with entropies in the loss, whose quantile and mean are those of a micro-batch: give 1",
            )
        if self.teacher_share and self.temperature != 1:
            yield "temperature", "with a teacher, whose scores are at temperature 1: leave one of them out"
        if self.max_steps > 0 and "num_train_epochs" in changed:
            yield "num_train_epochs", f"has no effect with max_steps = {self.max_steps}: leave one of them out"
        if any(part in str(self.optim) for part in ("lomo", "layerwise")):
            yield "optim", "steps inside the backward pass, before the gradients are checked: choose another optimizer"


_TYPES = get_type_hints(TraceGRPOConfig, include_extras=True)

_FOR_THE_REST = """
    output_dir max_steps num_train_epochs seed use_cpu shuffle_dataset trust_remote_code lr_scheduler_type
    lr_scheduler_kwargs optim optim_args adam_beta1 adam_beta2 adam_epsilon disable_dropout save_strategy save_steps
    save_total_limit logging_strategy logging_steps logging_first_step log_level disable_tqdm report_to run_name project
    trackio_space_id
"""
ACCEPTED = frozenset(TraceGRPOConfig.__annotations__).union(_FOR_THE_REST.split())
"""Fields that may be set: those above, and TRL's for model, optimizer, checkpoints and logging."""

_CORRECTION = "vllm_importance_sampling_mode vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max"
_ADAPTIVE = "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
_WITHOUT_EFFECT: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("activation_checkpointing", (False,), "offload_checkpoints"),
    ("vllm_importance_sampling_correction", (False,), _CORRECTION),
    ("use_adaptive_entropy", (False,), _ADAPTIVE),
    ("loss_type", ("cispo",), "epsilon delta"),
    ("loss_type", ("sapo", "vespo"), "epsilon epsilon_high delta"),
    ("loss_type", ("vespo",), "importance_sampling_level"),
    ("loss_type", ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "luspo", "vespo"), "sapo_temperature_neg"),
    ("loss_type", ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "luspo", "vespo"), "sapo_temperature_pos"),
    (
        "loss_type",
        ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "luspo", "sapo"),
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
    ),
    ("beta", (0,), "use_bias_correction_kl"),
    ("report_to", ("none",), "trackio_space_id"),
)
"""Field and values -> fields that then change nothing."""

_MADE = {
    "optim": {"optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"},
    "lr_scheduler_type": {"warmup_steps", "lr_scheduler_kwargs"},
}
"""Field -> fields that have an effect only if what is made of it is another thing with them."""
_STEPS = 100
"""Steps at least of a schedule that is compared with another one: the first few may be the same."""

_REASONS = {
    "load the weights in bfloat16 (bf16) or float32: their type decides the precision": "bf16 fp16",
    "the traces are sampled already; the recorder's option rolltap_sampling has the parameters": (
        "generation_ top_p top_k min_p repetition_ chat_template_ cache_ use_cache use_vllm vllm_ max_tool_ "
        "use_transformers transformers_ ds3_ num_generations"
    ),
    "micro-batches are made of the sessions of a step: set gradient_accumulation_steps": (
        "per_device_train_batch_size steps_per_generation"
    ),
    "the model computes as engines do, which balance nothing": "router_aux_",
    "rewards and outcomes are recorded; a recipe's [rewards] says which sessions count": "mask_truncated reward_",
    "there is no evaluation set; a recipe's table [evaluation] has held-out tasks": (
        "do_eval do_predict eval_ per_device_eval batch_eval metric_ greater_ load_best prediction_loss include_for"
    ),
    'processes average their gradients; sharding = "full" shards the weights': (
        "fsdp deepspeed parallelism_ accelerator_ ddp_ average_tokens"
    ),
    "the model must have the log-probabilities that the engine sampled with": (
        "neftune_ label_smoothing torch_compile use_liger liger_ cast_lm_head tf32"
    ),
    "use activation_checkpointing": "gradient_checkpointing",
    "all nodes save into one folder": "save_on_each_node",
    "push the finished model: hf upload REPO RUN/model": "push_to_hub hub_",
    "the first process alone logs": "log_level_replica log_on_each_node",
}
"""Reason -> beginnings of the names of the fields of `GRPOConfig` that must keep their defaults for it."""


def why_refused(name: str) -> str:
    """Return why a field of `GRPOConfig` must keep its default."""
    for why, beginnings in _REASONS.items():
        if name.startswith(tuple(beginnings.split())):
            return why
    return "a training on recorded traces has no use for it"


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise `InputError` for a value that is not of the type `kind`, within its limits, or not finite."""
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        faults = dict.fromkeys(fault["msg"] for fault in error.errors() if fault["type"] != "none_required")
        raise InputError(f"{name} = {value!r}: {' or '.join(faults)}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} = {value}: give a finite number")


def _try_out(args: TrainingArguments) -> tuple[str, list[float]]:
    """Make what transformers would make of `args` when the first step begins, and sessions have run already.

    Returns the optimizer with its arguments, and the factors of the learning rate.
    """
    args.get_process_log_level()
    for reporter in get_reporting_integration_callbacks(args.report_to):
        reporter()
    layer = torch.nn.Linear(2, 2)
    steps = max(args.max_steps, _STEPS)
    kind, given = Trainer.get_optimizer_cls_and_kwargs(args, layer)
    parameters = given.pop("params", layer.parameters())
    made = f"{kind} {given}"
    optimizer: Any = kind(parameters, **given)
    warmup = args.get_warmup_steps(steps)
    schedule: Any = get_scheduler(
        args.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=args.lr_scheduler_kwargs
    )
    return made, [schedule.lr_lambdas[0](step) for step in range(steps)]


CHANGE_BASE: Mapping[str, Callable[[Any], bool]] = {
    "bias": lambda bias: bias != "none",
    "init_lora_weights": lambda init: isinstance(init, str) and init not in ("gaussian", "orthogonal", "mica"),
}
"""Field of PEFT's `LoraConfig` -> true for values with which the model without its adapter is not the base model."""


def check_model(model: Any, beta: float) -> None:
    """Raise `InputError` for a model that cannot be trained as it was sampled, or not with `beta`.

    These are dropout, weights in float16, positions that depend on the longest row, an adapter
    of the output embeddings, and one without which the model is not the reference.
    """
    for config in getattr(model, "peft_config", {}).values():
        for key, changes in CHANGE_BASE.items():
            value = getattr(config, key, "none")
            if beta and changes(value):
                what = f"beta = {beta!r}: with lora.{key} = {value!r}, the model without its adapter"
                raise InputError(f"{what} is not the model that was given, the reference: leave one of them out")
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise InputError("lora.target_modules has the output embeddings, whose adapter would not be trained: remove it")
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0)
        if isinstance(rate, float) and rate > 0:
            raise InputError(
                f"{name} drops {rate:.0%} of its values: the trainer's log-probabilities would not be those of the "
                "weights; set lora_dropout and the model's dropout to 0, or disable_dropout=True"
            )
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float16:
            raise InputError(f"{name} is in float16, whose range is too small: load the model in bfloat16 or float32")
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for one in (rope, *rope.values()):  # some models have a table for each type of layer
        kind = str(one.get("rope_type") or one.get("type")) if isinstance(one, dict) else ""
        if kind == "longrope" or "dynamic" in kind:
            raise InputError(
                f"rope_type = {kind!r}: the positions of a trace would depend on the longest trace beside it: set "
                'another one in the model\'s config.json, for trainer and engine, such as "default" or "yarn"'
            )
