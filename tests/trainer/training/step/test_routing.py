"""Replayed experts against plain passes whose routers are forced: the same values and gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step import linear
from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import PaddedRows, TraceRow
from rolltap.trainer.training.step.routing import Replay
from tests.deep import cases
from tests.trainer.training.step.small_models import (
    branching_rows,
    pack_of,
    packed_pass,
    plain_pass,
    small_model,
)

EXPERTS = 4
TOP_K = 2
# of PEFT, which asks transformers by an older name, and of the patterns of experts' ranks
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture
def moe() -> Any:
    return prepare(small_model("qwen3-moe"), 1.0)


def routed(model: Any, rows: list[TraceRow]) -> list[TraceRow]:
    """Return rows with experts that depend on a token, its position and the layer, and on no
    router."""
    found = []
    for row in rows:
        shape = (len(row.ids) - 1, model.config.num_hidden_layers, TOP_K)
        experts = np.empty(shape, np.int16)
        for position, layer in np.ndindex(shape[:2]):
            random = np.random.default_rng([row.ids[position], position, layer])
            experts[position, layer] = random.permutation(EXPERTS)[:TOP_K]
        found.append(replace(row, experts=experts))
    return found


def values_at(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return what a router of each family makes of its logits at the chosen experts."""
    name = type(router).__name__
    if "GptOss" in name:
        return (logits + router.bias).gather(-1, experts).softmax(-1)
    if "Deepseek" in name:
        values = logits.sigmoid().gather(-1, experts)
        return values / values.sum(-1, keepdim=True) * router.routed_scaling_factor
    values = logits.softmax(-1).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        values = values / values.sum(-1, keepdim=True)
    return values


def force(router: Any, layer: int, row: TraceRow) -> None:
    """Let a router choose the experts of a row."""

    def forward(hidden: Any) -> Any:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        # the last token has none: it has no influence
        experts = torch.from_numpy(row.experts[:, layer]).long()
        experts = torch.cat([experts, experts.new_tensor([range(TOP_K)])])
        return logits, values_at(router, logits, experts), experts

    router.forward = forward


def forced(model: Any, rows: list[TraceRow], weights: torch.Tensor) -> Any:
    """Run plain passes whose routers are written here again."""
    routers = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            routers.append(module)
    assert routers
    first = model.config.num_hidden_layers - len(routers)
    logprobs = torch.zeros(weights.shape)
    gradient: Any = 0
    for i, row in enumerate(rows):
        for layer, router in enumerate(routers, first):
            force(router, layer, row)
        own, _, part = plain_pass(model, [row], weights[i : i + 1])
        logprobs[i] = own[0]
        gradient = gradient + part
    for router in routers:
        del router.forward
    return logprobs, gradient


def replayed(model: Any, replay: Replay, forest: Any, weights: torch.Tensor) -> Any:
    replay.begin(model, forest.experts)
    logprobs, _, gradient = packed_pass(model, forest, weights)
    return logprobs, gradient


def packed(rows: list[TraceRow]) -> Any:
    return pack_of(rows)[0]


def padded(rows: list[TraceRow]) -> PaddedRows:
    return PaddedRows([[row] for row in rows], torch.device("cpu"))


CASES = [
    ("qwen3-moe", packed),
    ("gpt-oss", packed),
    ("deepseek-v3", padded),
    ("qwen3.5-moe", packed),
    ("deepseek-v3", packed),
    ("qwen3-moe", padded),
    ("gpt-oss", padded),
    ("qwen3.5-moe", padded),
]
FIELDS = {"deepseek-v3": {"n_group": 2, "topk_group": 1}}
LOOSE = {"qwen3.5-moe": 100}
"""The floor of its recurrence, in tolerances."""


@pytest.mark.parametrize(("family", "forest"), cases(CASES, 0, 1, 2))
def test_replayed_experts_are_those_of_a_forced_router(family, forest, chunks_of):
    model = prepare(small_model(family, **FIELDS.get(family, {})), 1.0)
    plain = branching_rows()
    if forest is padded:
        plain = plain[:6]
    rows = routed(model, plain)
    _, weights = pack_of(rows)
    wanted, exact = forced(model, rows, weights)
    replay = Replay()
    model.activation_checkpointing_enable()
    own, _ = replayed(model.train(), replay, forest(plain), weights)
    tolerance = 5e-5 * LOOSE.get(family, 1)
    for chunk in (linear.CHUNK, 300):
        chunks_of(chunk)
        found, gradient = replayed(model, replay, forest(rows), weights)
        assert (found - own).abs().max() > 1e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)
        assert (gradient - exact).norm() < tolerance * exact.norm()
        choices, differ = replay.taken().tolist()
        assert 0 < differ < choices
    assert not replay.taken().any()


def test_sessions_share_a_prefix_only_as_far_as_their_experts_agree(moe):
    plain = branching_rows()[:4]
    rows = routed(moe, plain)
    for row in rows[2:]:
        row.experts[23:] += 1
        row.experts[:] %= EXPERTS
    pack, weights = pack_of(rows)
    wanted, exact = forced(moe, rows, weights)
    found, gradient = replayed(moe, Replay(), pack, weights)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)
    assert (gradient - exact).norm() < 1e-5 * exact.norm()
    alone = sum(packed([row]).tokens for row in rows)
    assert packed(plain).tokens < pack.tokens < alone


def test_adapters_of_routers_and_experts_get_the_gradients_of_replayed_passes(moe):
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(moe, adapter)
    rows = routed(model, branching_rows()[:5])
    pack, weights = pack_of(rows)
    replay = Replay()
    _, found = replayed(model, replay, pack, weights)
    exact: Any = 0
    for i, row in enumerate(rows):
        replay.begin(model, np.concatenate([row.experts, row.experts[-1:]]))
        exact = exact + plain_pass(model, [row], weights[i : i + 1])[2]
    assert (found - exact).norm() < 1e-5 * exact.norm()
    router = model.get_base_model().model.layers[0].mlp.gate
    assert router.lora_A.default.weight.requires_grad


@torch.no_grad()
def test_after_its_end_a_model_routes_by_itself(moe):
    rows = branching_rows()[:2]
    plain = packed(rows)
    recorded = packed(routed(moe, rows))
    replay = Replay()
    own = moe(**plain.inputs()).log_probs
    replay.begin(moe, recorded.experts)
    assert not torch.equal(moe(**recorded.inputs()).log_probs, own)
    replay.end()
    assert torch.equal(moe(**plain.inputs()).log_probs, own)


def test_models_whose_experts_cannot_be_replayed_are_refused(moe):
    pack = packed(routed(moe, branching_rows()[:4]))
    dense = prepare(small_model("qwen3"), 1.0)
    with pytest.raises(InputError, match="Qwen3ForCausalLM has no experts"):
        Replay().begin(dense, pack.experts)
    with pytest.raises(InputError, match="experts of 1 layers, but the model has 3"):
        Replay().begin(moe, pack.experts[:, :1])
    replay = Replay()
    replay.begin(moe, pack.experts[:, :, :1])
    with pytest.raises(InputError, match="chose 1 of 4 experts 0 times"):
        moe(**pack.inputs())
