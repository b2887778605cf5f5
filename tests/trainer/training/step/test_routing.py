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
from rolltap.trainer.training.step.pack import Pack, PaddedRows, Row
from rolltap.trainer.training.step.routing import Replay
from tests.deep import cases
from tests.trainer.training.step.small_models import branching_rows, plain_pass, small_model, take_gradient

EXPERTS = 4
TOP_K = 2
GROUPS = {"n_group": 2, "topk_group": 1}
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


def routed(model: Any, rows: list[Row] | None = None) -> list[Row]:
    layers = model.config.get_text_config().num_hidden_layers
    return [replace(row, experts=chosen(row.ids, layers)) for row in rows or branching_rows()]


def forced(model: Any, rows: list[Row], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of plain passes whose routers are written here again, and the gradient of
    their sum."""
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
                values = logits.sigmoid().gather(-1, experts)
                return logits, values / values.sum(-1, keepdim=True) * router.routed_scaling_factor, experts
            if "GptOss" in type(router).__name__:
                return logits, (logits + router.bias).gather(-1, experts).softmax(-1), experts
            values = logits.softmax(-1).gather(-1, experts)
            if getattr(router, "norm_topk_prob", True):
                values = values / values.sum(-1, keepdim=True)
            return logits, values, experts

        return forward

    first = model.config.get_text_config().num_hidden_layers - len(routers)
    for layer, router in enumerate(routers, first):
        router.forward = force(router, layer)
    logprobs = torch.zeros(weights.shape)
    gradient: Any = 0
    for i, row in enumerate(rows):
        now[:] = [row.experts]
        own, _, part = plain_pass(model, [row], weights[i : i + 1])
        logprobs[i] = own[0]
        gradient = gradient + part
    for router in routers:
        del router.forward
    return logprobs, gradient


def run(model: Any, replay: Replay, forest: Any, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    replay.begin(model, forest.experts)
    logprobs = forest.unpack(model(**forest.inputs()).log_probs)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), take_gradient(model)


def packed(rows: list[Row]) -> Pack:
    return Pack([[row] for row in rows])


def padded(rows: list[Row]) -> PaddedRows:
    return PaddedRows([[row] for row in rows], torch.device("cpu"))


def weights_of(rows: list[Row]) -> torch.Tensor:
    mask = packed(rows).mask
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)) * mask


@pytest.mark.parametrize(
    ("family", "forest"),
    cases(
        [
            ("qwen3-moe", packed),
            ("gpt-oss", packed),
            ("deepseek-v3", padded),
            ("qwen3.5-moe", packed),
            ("deepseek-v3", packed),
            ("qwen3-moe", padded),
            ("gpt-oss", padded),
            ("qwen3.5-moe", padded),
        ],
        *range(3),
    ),
)
def test_replayed_experts_are_those_of_a_forced_router(family, forest, monkeypatch):
    model = prepare(small_model(family, **GROUPS if family == "deepseek-v3" else {}), 1.0)
    rows = routed(model, branching_rows()[:6] if forest is padded else None)
    weights = weights_of(rows)
    wanted, exact = forced(model, rows, weights)
    replay = Replay()
    model.activation_checkpointing_enable()
    own, _ = run(model.train(), replay, forest([replace(row, experts=None) for row in rows]), weights)
    loose = 100 if "3.5" in family else 1  # the floor of its recurrence
    for chunk in (linear.CHUNK, 300):
        monkeypatch.setattr(linear, "CHUNK", chunk)
        found, gradient = run(model, replay, forest(rows), weights)
        assert (found - own).abs().max() > 1e-2
        torch.testing.assert_close(found, wanted, atol=5e-5 * loose, rtol=0)
        assert (gradient - exact).norm() < 5e-5 * loose * exact.norm()
        replayed, differ = replay.taken().tolist()
        assert 0 < differ < replayed
    assert not replay.taken().any()


def test_sessions_share_a_prefix_only_as_far_as_their_experts_agree():
    model = prepare(small_model("qwen3-moe"), 1.0)
    rows = routed(model, branching_rows()[:4])
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
    assert packed(branching_rows()[:4]).tokens < pack.tokens < alone


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
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("gate.lora_A" in name for name in trained)


def test_after_its_end_a_model_routes_by_itself():
    model = prepare(small_model("qwen3-moe"), 1.0)
    rows = routed(model, branching_rows()[:2])
    plain = packed([replace(row, experts=None) for row in rows])
    replay = Replay()
    with torch.no_grad():
        own = model(**plain.inputs()).log_probs
        replay.begin(model, packed(rows).experts)
        assert not torch.equal(model(**packed(rows).inputs()).log_probs, own)
        replay.end()
        assert torch.equal(model(**plain.inputs()).log_probs, own)


def test_models_whose_experts_cannot_be_replayed_are_refused():
    dense = prepare(small_model("qwen3"), 1.0)
    with pytest.raises(InputError, match="Qwen3ForCausalLM has no experts"):
        Replay().begin(dense, packed(routed(dense)).experts)
    model = prepare(small_model("qwen3-moe"), 1.0)
    rows = routed(model)
    with pytest.raises(InputError, match="experts of 1 layers, but the model has 3"):
        Replay().begin(model, packed([replace(row, experts=row.experts[:, :1]) for row in rows]).experts)
    fewer = packed([replace(row, experts=row.experts[:, :, :1]) for row in rows])
    with pytest.raises(InputError, match="chose 1 of 4 experts 0 times"):
        run(model, Replay(), fewer, weights_of(rows))
