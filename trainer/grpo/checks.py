"""Checks of a model against the traces that it is to train on."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, DistributedType

from rolltap.addons.errors import InputError
from rolltap.trainer.grpo.config import TraceGRPOConfig
from rolltap.trainer.grpo.rows import Row
from rolltap.trainer.traces.build import Trace


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
