"""Attention of segments in a model."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Gemma2Config, Gemma2ForCausalLM

from rolltap.trainer.training.forward.attention import NAME, segment_attention
from rolltap.trainer.training.forward.forest import build_forest
from rolltap.trainer.training.forward.paths import Batch, Paths
from tests.trainer.training.forward.test_passes import assert_same, forest, row, scorer, tokens
from tests.trainer.training.grpo.tiny_models import COMMON, tiny

LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
}


def test_a_model_has_this_attention_only_meanwhile():
    config = tiny("gpt-oss").config
    paths = Paths(build_forest([row([1, 2, 3], [2])], 10))
    with suppress(ZeroDivisionError), segment_attention(config, Batch(paths, [0], [0], [2], rows=1)):
        assert config._attn_implementation == NAME
        raise ZeroDivisionError
    assert config._attn_implementation == "eager"


@pytest.mark.parametrize("keep_graph", [False, True], ids=["two passes", "one pass"])
def test_scores_that_are_capped_and_heads_that_are_latent_run_as_segments(keep_graph):
    common: dict[str, Any] = {**COMMON, "num_key_value_heads": COMMON["num_attention_heads"]}
    torch.manual_seed(0)
    window = {"sliding_window": 16, "attn_logit_softcapping": 2.0, "num_hidden_layers": 2}
    capped = Gemma2ForCausalLM(Gemma2Config(**COMMON, **window))
    latent = DeepseekV3ForCausalLM(DeepseekV3Config(**common, **LATENT))
    for model in (capped.eval(), latent.eval()):
        assert_same(model, scorer(40, keep_graph=keep_graph), forest())


def test_the_host_does_as_much_for_a_segment_of_a_large_tree_as_of_a_small_one():
    """Counted in operators that torch dispatches."""

    def per_segment(number: int) -> float:
        trunk = tokens(32 * number, 0)
        rows = [row(trunk[: 32 * i] + tokens(20, i), range(32 * i + 2, 32 * i + 20)) for i in range(1, number)]
        count = 0

        class Counter(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal count
                count += 1
                return function(*args, **(kwargs or {}))

        model, score = tiny("qwen3"), scorer(32)
        segments = build_forest(rows, 32)
        with Counter():
            score(model, rows).logprobs.sum().backward()
        return count / len(segments)

    assert np.isclose(per_segment(64), per_segment(16), rtol=0.2)
