"""Adapters of a model in float16: the scale of the loss, on its own and in trainings."""

import copy
import random

import pytest
import torch
from peft import LoraConfig
from torch.nn import Parameter

from rolltap.trainer.training.grpo.optimizer import LossScale
from tests.trainer.training.grpo import tiny_models
from tests.trainer.training.grpo.tiny import Spy, make_trainer, record, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MODELS = {"qwen3": tiny_model, "qwen3.5": lambda: tiny_models.tiny("qwen3.5").eval()}


def relative(first, second) -> float:
    both = [torch.cat([gradients[name].flatten() for name in sorted(first)]) for gradients in (first, second)]
    return float((both[0] - both[1]).norm() / both[0].norm())


def trained(model, out, traces, spy=None, **config):
    """Return a trainer after its training of an adapter, and what it saw."""
    spy = spy or Spy()
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    settings = {"activation_checkpointing": True, "scale_rewards": "none"} | config
    trainer = make_trainer(model, out, lambda rows: traces, spy=spy, peft_config=lora, **settings)
    trainer.score([2, 3, 4], base=True)  # nothing has a gradient then
    trainer.train()
    return trainer, spy


def smaller(traces, factor):
    """Return the traces with rewards, and so advantages, times a factor."""
    traces = copy.deepcopy(traces)
    for trace in traces:
        trace.reward *= factor
    return traces


@pytest.mark.parametrize("way", [{"forward": "segments"}, {"forward": "padded"}])
@pytest.mark.parametrize("family", MODELS)
def test_gradients_in_float16_are_those_of_float32_however_small_advantages_are(tmp_path, family, way, caplog):
    model = MODELS[family]()
    traces = record(model, random.Random(0))
    _, exact = trained(model, tmp_path, traces, **way)
    for factor in (1.0, 1e-5):
        trainer, low = trained(model.half(), tmp_path, smaller(traces, factor), **way)
        found = {name: gradient / factor for name, gradient in low.gradients[0].items()}
        assert relative(exact.gradients[0], found) < 0.04  # the hybrid's large weights amplify what float16 rounds
        assert trainer.state.log_history[0]["steps_skipped"] == 0
        model = model.float()
    assert "run as padded rows" not in caplog.text


def test_without_the_scale_small_advantages_would_underflow(tmp_path, monkeypatch):
    model = tiny_model()
    traces = smaller(record(model, random.Random(0)), 1e-5)
    _, exact = trained(model, tmp_path, traces)
    monkeypatch.setattr(LossScale, "watch", lambda self, logprobs: None)
    _, low = trained(model.half(), tmp_path, traces)
    assert relative(exact.gradients[0], low.gradients[0]) > 0.5


@pytest.mark.parametrize(
    ("lora", "bf16", "message"),
    [
        (None, False, r"embed_tokens\.weight is trained in float16, whose range is too small"),
        (LoraConfig(r=4, target_modules="all-linear"), True, "has the type float16, but bf16=True: set bf16=False"),
    ],
)
def test_what_cannot_be_trained_in_float16_is_refused(tmp_path, lora, bf16, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_model().half(), tmp_path, lambda rows: [], peft_config=lora, bf16=bf16)


def test_passes_of_different_scales_add_up():
    weight = Parameter(torch.tensor([3.0, 5.0]))
    scale = LossScale([weight])
    for size in (1e-9, 7.0, 0.0, 3e-5):
        logprobs = weight * 1.0
        scale.watch(logprobs)
        (size * logprobs).sum().backward()
    scale.finish()
    assert weight.grad.tolist() == pytest.approx([7.0 + 1e-9 + 3e-5] * 2, rel=1e-7)


def test_without_gradients_nothing_is_scaled():
    LossScale([Parameter(torch.ones(2))]).finish()
