"""A Hugging Face causal language model that runs packs. Its other calls stay as they are."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import add_fused_lm_head

from rolltap.trainer.training.step.attention import register
from rolltap.trainer.training.step.linear import compute_in_chunks
from rolltap.trainer.training.step.pack import PACK_ARGUMENT, Pack

_PREPARED = "_runs_packs"


def prepare(model: Any, temperature: float | None = None) -> Any:
    """Let a model run packs, and return it. A second call only replaces the temperature.

    The model is then called with `Pack.inputs()`. `log_probs` and `entropy` of its output have a
    value for each pair of the pack, (1, M). PEFT, DDP or FSDP wrap the model after this.

    `temperature` divides the logits of the head, which is TRL's and is added here. None adds no
    head: `GRPOTrainer` adds it to the model that it gets.
    """
    if not getattr(model, _PREPARED, False):
        setattr(model, _PREPARED, True)
        stock = model.config.get_text_config(decoder=True)._attn_implementation
        if "flash" in stock:
            # transformers would look for a package of the new name
            stock = "sdpa"
        model.set_attn_implementation(register(stock))
        if hasattr(model.get_decoder(), "layers"):
            compute_in_chunks(model)
        model.base_model.register_forward_hook(_keep_contexts, with_kwargs=True)
    if temperature is not None:
        add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    return model


def _keep_contexts(
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """Leave the head only the hidden states before scored tokens, (1, M, H) of (1, N, H)."""
    pack: Pack | None = kwargs.get(PACK_ARGUMENT)
    if pack is not None:
        output.last_hidden_state = output.last_hidden_state[:, pack.contexts]
    return output


def train_in_float32(model: Any) -> None:
    """Let trained weights have 32 bits: a step of 1e-6 of a weight is lost in bfloat16, whose
    values are 4e-3 apart.

    Autocast computes in the 16 bits that they were loaded in.
    """
    for weight in model.parameters():
        if weight.requires_grad and weight.itemsize < torch.float32.itemsize:
            weight.data = weight.data.float()


def run_as_served(model: Any) -> None:
    """Let a model compute as engines do: some families clip weights, or choose experts otherwise,
    in training mode.

    The layers themselves stay in it, for their gradient checkpointing, and the whole, for TRL's
    metrics.
    """
    model.eval()
    for module in model.modules():
        module.training = module is model or isinstance(module, GradientCheckpointingLayer)
