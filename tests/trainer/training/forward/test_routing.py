"""Replayed experts against a plain forward pass whose routers are forced: the same values and gradients."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from trl.trainer.utils import add_fused_lm_head

from rolltap.addons.errors import InputError
from rolltap.trainer.training.forward.forest import Row, build_forest
from rolltap.trainer.training.forward.passes import PaddedScorer, Scores, SegmentScorer
from tests.deep import cases
from tests.trainer.training.forward.test_passes import forest, gradients, plain
from tests.trainer.training.grpo.tiny import relative_difference
from tests.trainer.training.grpo.tiny_models import COMMON, FAMILIES, tiny

EXPERTS, TOP_K = 4, 2
GROUPED = DeepseekV3Config(
    num_hidden_layers=2,
    first_k_dense_replace=1,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=32,
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    **COMMON | {"num_key_value_heads": 4},
)
LINEAR = Qwen3_5MoeTextConfig(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    **COMMON,
)
MORE = {"deepseek": (DeepseekV3ForCausalLM, GROUPED), "qwen3.5-moe": (Qwen3_5MoeForCausalLM, LINEAR)}
# PEFT reads an attribute of Transformers that is deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def more_families(monkeypatch):
    for family, made in MORE.items():
        monkeypatch.setitem(FAMILIES, family, made)


def chosen(ids: Any, layers: int) -> Any:
    """Experts that depend on a token, its position and the layer, and on no router."""
    at = np.stack([ids[:-1], np.arange(len(ids) - 1)], 1)
    rank = [
        [np.random.default_rng([*here, layer]).permutation(EXPERTS)[:TOP_K] for layer in range(layers)] for here in at
    ]
    return np.array(rank, np.int16).reshape(len(at), layers, TOP_K)


def routed(model: Any) -> list[Row]:
    layers = model.config.get_text_config().num_hidden_layers
    return [replace(row, experts=chosen(row.ids, layers)) for row in forest()]


def forced(model: Any, rows: list[Row]) -> Scores:
    """The scores of a plain forward pass, whose routers are written here again."""
    now: list[Any] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]
    assert routers

    def force(router: Any, layer: int) -> Any:
        def forward(hidden: Any) -> Any:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            # the last token has none: it has no influence
            experts = torch.from_numpy(now[0][:, layer]).long()
            experts = torch.cat([experts, experts.new_tensor([range(TOP_K)])])
            if "Deepseek" in type(router).__name__:
                weights = logits.sigmoid().gather(-1, experts)
                return logits, weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor, experts
            if "GptOss" in type(router).__name__:
                return logits, (logits + router.bias).gather(-1, experts).softmax(-1), experts
            weights = logits.softmax(-1).gather(-1, experts)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, experts

        return forward

    first = model.config.get_text_config().num_hidden_layers - len(routers)
    for layer, router in enumerate(routers, first):
        router.forward = force(router, layer)
    found = []
    for row in rows:
        now[:] = [row.experts]
        found.append(plain(model, [row]))
    for router in routers:
        del router.forward
    return Scores(*map(torch.cat, zip(*found, strict=True)))


def segments(**options: Any) -> SegmentScorer:
    return SegmentScorer(nullcontext, 1.0, tokens_per_segment=30, **options)


def padded() -> PaddedScorer:
    return PaddedScorer(nullcontext, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "score"),
    cases(
        [
            ("qwen3-moe", segments()),
            ("qwen3-moe", padded()),
            ("gpt-oss", segments()),
            ("qwen3.5-moe", segments()),
            ("qwen3-moe", segments(keep_graph=True)),
            ("qwen3-moe", segments(tokens_in_memory=100)),
            ("deepseek", padded()),
            ("gpt-oss", padded()),
            ("qwen3.5-moe", padded()),
        ],
        *range(4),
    ),
)
def test_replayed_experts_are_those_of_a_forced_router(family, score):
    model = tiny(family)
    rows = routed(model)
    wanted = forced(model, rows)
    exact = gradients(model, wanted)
    if isinstance(score, PaddedScorer):
        model.gradient_checkpointing_enable()
        add_fused_lm_head(model, temperature=1.0)
    own = score(model, forest()).logprobs
    got = score(model, rows)
    assert float((got.logprobs - own).detach().abs().max()) > 1e-2
    torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
    tolerance = 2e-4 if "3.5" in family else 1e-5
    assert relative_difference(exact, gradients(model, got)) < tolerance
    replayed, differ = score.replay.taken().tolist()
    assert 0 < differ < replayed


@pytest.mark.parametrize(
    ("family", "score"),
    cases([("qwen3-moe", segments()), ("gpt-oss", segments(tokens_in_memory=100)), ("qwen3.5-moe", segments())], 0),
)
def test_sessions_share_a_prefix_only_as_far_as_their_experts_agree(family, score):
    model = tiny(family)
    rows = routed(model)
    for number, row in enumerate(rows):
        row.experts[20 + 3 * (number // 2) :] = (row.experts[20 + 3 * (number // 2) :] + number // 2) % EXPERTS
    wanted = forced(model, rows)
    exact = gradients(model, wanted)
    got = score(model, rows)
    torch.testing.assert_close(got.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
    assert relative_difference(exact, gradients(model, got)) < (2e-4 if "3.5" in family else 1e-5)
    apart = [replace(row, ids=row.ids + 100 * number) for number, row in enumerate(rows)]
    assert score.forwarded < sum(len(segment.ids) for segment in build_forest(apart, 30))


def test_adapters_of_routers_and_experts_get_the_gradients_of_replayed_passes():
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model, score = get_peft_model(tiny("qwen3-moe"), adapter), segments()
    rows, replay = routed(model), score.replay
    got = gradients(model, score(model, rows))
    found = []
    for row in rows:
        replay.begin(model, [row.experts], [len(row.ids)])
        found.append(plain(model, [row]))
    replay.end()
    assert relative_difference(gradients(model, Scores(*map(torch.cat, zip(*found, strict=True)))), got) < 1e-5
    assert any("gate.lora_A" in name and bool(gradient.any()) for name, gradient in got.items())


def test_models_whose_experts_cannot_be_replayed_are_refused():
    score = segments()
    with pytest.raises(InputError, match="Qwen3ForCausalLM has no experts"):
        score(tiny("qwen3"), routed(tiny("qwen3")))
    model = tiny("qwen3-moe")
    rows = routed(model)
    with pytest.raises(InputError, match="experts of 1 layers, but the model has 2"):
        score(model, [replace(row, experts=row.experts[:, :1]) for row in rows])
    with pytest.raises(InputError, match="chose 1 of 4 experts 0 times"):
        score(model, [replace(row, experts=row.experts[:, :, :1]) for row in rows])
