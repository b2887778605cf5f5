"""vLLM with a vision-language checkpoint, of which the trainer has the text part."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.models.loading import load_policy
from rolltap.trainer.models.saving import save_adapter, save_weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.deep,  # short, the loop of a Qwen3.5 compares trainer and engine
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

IDS = torch.randint(5, 1500, (80,), generator=torch.Generator().manual_seed(1)).tolist()
NOISE = 0.01
"""Nats. The engine computes in bfloat16; the mean difference of this model is 0.001."""


@pytest.fixture(scope="module")
def admin(qwen35_engine):
    return EngineAdmin(qwen35_engine.url)


@pytest.fixture
def base(qwen35_engine):
    return load_policy(qwen35_engine.model_dir, "float32").eval()


@torch.no_grad()
def own(model) -> torch.Tensor:
    rows = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]


def engines(admin, name=None) -> torch.Tensor:
    return torch.tensor(admin.score(name or admin.models().base, IDS[:1], IDS[1:]))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())


def with_adapter(model):
    torch.manual_seed(2)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), lora).eval()


def test_the_text_part_scores_as_the_engine_does(admin, base):
    assert difference(engines(admin), own(base)) < NOISE


def test_an_adapter_does_in_the_engine_what_it_does_in_the_trainer(
    admin, qwen35_engine, base, tmp_path
):
    model = with_adapter(base)
    save_adapter(model, tmp_path / "named", qwen35_engine.model_dir)
    model.save_pretrained(str(tmp_path / "unnamed"))
    for name in ("named", "unnamed"):
        admin.load_adapter(name, tmp_path / name)
    try:
        assert difference(own(model), own(base)) > 10 * NOISE
        assert difference(engines(admin, "named"), own(model)) < NOISE
        # the trap: vLLM 0.32 takes an adapter with the trainer's names, and applies nothing; 0.33
        # knows the names
        unnamed = engines(admin, "unnamed")
        assert difference(unnamed, engines(admin)) == 0 or difference(unnamed, own(model)) < NOISE
    finally:
        for name in ("named", "unnamed"):
            admin.unload_adapter(name)


@pytest.mark.parametrize("adapted", [False, True])
def test_published_weights_are_what_the_engine_serves(
    admin, qwen35_engine, base, tmp_path, adapted
):
    model = with_adapter(base) if adapted else copy.deepcopy(base)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    before = engines(admin)
    save_weights(model, tmp_path, qwen35_engine.model_dir)
    try:
        admin.serve(tmp_path, "default")
        assert difference(own(model), own(base)) > 10 * NOISE
        assert difference(engines(admin), own(model)) < NOISE
    finally:
        admin.serve(qwen35_engine.model_dir, "default")
    assert torch.equal(engines(admin), before)
