"""The trainer's arguments: TRL's `GRPOConfig`, limited to the fields that keep the gradient correct; checks of a model.

The gradient of a batch must not depend on how sessions are cut into traces, nor on how traces are spread over
micro-batches and processes. Each field of `GRPOConfig` is accepted, and tested where it changes the gradient, or
refused unless it has its default. The checks refuse a model, or Accelerate's settings, that would break this.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from accelerate import Accelerator, DistributedType
from trl import GRPOConfig

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import Trace
from rolltap.trainer.training.forward.forest import Row

LOSSES = ("dapo", "cispo")
"""TRL's losses that are a sum over tokens, divided by the number of trained tokens of the batch. The others average
over rows or over a micro-batch, or weigh whole rows: their gradient depends on how sessions are cut into traces."""


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


CHANGING = _names(
    "loss_type beta use_bias_correction_kl epsilon epsilon_high delta scale_rewards temperature max_completion_length",
    "num_iterations gradient_accumulation_steps activation_checkpointing",
)
"""Fields that change the gradient or the way to it. The tests of invariance set each of them."""

OTHERS = _names(
    "output_dir max_steps num_train_epochs seed full_determinism use_cpu shuffle_dataset",
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm",
    "optim optim_args optim_target_modules adam_beta1 adam_beta2 adam_epsilon",
    "model_init_kwargs trust_remote_code disable_dropout bf16 tf32",
    "steps_per_generation activation_checkpointing_kwargs torch_empty_cache_steps",
    "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level",
    "log_level_replica disable_tqdm report_to run_name project",
    "trackio_space_id trackio_bucket_id trackio_static_space_id",
    "save_strategy save_steps save_on_each_node save_total_limit",
    "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
    "ddp_backend ddp_timeout local_rank debug skip_memory_metrics",
)
"""Fields of the model, its numeric types, the optimizer, checkpoints and logging."""

ACCEPTED = CHANGING | OTHERS

LEAST_TOKENS = 16
"""Smallest `tokens_per_segment`: kernels of linear attention have no gradient for a single token after a state."""

STEPPING = ("lomo", "layerwise")
"""Parts of the names of optimizers that step inside the backward pass. They would change weights between segments."""

_WHY_REFUSED: Mapping[str, str] = {
    "the traces are already sampled; sampling is an option of the recorder (rolltap_sampling)": """
        generation_batch_size top_p top_k min_p repetition_penalty generation_kwargs chat_template_kwargs
        cache_implementation use_cache use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
        vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
        max_tool_calling_iterations use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged ds3_gather_for_generation log_completions log_multimodal num_completions_to_print
        log_unique_prompts log_completions_hub_repo""",
    "the weights between engine and trainer are set with mismatch, mismatch_min and mismatch_max": """
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min vllm_importance_sampling_cap""",
    "a group has the sessions that were recorded, and a micro-batch 1 / gradient_accumulation_steps of the traces": """
        num_generations per_device_train_batch_size""",
    "the rewards come with the sessions, one number each": "reward_weights multi_objective_aggregation",
    "it weighs a row as a whole, and a session may have several rows: the gradient would depend on the strategy": """
        importance_sampling_level off_policy_mask_threshold""",
    "it is a mean or a quantile of one micro-batch: the gradient would depend on gradient_accumulation_steps": """
        top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta
        entropy_target router_aux_loss_coef""",
    "it belongs to a loss_type that is refused": """
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg""",
    "long traces are cut by max_tokens, and the ledger names what was left out": "mask_truncated_completions",
    "the reference stays the model that the training started from": """
        sync_ref_model ref_model_mixup_alpha ref_model_sync_steps""",
    "there is no evaluation set; roll out held-out tasks with `rolltap rollout`": """
        do_eval eval_strategy eval_steps eval_delay per_device_eval_batch_size num_generations_eval prediction_loss_only
        eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics bf16_full_eval fp16_full_eval load_best_model_at_end metric_for_best_model
        greater_is_better do_predict""",
    "rows are chosen from the seed and the step, not by a data loader": """
        ignore_data_skip data_seed dataloader_drop_last dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
        remove_unused_columns label_names train_sampling_strategy length_column_name include_num_input_tokens_seen
        pad_to_multiple_of auto_find_batch_size""",
    "processes average their gradients once for each optimizer step; sharded weights are not supported": """
        fsdp fsdp_config deepspeed parallelism_config accelerator_config average_tokens_across_devices
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph""",
    "it changes the log-probabilities of the model, which must be those that the engine sampled with": """
        neftune_noise_alpha label_smoothing_factor""",
    "it replaces parts of the model, which was not tested": """
        torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
        cast_lm_head_to_fp32""",
    "an adapter of a model that was loaded in float16 is trained in it; the loss is scaled without a state": "fp16",
    "its name is deprecated; use activation_checkpointing": "gradient_checkpointing gradient_checkpointing_kwargs",
    "a stopped training could not be resumed": """
        save_only_model enable_jit_checkpoint restore_callback_states_from_checkpoint""",
    "give it to train()": "resume_from_checkpoint do_train",
}
REFUSED = {name: why for why, names in _WHY_REFUSED.items() for name in _names(names)}
"""Field that must keep its default -> why."""


@dataclass(kw_only=True)
class TraceGRPOConfig(GRPOConfig):
    """Arguments of `TraceGRPOTrainer`: those of TRL's `GRPOConfig` that keep its promise, and its own.

    Raises `InputError` for a field of `GRPOConfig` that has to keep its default, with the reason, and for values that
    exclude each other; and what `GRPOConfig` raises.
    """

    forward: Literal["segments", "padded"] = field(
        default="segments",
        metadata={
            "help": "How traces run through the model. segments: each shared prefix once, in pieces of any length. "
            "padded: each trace whole, as a row."
        },
    )
    tokens_per_segment: int | None = field(
        default=None, metadata={"help": "Maximum number of tokens of one forward pass. None: planned from memory_gib."}
    )
    memory_gib: float | None = field(
        default=None,
        metadata={"help": "Memory for states, activations and logits, in GiB. None: what is free on a CUDA device."},
    )
    offload_states: bool = field(
        default=False, metadata={"help": "Keep the states of segments in pinned host memory between their uses."}
    )
    normalise: Literal["tokens", "sessions", "constant"] = field(
        default="tokens",
        metadata={
            "help": "How sessions weigh. tokens: each trained token the same. sessions: each session the same, its "
            "tokens share its weight. constant: each token 1 / (sessions * max_completion_length), as in Dr. GRPO."
        },
    )
    mismatch: Literal["clip", "truncate", "mask"] = field(
        default="clip",
        metadata={
            "help": "What corrects the difference between engine and trainer. clip: the loss's ratio is to the "
            "engine's probability, and clipped. truncate, mask: the ratio is to the trainer's own probability before "
            "the step, and the token has the weight trainer / engine, limited to mismatch_min and mismatch_max "
            "(truncate), or 0 outside of them (mask)."
        },
    )
    mismatch_min: float = field(default=0.5, metadata={"help": "Lower limit of the weight trainer / engine."})
    mismatch_max: float = field(default=2.0, metadata={"help": "Upper limit of the weight trainer / engine."})

    # defaults that differ from TRL's
    activation_checkpointing: bool | None = True
    router_aux_loss_coef: float | None = 0.0
    ignore_data_skip: bool = True

    def __post_init__(self) -> None:
        """Check the fields as they were given, then let TRL derive its own."""
        for declared in fields(self):
            if declared.name in ACCEPTED or declared.name in _OURS:
                continue
            if getattr(self, declared.name) != _default(declared):
                why = REFUSED.get(declared.name, "this version of rolltap does not know it")
                raise InputError(
                    f"{declared.name}={getattr(self, declared.name)!r} is refused: {why}; leave it at "
                    f"{_default(declared)!r}"
                )
        if self.loss_type not in LOSSES:
            raise InputError(
                f"loss_type={self.loss_type!r} does not average over all trained tokens of a step: the weight of a "
                f"session would depend on its number of traces; choose one of {', '.join(LOSSES)}"
            )
        if self.steps_per_generation not in (None, self.gradient_accumulation_steps):
            raise InputError(
                f"steps_per_generation={self.steps_per_generation} differs from gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps}: one step must train one generation batch, or the loss is not the "
                "mean over the batch's tokens; leave steps_per_generation unset"
            )
        for name in ("forward", "normalise", "mismatch"):
            if getattr(self, name) not in (choices := get_args(TraceGRPOConfig.__annotations__[name])):
                raise InputError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        if any(part in str(self.optim) for part in STEPPING):
            raise InputError(f"optim={self.optim!r} steps inside the backward pass: choose another optimizer")
        if not 0 <= self.mismatch_min <= 1 <= self.mismatch_max:
            raise InputError(
                f"mismatch_min={self.mismatch_min}, mismatch_max={self.mismatch_max}: give limits with "
                "0 <= mismatch_min <= 1 <= mismatch_max"
            )
        if self.tokens_per_segment is not None and self.tokens_per_segment < LEAST_TOKENS:
            raise InputError(
                f"tokens_per_segment={self.tokens_per_segment}: give at least {LEAST_TOKENS}, or leave it out"
            )
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise InputError(f"memory_gib={self.memory_gib}: give a number above 0, or leave it out")
        if self.activation_checkpointing is None:
            self.activation_checkpointing = True
        self._refuse_without_effect("forward='padded'", self.forward == "padded", _SIZES)
        one_pass = "activation_checkpointing=False, which keeps all activations"
        self._refuse_without_effect(one_pass, not self.activation_checkpointing, ("memory_gib", "offload_states"))
        self._refuse_without_effect("mismatch='clip'", self.mismatch == "clip", ("mismatch_min", "mismatch_max"))
        super().__post_init__()

    def _refuse_without_effect(self, setting: str, holds: bool, names: tuple[str, ...]) -> None:
        for declared in fields(self):
            if holds and declared.name in names and getattr(self, declared.name) != _default(declared):
                value = getattr(self, declared.name)
                raise InputError(f"{declared.name}={value!r} has no effect with {setting}: leave one of them out")


def _default(declared: Field[Any]) -> Any:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


_OURS = {declared.name for declared in fields(TraceGRPOConfig)} - {declared.name for declared in fields(GRPOConfig)}
_SIZES = ("tokens_per_segment", "memory_gib", "offload_states")


def refuse_dropout(model: Any) -> None:
    """Raise `InputError` for a model with a dropout above 0, in a layer or in its attention."""
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0)
        if isinstance(rate, float) and rate > 0:
            raise InputError(
                f"{name} drops {rate:.0%} of its values: the trainer's log-probabilities would not be those of the "
                "weights; set lora_dropout and the model's dropout to 0, or disable_dropout=True"
            )


def require_whole_weights(accelerator: Accelerator) -> None:
    """Raise `InputError` when Accelerate shards the weights or scales the loss, as its own settings may ask for."""
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise InputError(f"Accelerate is set up for {kind.value}: run `accelerate launch --multi_gpu`, or `torchrun`")
    if accelerator.scaler is not None:
        raise InputError("Accelerate is set up for float16: set mixed_precision to bf16 or no")


def refuse_float16(model: Any, args: TraceGRPOConfig) -> None:
    """Raise `InputError` for weights of float16 that are trained, or that `args` would run in bfloat16."""
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float16 and weight.requires_grad:
            raise InputError(
                f"{name} is trained in float16, whose range is too small for it: load the model in bfloat16 or "
                "float32, or train an adapter, whose weights PEFT keeps in float32"
            )
        if weight.dtype == torch.float16 and args.bf16:
            raise InputError(f"{name} has the type float16, but bf16=True: set bf16=False, or load it in bfloat16")


def require_embeddings(model: Any, traces: Sequence[Trace], rows: Sequence[Row]) -> None:
    """Raise `InputError` for a trace with an id that the model does not have. `rows` are those of the traces.

    On a CUDA device such an id would end the process.
    """
    size = model.get_input_embeddings().weight.shape[0]
    for trace, row in zip(traces, rows, strict=True):
        if not 0 <= row.ids.min() <= row.ids.max() < size:
            wrong = row.ids.min() if row.ids.min() < 0 else row.ids.max()
            raise InputError(
                f"trace {trace.trace_id} has the token id {wrong}, but the model has {size} embeddings: train the "
                "model that the traces were recorded with"
            )
