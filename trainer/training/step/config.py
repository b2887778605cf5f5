"""The trainer's arguments: the fields of TRL's `GRPOConfig` that a training on traces uses, and its
own; model checks.

Sampling, data and distribution are decided elsewhere: TRL's fields for them must keep their
defaults. A combination whose gradient would depend on how a batch is cut into micro-batches is
refused (`_contradictions`).
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import Field as Limit
from pydantic import TypeAdapter, ValidationError
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from trl import GRPOConfig

from rolltap.addons.errors import InputError

_NotNegative = Annotated[float, Limit(ge=0)]
_Positive = Annotated[float, Limit(gt=0)]
_Share = Annotated[float, Limit(ge=0, le=1)]
_Count = Annotated[int, Limit(ge=1)]
_Loss = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
_Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(kw_only=True)
class TraceGRPOConfig(GRPOConfig):
    """Arguments of `TraceGRPOTrainer`. The type of the loaded weights decides the precision: there
    is no `bf16`.

    Raises `InputError`, which begins with the name of the field, for a field of `GRPOConfig` that
    has to keep its default, for a value that is not of its type or beyond its limits, for one that
    has no effect with another one, and for what TRL, transformers or torch refuse.
    """

    forward: Literal["packed", "padded"] = "packed"
    """Way of traces through the model. `packed`: the traces of a micro-batch are one row, in which
    a prefix that several share is computed once. `padded`: each trace is a row."""
    offload_checkpoints: bool = False
    """Keep the activations that a layer is computed again from in pinned host memory, where the
    model is on a GPU."""
    sharding: Literal["none", "full"] = "none"
    """Share of each process. `none`: each has the whole model. `full`: of weights, gradients and
    the optimizer's state, by FSDP2; layers are gathered as they run."""
    routing: Literal["own", "recorded"] = "own"
    """Experts that compute a token. `own`: the trainer's router chooses them. `recorded`: the
    engine has chosen them, so that trainer and engine compute the same. An online training records
    them; recorded runs need `rolltap_routing`. The engine needs `rolltap serve --routing`."""
    teacher_share: _Share = 0.0
    """Share of a teacher in place of the rewards, for traces with its scores: the advantages of
    sessions count (1 - share), and share * the reverse KL divergence from the teacher is added, by
    the trainer's weights as they are. A recipe with `teacher` has 1 by default."""

    # TRL's, with limits
    loss_type: _Loss = "dapo"
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
    """Correction of the difference between engine and trainer. Without it, the loss's ratio is to
    the engine's probability, and is clipped. With it, the ratio is to the trainer's own probability
    before the step, which takes one more forward pass, and the loss is weighted by trainer /
    engine, as TRL does it for vLLM."""
    vllm_importance_sampling_mode: _Correction = "token_truncate"
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
        """Check the fields as they were given, then let TRL derive its own, and try out what they
        make."""
        changed = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                changed[name] = value
        for name, value in changed.items():
            if name not in ACCEPTED:
                raise InputError(f"{name} = {value!r}: {why_refused(name)}; leave it out")
            check_type(name, value, _TYPES[name])
        for name, why in self._contradictions(changed):
            raise InputError(f"{name} = {getattr(self, name)!r} {why}")
        given = copy.copy(self)
        try:
            made = self._derive()
        except Exception as error:  # a missing package, an unknown name, a number out of range
            causes = [name for name in changed if given._made_without(name)]
            named = [f"{name} = {changed[name]!r}" for name in causes or changed]
            raise InputError(f"{', '.join(named)}: {error}") from error
        for names, setting in _MADE.items():
            for name in changed.keys() & set(names.split()):
                if given._made_without(name) == made:
                    raise InputError(f"{name} = {changed[name]!r} {given._no_effect(setting)}")

    @property
    def uses_entropy(self) -> bool:
        """True if entropies are in the loss."""
        return self.top_entropy_quantile < 1 or self.entropy_coef != 0 or self.use_adaptive_entropy

    @property
    def computes_all(self) -> bool:
        """True if tokens of sessions whose advantage is 0 have a gradient, or decide on others'."""
        return self.beta > 0 or self.teacher_share > 0 or self.uses_entropy

    def _derive(self) -> tuple[str, list[float]]:
        """Let TRL derive its own fields, and return what transformers makes of them when the first
        step begins.

        That is the optimizer with its arguments, and the factors of the learning rate. Raises
        whatever a library does.
        """
        # the weights decide the precision, and rows are chosen from seed and step
        self.bf16 = False
        self.ignore_data_skip = True
        self.router_aux_loss_coef = 0.0
        super().__post_init__()
        self.get_process_log_level()
        for reporter in get_reporting_integration_callbacks(self.report_to):
            reporter()
        layer = torch.nn.Linear(2, 2)
        kind, arguments = Trainer.get_optimizer_cls_and_kwargs(self, layer)
        parameters = arguments.pop("params", layer.parameters())
        made = f"{kind} {arguments}"
        steps = max(self.max_steps, _STEPS)
        schedule: Any = get_scheduler(
            self.lr_scheduler_type,
            kind(parameters, **arguments),
            self.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=self.lr_scheduler_kwargs,
        )
        factor = schedule.lr_lambdas[0]
        return made, [factor(step) for step in range(steps)]

    def _made_without(self, name: str) -> tuple[str, list[float]] | None:
        """Return what is made if a field has its default, or None if a library refuses that too."""
        other = copy.copy(self)
        setattr(other, name, _DEFAULTS[name])
        try:
            return other._derive()
        except Exception:
            return None

    def _no_effect(self, setting: str) -> str:
        value = getattr(self, setting)
        return f"has no effect with {setting} = {value!r}: leave one of them out"

    def _contradictions(self, changed: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield fields that cannot stay, each with the reason."""
        for names, setting, values in _NEEDS:
            if getattr(self, setting) not in values:
                for name in names.split():
                    if name in changed:
                        yield name, self._no_effect(setting)
        if not self.beta and "use_bias_correction_kl" in changed:
            yield "use_bias_correction_kl", self._no_effect("beta")
        if self.report_to == "none" and "trackio_space_id" in changed:
            yield "trackio_space_id", self._no_effect("report_to")
        if self.max_steps > 0 and "num_train_epochs" in changed:
            yield "num_train_epochs", self._no_effect("max_steps")
        if self.loss_type == "cispo" and (self.epsilon_high or 0) <= 1:
            # TRL takes epsilon in its place
            why = "where it is a token's largest weight: give more than 1"
            yield "epsilon_high", f"with loss_type = 'cispo', {why}"
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            why = "which divides by it: give a number of tokens"
            yield "max_completion_length", f"with loss_type = 'dr_grpo', {why}"
        mode = self.vllm_importance_sampling_mode
        if self.loss_type == "vespo" and mode.startswith("sequence"):
            why = "give 'token_truncate' or 'token_mask'"
            yield "vllm_importance_sampling_mode", f"with loss_type = 'vespo': {why}"
        if self.uses_entropy and self.gradient_accumulation_steps > 1:
            why = "whose quantile and mean are those of a micro-batch: give 1"
            yield "gradient_accumulation_steps", f"with entropies in the loss, {why}"
        if self.teacher_share and self.temperature != 1:
            why = "whose scores are at temperature 1: leave one of them out"
            yield "temperature", f"with a teacher, {why}"
        optimizer = str(self.optim)
        if "lomo" in optimizer or "layerwise" in optimizer:
            why = "before the gradients are checked: choose another optimizer"
            yield "optim", f"steps inside the backward pass, {why}"


def _default_values() -> dict[str, Any]:
    values = {}
    for field in fields(TraceGRPOConfig):
        values[field.name] = field.default
        if field.default_factory is not MISSING:
            values[field.name] = field.default_factory()
    return values


_DEFAULTS = _default_values()
_TYPES = get_type_hints(TraceGRPOConfig, include_extras=True)

_FOR_THE_REST = """
    output_dir max_steps num_train_epochs seed use_cpu shuffle_dataset trust_remote_code
    lr_scheduler_type lr_scheduler_kwargs optim optim_args adam_beta1 adam_beta2 adam_epsilon
    save_strategy save_steps save_total_limit logging_strategy logging_steps logging_first_step
    log_level disable_tqdm report_to run_name project trackio_space_id
"""
ACCEPTED = frozenset(TraceGRPOConfig.__annotations__).union(_FOR_THE_REST.split())
"""Fields that may be set: those above, and TRL's for model, optimizer, checkpoints and logging."""

_CLIPPED = ("dapo", "grpo", "dr_grpo", "bnpo", "luspo")
_CORRECTION = """
    vllm_importance_sampling_mode vllm_importance_sampling_clip_min
    vllm_importance_sampling_clip_max
"""
_ADAPTIVE = "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
_NEEDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("offload_checkpoints", "activation_checkpointing", (True,)),
    (_CORRECTION, "vllm_importance_sampling_correction", (True,)),
    (_ADAPTIVE, "use_adaptive_entropy", (True,)),
    ("max_completion_length", "loss_type", ("dr_grpo",)),
    ("epsilon delta", "loss_type", _CLIPPED),
    ("epsilon_high", "loss_type", (*_CLIPPED, "cispo")),
    ("importance_sampling_level", "loss_type", (*_CLIPPED, "cispo", "sapo")),
    ("sapo_temperature_neg sapo_temperature_pos", "loss_type", ("sapo",)),
    ("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "loss_type", ("vespo",)),
)
"""Fields that have an effect only with these values of another one."""

_MADE = {
    "optim_args adam_beta1 adam_beta2 adam_epsilon": "optim",
    "warmup_steps lr_scheduler_kwargs": "lr_scheduler_type",
}
"""Fields that have an effect only if another thing is made with them, and the field that chooses
what is made."""
_STEPS = 100
"""Steps at least of a schedule that is compared with another one: the first few may be the same."""

_REASONS = {
    "load the weights in bfloat16 (bf16) or float32: their type decides the precision": "bf16 fp16",
    "the traces are sampled already; the recorder's option rolltap_sampling has the parameters": (
        "generation_ top_p top_k min_p repetition_ chat_template_ cache_ use_cache use_vllm vllm_"
        " max_tool_ use_transformers transformers_ ds3_ num_generations"
    ),
    "micro-batches are made of the sessions of a step: set gradient_accumulation_steps": (
        "per_device_train_batch_size steps_per_generation"
    ),
    "the model computes as engines do, without dropout and without a balance of experts": (
        "disable_dropout router_aux_"
    ),
    "rewards and outcomes are recorded; a recipe has a table [rewards]": "mask_truncated reward_",
    "there is no evaluation set; a recipe's table [evaluation] has held-out tasks": (
        """
        do_eval do_predict eval_ per_device_eval batch_eval metric_ greater_ load_best
        prediction_loss include_for
        """
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
"""Reason -> beginnings of the names of the fields of `GRPOConfig` that must keep their defaults for
it."""


def why_refused(name: str) -> str:
    """Return why a field of `GRPOConfig` must keep its default."""
    for why, beginnings in _REASONS.items():
        if name.startswith(tuple(beginnings.split())):
            return why
    return "a training on recorded traces has no use for it"


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise `InputError` for a value that is not of the type `kind`, within its limits, or not
    finite."""
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            if fault["type"] != "none_required" and fault["msg"] not in faults:
                faults.append(fault["msg"])
        raise InputError(f"{name} = {value!r}: {' or '.join(faults)}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} = {value}: give a finite number")


_RANDOM = ("gaussian", "orthogonal", "mica")
CHANGE_BASE: Mapping[str, Callable[[Any], bool]] = {
    "bias": lambda bias: bias != "none",
    "init_lora_weights": lambda init: isinstance(init, str) and init not in _RANDOM,
}
"""Field of PEFT's `LoraConfig` -> true for values with which the model without its adapter is not
the base model."""


def check_model(model: Any, beta: float) -> None:
    """Raise `InputError` for a model that cannot be trained as it was sampled, or not with `beta`.

    These are dropout of an adapter, weights in float16, positions that depend on the longest row,
    an adapter of the output embeddings, and one without which the model is not the reference.
    """
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "lora_dropout", 0):
            what = f"lora.lora_dropout = {config.lora_dropout} has no effect"
            why = "the model computes as engines do, without dropout"
            raise InputError(f"{what}: {why}; remove it")
        for key, changes in CHANGE_BASE.items():
            value = getattr(config, key, "none")
            if beta and changes(value):
                what = f"beta = {beta!r}: with lora.{key} = {value!r}"
                why = "the model without its adapter is not the model that was given, the reference"
                raise InputError(f"{what}, {why}: leave one of them out")
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        what = "lora.target_modules has the output embeddings, whose adapter would not be trained"
        raise InputError(f"{what}: remove it")
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float16:
            what = f"{name} is in float16, whose range is too small"
            raise InputError(f"{what}: load the model in bfloat16 or float32")
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for table in (rope, *rope.values()):  # some models have a table for each type of layer
        if not isinstance(table, dict):
            continue
        kind = str(table.get("rope_type") or table.get("type"))
        if kind == "longrope" or "dynamic" in kind:
            raise InputError(
                f"rope_type = {kind!r}: the positions of a trace would depend on the longest trace "
                "beside it: set another one in the model's config.json, for trainer and engine, "
                'such as "default" or "yarn"'
            )
