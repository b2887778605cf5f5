"""Models with random weights: small ones for two CPU cores, and ones of real dimensions."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
_SIZES = {
    "tiny": (128, 32, 64, 4, 2, 1, 16),
    "tiny-hybrid": (128, 32, 64, 4, 2, 1, 16, 2, 4, 16, 16),
    "quickstart": (2048, 128, 384, 2, 2, 1, 64),
    "small": (2048, 256, 768, 2, 4, 2, 64),
    "small-hybrid": (2048, 256, 768, 4, 4, 2, 64, 2, 4, 64, 64),
}
"""Name -> values of `_FIELDS`. With all of them, three of four layers are Gated DeltaNet."""
_REAL = {"4b": "qwen3-4b", "4b-hybrid": "qwen3.5-4b"}
"""Name -> a configuration in `tests/models`, of which the text part is taken."""
NETWORKS = [*_SIZES, *_REAL]


def configuration(name: str) -> Any:
    """Return the configuration of a model, for long traces and the special tokens of the bench."""
    if name in _REAL:
        folder = Path(__file__).parents[1] / "models" / _REAL[name]
        config = AutoConfig.from_pretrained(folder).get_text_config()
    else:
        sizes = dict(zip(_FIELDS, _SIZES[name], strict=False))
        config = Qwen3_5TextConfig(**sizes) if _FIELDS[-1] in sizes else Qwen3Config(**sizes)
    config.max_position_embeddings = 2**20
    config.pad_token_id = 0
    config.eos_token_id = 1
    config.bos_token_id = None
    return config


def network(name: str, *, device: str, dtype: torch.dtype, lora: bool) -> Any:
    """Return a model with random weights. With `lora`, only an adapter is trained.

    The adapter's two factors are both random, so that all of its gradients are different from 0.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(configuration(name), dtype=dtype)
        if lora:
            how = {"target_modules": "all-linear", "init_lora_weights": False}
            adapter = LoraConfig(r=16, lora_alpha=16, **how)
            model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    return model.train()


def vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def layers(config: Any, kind: str) -> int:
    """Return how many layers are of a kind: `full_attention` or `linear_attention`."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return int(kinds.count(kind))
