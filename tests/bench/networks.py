"""Models with random weights: small ones for two CPU cores, and ones of real dimensions."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
_SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_NARROW: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_QUICKSTART: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
_4B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_4B_HYBRID: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def _narrow(heads: int, size: int) -> dict[str, Any]:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    return dict(zip(names, (heads, 2 * heads, size, size), strict=True))


NETWORKS: dict[str, tuple[bool, dict[str, Any]]] = {
    "tiny": (False, _TINY),
    "tiny-hybrid": (True, _TINY | _narrow(2, 16)),
    "narrow": (False, _NARROW),
    "quickstart": (False, _QUICKSTART),
    "small": (False, _SMALL),
    "small-hybrid": (True, _SMALL | _narrow(2, 64) | {"num_hidden_layers": 4}),
    "4b": (False, _4B),
    "4b-hybrid": (True, _4B_HYBRID),
}
"""Name -> whether three of four layers are Gated DeltaNet, and the configuration. `4b` is Qwen3-4B, `4b-hybrid` the
text part of Qwen3.5-4B, with 32 value heads assumed."""


def network(name: str, *, device: str, dtype: torch.dtype, lora: bool, layers: int | None = None) -> Any:
    """Return a model with random weights, of `layers` layers if given. With `lora`, only an adapter is trained.

    The adapter's two factors are both random, so that all of its gradients are different from 0.
    """
    hybrid, dimensions = NETWORKS[name]
    changes = {"max_position_embeddings": 2**20} | ({"num_hidden_layers": layers} if layers else {})
    torch.manual_seed(0)
    with torch.device(device):
        if hybrid:
            config: Any = Qwen3_5TextConfig(**dimensions | _SPECIAL | changes)
            model: Any = Qwen3_5ForCausalLM._from_config(config, dtype=dtype)
        else:
            config = Qwen3Config(**dimensions | _SPECIAL | changes)
            model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
        if lora:
            adapter = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
            model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    return model.train()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer, which the trainer asks for and does not use."""
    words = {"<pad>": 0, "<eos>": 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")), pad_token="<pad>", eos_token="<eos>"
    )


def state_bytes(model: Any) -> int:
    """Return the bytes of keys and values of one token, in all layers with full attention."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind == "full_attention" for kind in kinds)
    return int(2 * layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)
