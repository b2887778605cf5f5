"""Steps whose gradients are not finite are skipped, whatever the type of the weights."""

import math
import random

import pytest
import torch
from peft import LoraConfig

from rolltap.trainer.training.grpo.optimizer import LossScale
from tests.trainer.training.grpo.replicated import spoil
from tests.trainer.training.grpo.tiny import Spy, make_trainer, record, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def changed(spy):
    """Return the names of the weights that the second step changed."""
    first, second = spy.weights
    return {name for name in first if not torch.equal(first[name], second[name])}


def steps_skipped(trainer):
    return [entry["steps_skipped"] for entry in trainer.state.log_history if "steps_skipped" in entry]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("dtype", "lora"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, LORA), (torch.float16, LORA)],
)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_and_the_next_does(
    tmp_path, caplog, dtype, lora, bad
):
    model = tiny_model()
    traces = record(model, random.Random(0))
    spy = Spy()
    trainer = make_trainer(
        model.to(dtype),
        tmp_path,
        lambda rows: traces,
        spy=spy,
        peft_config=lora,
        max_steps=2,
        weight_decay=0.1,
        max_grad_norm=1.0,
    )
    begun = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    spoil(trainer, bad)
    trainer.train()
    assert spy.gradients[0] == {}
    assert all(torch.equal(begun[name], weight) for name, weight in spy.weights[0].items())
    assert changed(spy)
    assert all(weight.isfinite().all() for weight in spy.weights[1].values())
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {1}
    assert steps_skipped(trainer) == [1, 0]
    assert "step 1 was skipped: its gradients are not finite" in caplog.text


def test_a_step_that_overflows_float16_is_skipped(tmp_path, monkeypatch):
    model = tiny_model()
    traces = record(model, random.Random(0))
    scaled = LossScale._scaled
    factors = iter([1.0, 2.0**40, 1.0, 1.0])
    monkeypatch.setattr(LossScale, "_scaled", lambda self, gradient: scaled(self, gradient) * next(factors))
    spy = Spy()
    trainer = make_trainer(model.half(), tmp_path, lambda rows: traces, spy=spy, peft_config=LORA, max_steps=2)
    trainer.train()
    assert steps_skipped(trainer) == [1, 0]
    assert changed(spy)
    assert all("lora_" in name for name in changed(spy))
