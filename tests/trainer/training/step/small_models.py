"""Small models of the families that are trained, rows that branch in all ways, and the plain pass
over these."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from rolltap.trainer.training.step.pack import Pack, TraceRow

VOCABULARY = 200
WINDOW = 24
"""Sliding window of the models that have one: shorter than the rows of the tests."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    # larger than a new model's, so that every token depends on all before it
    "initializer_range": 0.2,
    "pad_token_id": None,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": WINDOW, "layer_types": SLIDING}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 16}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", LINEAR),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", WINDOWS | CAPS),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 1}),
    "qwen2 with a window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {"logits_scaling": 2.0, "attention_multiplier": 0.25},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", WINDOWS),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "qwen3.5-moe": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
}
"""Name -> the classes of the model and of its configuration, and the fields besides the common
ones."""
HYBRIDS = ("qwen3.5", "qwen3.5-moe")
"""Families of which three of four layers have linear attention."""


def configuration(family: str, **fields: Any) -> Any:
    """Return the configuration of a family's small model, with other `fields` on request."""
    _, kind, own = FAMILIES[family]
    return getattr(transformers, kind)(**COMMON | own | fields)


def small_model(family: str, **fields: Any) -> Any:
    """Return a float32 model of a family, always with the same weights, not in training mode."""
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family][0])(configuration(family, **fields)).float()
    if family == "gpt-oss":
        # a new model's sinks, biases and experts are zeros, or not initialized
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                torch.nn.init.normal_(parameter)
            elif parameter.dim() == 3 or "bias" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def make_row(ids: Sequence[int], scored: Sequence[int] | None = None) -> TraceRow:
    """Return a row whose tokens from the second on are scored, or those at `scored`."""
    if scored is None:
        scored = range(1, len(ids))
    return TraceRow(np.array(ids, np.int32), np.array(scored, np.int64))


def branching_rows() -> list[TraceRow]:
    """Return rows that branch in all ways.

    They have the shared prompt of a group, and branches at any place: after 1 or 2 tokens, at a
    scored token, within scored tokens. There are twins that score other tokens, a row that another
    one begins with, several roots, a row of two tokens, and one without a scored token.
    """
    random = np.random.default_rng(0)

    def new(number: int) -> list[int]:
        return random.integers(0, VOCABULARY, number).tolist()

    rows = []
    shared = new(61)
    for _ in range(3):
        chain = shared + new(30)
        for turn in range(4):
            side = chain + new(17 + turn)
            rows.append(make_row(side, range(len(side) - 9, len(side))))
            chain = chain + new(25 if turn else 2)
        rows.append(make_row(chain, range(70, len(chain))))
    main = rows[4].ids.tolist()
    for cut in (70, 71, 72, 100, len(main) - 1):
        other = [*main[:cut], (main[cut] + 1) % VOCABULARY, *new(3)]
        rows.append(make_row(other, range(cut, len(other))))
    rows.append(make_row(main, range(80, 100)))
    rows.append(make_row(main[:90], [75, 89]))
    rows.append(make_row(new(40)))
    rows.append(make_row(new(2)))
    rows.append(make_row(new(9), []))
    first = new(150)
    for cut in (1, 2, 3, 127, 128, 129, 150):
        rows.append(make_row(first[:cut] + new(5), range(cut, cut + 5)))
    return rows


def pack_of(rows: Sequence[TraceRow]) -> tuple[Pack, Tensor]:
    """Return the rows as sessions of a pack, and random weights of their tokens."""
    pack = Pack([[row] for row in rows])
    random = torch.Generator().manual_seed(1)
    return pack, torch.randn(pack.mask.shape, generator=random) * pack.mask


Passed = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities and entropies, (rows, S), and the gradient of all parameters."""


def packed_pass(model: Any, pack: Any, weights: Tensor) -> Passed:
    """Run rows through a prepared model, and the backward pass of the sum of log-probabilities
    times `weights`."""
    output = model(**pack.inputs())
    logprobs = pack.unpack(output.log_probs)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), pack.unpack(output.entropy).detach(), take_gradient(model)


def plain_pass(model: Any, rows: Sequence[TraceRow], weights: Tensor) -> Passed:
    """Run each row alone through a model as it is, and the same backward pass."""
    logprobs = torch.zeros(weights.shape)
    entropies = torch.zeros(weights.shape)
    for i, row in enumerate(rows):
        if not len(row.scored):
            continue
        ids = torch.tensor(row.ids).long()
        every = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        every = every[row.scored - 1]
        own = every.gather(1, ids[row.scored][:, None])[:, 0]
        (own * weights[i, : len(own)]).sum().backward()
        logprobs[i, : len(own)] = own.detach()
        entropies[i, : len(own)] = -(every.exp() * every).sum(-1).detach()
    return logprobs, entropies, take_gradient(model)


def take_gradient(model: Any) -> Tensor:
    """Return the gradient of all trained parameters as one vector, and remove it from the model."""
    parts = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append(gradient.flatten())
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)
