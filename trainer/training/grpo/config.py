"""The trainer's arguments: the fields of TRL's `GRPOConfig` that keep the gradient correct, and its own; model checks.

The gradient of a batch must not depend on how sessions are cut into traces, nor on how traces are spread over
micro-batches and processes. Fields that would break this, and those that a training on traces does not use, must keep
their defaults.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import torch
from accelerate import Accelerator, DistributedType
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import Field as Limit
from pydantic import TypeAdapter, ValidationError
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from trl import GRPOConfig

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.training.forward.forest import Row

LEAST_TOKENS = 16
"""Smallest `tokens_per_segment`: kernels of linear attention have no gradient for a single token after a state."""

_NotNegative = Annotated[float, Limit(ge=0)]
_Positive = Annotated[float, Limit(gt=0)]
_Count = Annotated[int, Limit(ge=1)]


@dataclass(kw_only=True)
class TraceGRPOConfig(GRPOConfig):
    """Arguments of `TraceGRPOTrainer`. The type of the loaded weights decides the precision: there is no `bf16`.

    Raises `InputError`, which begins with the name of the field, for a field of `GRPOConfig` that has to keep its
    default, for a value that is not of its type or beyond its limits, for one that has no effect with another one, and
    for what TRL, transformers or torch refuse.
    """

    forward: Literal["segments", "padded"] = "segments"
    """Way of traces through the model. `segments`: a prefix that traces of a step share is computed once, and traces of
    any length run in pieces. `padded`: each trace is a row, in one piece."""
    tokens_per_segment: Annotated[int, Limit(ge=LEAST_TOKENS)] | None = None
    """Maximum number of tokens of one forward pass of segments. By default planned from
    `memory_gib`, and 1024 on a CPU or with `activation_checkpointing = false`."""
    memory_gib: _Positive | None = None
    """Memory for states, activations and logits, in GiB. By default the free memory of a CUDA device."""
    offload_states: bool = False
    """Keep the states of segments in pinned host memory between their uses."""
    sharding: Literal["optimizer", "full"] = "optimizer"
    """Share of each process. `optimizer`: of the optimizer's state, and of the float32 copies of
    16-bit weights. `full`: also of the weights and gradients of all layers, for models that do not
    fit one GPU; layers are gathered as they run."""
    normalise: Literal["tokens", "sessions", "constant"] = "tokens"
    """Weights of sessions in the loss. `tokens`: each trained token weighs the same. `sessions`:
    each session weighs the same, and its tokens share its weight. `constant`: each token weighs 1 /
    (sessions * `max_completion_length`), as in Dr. GRPO."""
    mismatch: Literal["clip", "truncate", "mask"] = "clip"
    """Correction of the difference between engine and trainer. `clip`: the loss's ratio is to the engine's probability,
    and is clipped. `truncate`, `mask`: the ratio is to the trainer's own probability before the step, which takes one
    more forward pass. The token has the weight trainer / engine, limited to `mismatch_min` and `mismatch_max`
    (`truncate`), or 0 outside of them (`mask`)."""
    mismatch_min: Annotated[float, Limit(ge=0, le=1)] = 0.5
    """Lower limit of the weight trainer / engine."""
    mismatch_max: Annotated[float, Limit(ge=1)] = 2.0
    """Upper limit of the weight trainer / engine."""
    routing: Literal["own", "recorded"] = "own"
    """Experts that compute a token. `own`: the trainer's router chooses them. `recorded`: the
    engine has chosen them, so that trainer and engine compute the same. An online training records
    them; recorded runs need `rolltap_routing`. The engine needs `rolltap serve --routing`."""
    teacher_share: Annotated[float, Limit(ge=0, le=1)] = 0.0
    """Share of a teacher in the advantage of a token, for traces with its scores: (1 - share) *
    advantage of the session + share * (log p_teacher - log p_trainer), by the trainer's weights as
    they are. A recipe with `teacher` has 1 by default."""

    # TRL's, with limits. These losses are a sum over tokens, divided by the number of trained tokens of the batch. The
    # others average over rows or a micro-batch, or weigh rows: their gradient depends on how sessions are cut
    loss_type: Literal["dapo", "cispo"] = "dapo"
    epsilon: _NotNegative = 0.2
    epsilon_high: _NotNegative | None = None
    delta: _Positive | None = None
    beta: _NotNegative = 0.0
    use_bias_correction_kl: bool = True
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
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
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

    def _derive(self) -> tuple[str, list[float]]:
        """Let TRL derive its own fields, and return what they make. Raises whatever a library does."""
        # the weights decide the precision, and rows are chosen from seed and step
        self.bf16, self.ignore_data_skip, self.router_aux_loss_coef = False, True, 0.0
        super().__post_init__()
        return _try_out(self)

    def _contradictions(self, changed: Any) -> Iterator[tuple[str, str]]:
        for setting, value, names in _WITHOUT_EFFECT:
            for name in names.split():
                if getattr(self, setting) == value and name in changed:
                    yield name, f"has no effect with {setting} = {value!r}: leave one of them out"
        if self.loss_type == "cispo" and not (self.epsilon_high or 0) > 1:
            # TRL takes epsilon in its place
            yield "epsilon_high", "with loss_type = 'cispo', where it is a token's largest weight: give more than 1"
        if self.sharding == "full" and not self.activation_checkpointing:
            yield "sharding", "with activation_checkpointing = False: leave one of them out"
        if self.normalise == "constant" and self.max_completion_length is None:
            yield "max_completion_length", "with normalise = 'constant', which divides by it: give a number of tokens"
        if self.teacher_share and self.temperature != 1:
            yield "temperature", "with a teacher, whose scores are at temperature 1: leave one of them out"
        if self.max_steps > 0 and "num_train_epochs" in changed:
            yield "num_train_epochs", f"has no effect with max_steps = {self.max_steps}: leave one of them out"
        if any(part in str(self.optim) for part in ("lomo", "layerwise")):
            # it would change weights between segments
            yield "optim", "steps inside the backward pass: choose another optimizer"

    @property
    def place_model_on_device(self) -> bool | None:
        """See transformers. Sharded weights are moved to the device one layer at a time."""
        return False if self.sharding == "full" else None


_TYPES = get_type_hints(TraceGRPOConfig, include_extras=True)

_FOR_THE_REST = """
    output_dir max_steps num_train_epochs seed use_cpu shuffle_dataset trust_remote_code lr_scheduler_type
    lr_scheduler_kwargs optim optim_args adam_beta1 adam_beta2 adam_epsilon disable_dropout save_strategy save_steps
    save_total_limit logging_strategy logging_steps logging_first_step log_level disable_tqdm report_to run_name project
    trackio_space_id
"""
ACCEPTED = frozenset(TraceGRPOConfig.__annotations__).union(_FOR_THE_REST.split())
"""Fields that may be set: those above, and TRL's for model, optimizer, checkpoints and logging."""

_WITHOUT_EFFECT = (
    ("forward", "padded", "tokens_per_segment memory_gib offload_states"),
    ("activation_checkpointing", False, "memory_gib offload_states"),  # keeps all activations
    ("mismatch", "clip", "mismatch_min mismatch_max"),
    ("loss_type", "cispo", "epsilon delta"),
    ("beta", 0, "use_bias_correction_kl"),
    ("report_to", "none", "trackio_space_id"),
    ("normalise", "tokens", "max_completion_length"),
    ("normalise", "sessions", "max_completion_length"),
)
"""Field and value -> fields that then change nothing."""

_MADE = {
    "optim": {"optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"},
    "lr_scheduler_type": {"warmup_steps", "lr_scheduler_kwargs"},
}
"""Field -> fields that have an effect only if what is made of it is another thing with them."""
_STEPS = 100
"""Steps at least of a schedule that is compared with another one: the first few may be the same."""

_REASONS = {
    "load the weights in bfloat16 (bf16) or float32: their type decides the precision": "bf16 fp16",
    "set mismatch, mismatch_min and mismatch_max": "vllm_importance_",
    "the traces are sampled already; the recorder's option rolltap_sampling has the parameters": (
        "generation_ top_p top_k min_p repetition_ chat_template_ cache_ use_cache use_vllm vllm_ max_tool_ "
        "use_transformers transformers_ ds3_ num_generations"
    ),
    "the gradient would depend on how sessions are cut into traces, or traces spread over micro-batches": (
        "importance_sampling_level off_policy_ top_entropy entropy_ use_adaptive router_aux_ per_device_train "
        "steps_per_generation sapo_ vespo_ mask_truncated"
    ),
    "there is no evaluation set; a recipe's table [evaluation] has held-out tasks": (
        "do_eval do_predict eval_ per_device_eval batch_eval metric_ greater_ load_best prediction_loss include_for"
    ),
    'processes average their gradients once for each optimizer step; sharding = "full" shards the weights': (
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
    found = (why for why, beginnings in _REASONS.items() if name.startswith(tuple(beginnings.split())))
    return next(found, "a training on recorded traces has no use for it")


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
    layer, steps = torch.nn.Linear(2, 2), max(args.max_steps, _STEPS)
    kind, given = Trainer.get_optimizer_cls_and_kwargs(args, layer)
    parameters = given.pop("params", layer.parameters())
    made = f"{kind} {given}"
    optimizer: Any = kind(parameters, **given)
    name, warmup = args.lr_scheduler_type, args.get_warmup_steps(steps)
    schedule: Any = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=args.lr_scheduler_kwargs)
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
            if beta and changes(value := getattr(config, key, "none")):
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


def require_whole_weights(accelerator: Accelerator) -> None:
    """Raise `InputError` when Accelerate shards the weights or scales the loss, as its own settings may ask for."""
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise InputError(f"Accelerate is set up for {kind.value}: run `accelerate launch --multi_gpu`, or `torchrun`")
    if accelerator.scaler is not None:
        raise InputError("Accelerate is set up for float16: set mixed_precision to bf16 or no")


def require_embeddings(model: Any, traces: Sequence[Trace], rows: Sequence[Row]) -> None:
    """Raise `InputError` for a trace with an id that the model does not have. `rows` are those of the traces.

    On a CUDA device such an id would end the process.
    """
    size = model.get_input_embeddings().weight.shape[0]
    for trace, row in zip(traces, rows, strict=True):
        if len(wrong := row.ids[(row.ids < 0) | (row.ids >= size)]):
            what = f"trace {trace.trace_id} has the token id {wrong[0]}, but the model has {size} embeddings"
            raise InputError(f"{what}: train the model that the traces were recorded with")
