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
_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_LINEAR_FIELDS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_SIZES = {
    "tiny": (128, 32, 64, 4, 2, 1, 16),
    "tiny-hybrid": (128, 32, 64, 4, 2, 1, 16),
    "narrow": (2048, 64, 128, 2, 2, 2, 32),
    "quickstart": (2048, 128, 384, 2, 2, 1, 64),
    "small": (2048, 256, 768, 2, 4, 2, 64),
    "small-hybrid": (2048, 256, 768, 4, 4, 2, 64),
    "4b": (151_936, 2560, 9728, 36, 32, 8, 128),
    "4b-hybrid": (248_320, 2560, 9216, 32, 16, 4, 256),
}
"""Name -> values of `_FIELDS`. `4b` is Qwen3-4B, `4b-hybrid` the text part of Qwen3.5-4B, with 32 value heads
assumed."""
_LINEAR_SIZES = {
    "tiny-hybrid": (2, 4, 16, 16),
    "small-hybrid": (2, 4, 64, 64),
    "4b-hybrid": (16, 32, 128, 128),
}
"""Name -> values of `_LINEAR_FIELDS`, of the models in which three of four layers are Gated DeltaNet."""
_ROPE: dict[str, dict[str, Any]] = {
    "4b": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "4b-hybrid": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
}
NETWORKS = list(_SIZES)


def vocabulary(name: str) -> int:
    return _SIZES[name][0]


def network(name: str, *, device: str, dtype: torch.dtype, lora: bool) -> Any:
    """Return a model with random weights. With `lora`, only an adapter is trained.

    The adapter's two factors are both random, so that all of its gradients are different from 0.
    """
    dimensions: dict[str, Any] = dict(zip(_FIELDS, _SIZES[name], strict=True)) | {"max_position_embeddings": 2**20}
    if name in _ROPE:
        dimensions |= {"tie_word_embeddings": True, "rope_parameters": _ROPE[name]}
    torch.manual_seed(0)
    with torch.device(device):
        if name in _LINEAR_SIZES:
            dimensions |= dict(zip(_LINEAR_FIELDS, _LINEAR_SIZES[name], strict=True))
            config: Any = Qwen3_5TextConfig(**dimensions | _SPECIAL)
            model: Any = Qwen3_5ForCausalLM._from_config(config, dtype=dtype)
        else:
            config = Qwen3Config(**dimensions | _SPECIAL)
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


def layers(config: Any, kind: str) -> int:
    """Return how many layers are of a kind: `full_attention` or `linear_attention`."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return int(kinds.count(kind))


def state_bytes(model: Any) -> int:
    """Return the bytes of keys and values of one token, in all layers with full attention."""
    config = model.config.get_text_config()
    full = layers(config, "full_attention")
    return int(2 * full * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)
