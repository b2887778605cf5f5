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
from rolltap.trainer.training.step.pack import Pack, PaddedRows, TraceRow
from rolltap.trainer.training.step.routing import Replay
from tests.deep import cases
from tests.trainer.training.step.small_models import (
    branching_rows,
    plain_pass,
    small_model,
    take_gradient,
)

EXPERTS = 4
TOP_K = 2
# of PEFT, which asks transformers by an older name, and of the patterns of experts' ranks
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


def chosen(ids: Any, layers: int) -> Any:
    """Experts that depend on a token, its position and the layer, and on no router."""
    experts = np.empty((len(ids) - 1, layers, TOP_K), np.int16)
    for position, token in enumerate(ids[:-1]):
        for layer in range(layers):
            random = np.random.default_rng([token, position, layer])
            experts[position, layer] = random.permutation(EXPERTS)[:TOP_K]
    return experts


def routed(model: Any, rows: list[TraceRow]) -> list[TraceRow]:
    layers = model.config.get_text_config().num_hidden_layers
    return [replace(row, experts=chosen(row.ids, layers)) for row in rows]


def unrouted(rows: list[TraceRow]) -> list[TraceRow]:
    return [replace(row, experts=None) for row in rows]


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


def force(router: Any, layer: int, now: list[TraceRow]) -> None:
    """Let a router choose the experts of the row in `now`."""

    def forward(hidden: Any) -> Any:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        # the last token has none: it has no influence
        experts = torch.from_numpy(now[0].experts[:, layer]).long()
        experts = torch.cat([experts, experts.new_tensor([range(TOP_K)])])
        return logits, values_at(router, logits, experts), experts

    router.forward = forward


Tensors = tuple[torch.Tensor, torch.Tensor]


def forced(model: Any, rows: list[TraceRow], weights: torch.Tensor) -> Tensors:
    """Log-probabilities of plain passes whose routers are written here again, and the gradient of
    their sum."""
    routers = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            routers.append(module)
    assert routers
    now: list[TraceRow] = []
    first = model.config.get_text_config().num_hidden_layers - len(routers)
    for layer, router in enumerate(routers, first):
        force(router, layer, now)
    logprobs = torch.zeros(weights.shape)
    gradient: Any = 0
    for i, row in enumerate(rows):
        now[:] = [row]
        own, _, part = plain_pass(model, [row], weights[i : i + 1])
        logprobs[i] = own[0]
        gradient = gradient + part
    for router in routers:
        del router.forward
    return logprobs, gradient


def run(model: Any, replay: Replay, forest: Any, weights: torch.Tensor) -> Tensors:
    replay.begin(model, forest.experts)
    logprobs = forest.unpack(model(**forest.inputs()).log_probs)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), take_gradient(model)


def packed(rows: list[TraceRow]) -> Pack:
    return Pack([[row] for row in rows])


def padded(rows: list[TraceRow]) -> PaddedRows:
    return PaddedRows([[row] for row in rows], torch.device("cpu"))


def weights_of(rows: list[TraceRow]) -> torch.Tensor:
    mask = packed(rows).mask
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)) * mask


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
def test_replayed_experts_are_those_of_a_forced_router(family, forest, monkeypatch):
    model = prepare(small_model(family, **FIELDS.get(family, {})), 1.0)
    rows = branching_rows()
    if forest is padded:
        rows = rows[:6]
    rows = routed(model, rows)
    weights = weights_of(rows)
    wanted, exact = forced(model, rows, weights)
    replay = Replay()
    model.activation_checkpointing_enable()
    own, _ = run(model.train(), replay, forest(unrouted(rows)), weights)
    tolerance = 5e-5 * LOOSE.get(family, 1)
    for chunk in (linear.CHUNK, 300):
        monkeypatch.setattr(linear, "CHUNK", chunk)
        found, gradient = run(model, replay, forest(rows), weights)
        assert (found - own).abs().max() > 1e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)
        assert (gradient - exact).norm() < tolerance * exact.norm()
        replayed, differ = replay.taken().tolist()
        assert 0 < differ < replayed
    assert not replay.taken().any()


def test_sessions_share_a_prefix_only_as_far_as_their_experts_agree():
    model = prepare(small_model("qwen3-moe"), 1.0)
    plain = branching_rows()[:4]
    rows = routed(model, plain)
    for number, row in enumerate(rows):
        row.experts[20 + 3 * (number // 2) :] += number // 2
        row.experts[:] %= EXPERTS
    weights = weights_of(rows)
    wanted, exact = forced(model, rows, weights)
    pack = packed(rows)
    found, gradient = run(model, Replay(), pack, weights)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)
    assert (gradient - exact).norm() < 1e-5 * exact.norm()
    alone = sum(packed([row]).tokens for row in rows)
    assert packed(plain).tokens < pack.tokens < alone


def test_adapters_of_routers_and_experts_get_the_gradients_of_replayed_passes():
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(prepare(small_model("qwen3-moe"), 1.0), adapter)
    rows = routed(model, branching_rows()[:5])
    weights = weights_of(rows)
    replay = Replay()
    _, found = run(model, replay, packed(rows), weights)
    exact: Any = 0
    for i, row in enumerate(rows):
        replay.begin(model, np.concatenate([row.experts, row.experts[-1:]]))
        exact = exact + plain_pass(model, [row], weights[i : i + 1])[2]
    assert (found - exact).norm() < 1e-5 * exact.norm()
    router = model.get_base_model().model.layers[0].mlp.gate
    assert router.lora_A.default.weight.requires_grad


def test_after_its_end_a_model_routes_by_itself():
    model = prepare(small_model("qwen3-moe"), 1.0)
    rows = routed(model, branching_rows()[:2])
    recorded = packed(rows)
    plain = packed(unrouted(rows))
    replay = Replay()
    with torch.no_grad():
        own = model(**plain.inputs()).log_probs
        replay.begin(model, recorded.experts)
        assert not torch.equal(model(**recorded.inputs()).log_probs, own)
        replay.end()
        assert torch.equal(model(**plain.inputs()).log_probs, own)


def test_models_whose_experts_cannot_be_replayed_are_refused():
    rows = branching_rows()[:4]
    dense = prepare(small_model("qwen3"), 1.0)
    with pytest.raises(InputError, match="Qwen3ForCausalLM has no experts"):
        Replay().begin(dense, packed(routed(dense, rows)).experts)
    model = prepare(small_model("qwen3-moe"), 1.0)
    experts = packed(routed(model, rows)).experts
    with pytest.raises(InputError, match="experts of 1 layers, but the model has 3"):
        Replay().begin(model, experts[:, :1])
    replay = Replay()
    replay.begin(model, experts[:, :, :1])
    with pytest.raises(InputError, match="chose 1 of 4 experts 0 times"):
        model(**packed(routed(model, rows)).inputs())
