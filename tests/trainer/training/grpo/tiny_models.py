"""Tiny models of the families that are trained, with random weights, in float32 on the CPU."""

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 256
WINDOW = 24
"""Sliding window of the models that have one: shorter than the rows of the tests."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(num_hidden_layers=2, tie_word_embeddings=True, **COMMON)),
    "llama": (LlamaForCausalLM, LlamaConfig(num_hidden_layers=2, **COMMON)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            num_hidden_layers=2, sliding_window=WINDOW, layer_types=SLIDING, final_logit_softcapping=30.0, **COMMON
        ),
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            num_hidden_layers=2,
            sliding_window=WINDOW,
            layer_types=SLIDING,
            num_local_experts=4,
            num_experts_per_tok=2,
            **COMMON,
        ),
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **COMMON),
    ),
    "qwen3.5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            num_hidden_layers=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            **COMMON,
        ),
    ),
}
"""The class and the configuration of each family. Qwen3.5 is hybrid: three of four layers have linear attention."""


def tiny(family: str) -> Any:
    """Return a model of a family, always with the same weights, in training mode."""
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            # larger than a new model's, so that every token depends on all before it
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.train()


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)
