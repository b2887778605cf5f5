"""A Hugging Face causal language model that runs packs. Its other calls stay as they are."""

from typing import Any

from torch import nn
from trl.trainer.utils import add_fused_lm_head

from rolltap.trainer.training.step.attention import register
from rolltap.trainer.training.step.linear import compute_in_chunks
from rolltap.trainer.training.step.pack import NAME, Pack

_PREPARED = "_runs_packs"
_TEMPERATURE = "_head_temperature"


def prepare(model: Any, temperature: float | None = None) -> Any:
    """Let a model run packs, and return it. A second call changes nothing.

    The model is called with `Pack.inputs()`, and returns values of the pack's pairs, (1, M). PEFT, DDP or FSDP wrap it
    after this. `temperature` divides the logits of the head, TRL's, that is added here. None adds no head: it is
    for a model that `GRPOTrainer` gets, which adds one itself.
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
        model.base_model.register_forward_hook(_only_contexts, with_kwargs=True)
    if temperature is not None and getattr(model, _TEMPERATURE, None) != temperature:
        setattr(model, _TEMPERATURE, temperature)
        add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    return model


def _only_contexts(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Leave the head only the hidden states before scored tokens: (1, M, H) of (1, N, H)."""
    pack: Pack | None = kwargs.get(NAME)
    if pack is not None:
        output.last_hidden_state = output.last_hidden_state[:, pack.contexts]
    return output
