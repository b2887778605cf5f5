"""The gradient is TRL's own, whatever the strategy, the split into micro-batches and processes, and
the way of rows.

Differences are relative to the gradient of TRL's trainer on merged traces in one padded batch, in
float32.
"""

from functools import cache

import pytest
import torch

from rolltap.trainer.training.step.config import TraceGRPOConfig
from tests.deep import DEEP, cases
from tests.trainer.training.step.gloo import run_two
from tests.trainer.training.step.invariance import (
    ENTROPIES,
    FORWARDS,
    LOSSES,
    OPTIONS,
    TOGETHER,
    WAYS,
    case,
)
from tests.trainer.training.step.tiny import relative_difference

TOLERANCE = {"attention": 1e-5, "hybrid": 5e-4}
"""That of the hybrid is its rounding: with chunks of another size the formula of linear attention
differs by 2e-4, and a step before doubles it."""


@cache
def stock(name: str, option: str) -> dict[str, torch.Tensor]:
    """Return TRL's gradient of a case with an option."""
    return case(name).stock_gradients(**(OPTIONS | ENTROPIES)[option])


@cache
def of_an_adapter(option: str) -> dict[str, torch.Tensor]:
    return case(OFF_POLICY).gradients(lora=True, forward="padded", **OPTIONS[option])


HYBRID_OPTIONS = cases(["dapo", "grpo, sequences", "token mask", "two iterations"], 0, 1)
"""Options that are enough for the second model: what computes the log-probabilities knows nothing
of options. In the short suite their ways are those of packed rows."""
OFF_POLICY = "attention, off policy"
SEQUENCES = [option for option in OPTIONS if option.endswith(", sequences")]
"""Losses with importance ratios of sequences, which are TRL's: one is enough for the short suite.
"""
CASES = [(OFF_POLICY, option) for option in OPTIONS if option not in SEQUENCES]
CASES += [(OFF_POLICY, option) for option in cases(SEQUENCES, 1)]
CASES += [("hybrid, off policy", option) for option in HYBRID_OPTIONS]
if DEEP:
    # on policy the options change less
    CASES += [(name.replace("off", "on"), option) for name, option in CASES]


@pytest.mark.parametrize(("name", "option"), CASES)
def test_every_way_gives_trls_gradient(name, option):
    # the short suite takes the ways in turn, one for each option; the deep one all
    turn = CASES.index((name, option)) % len(WAYS)
    for way in cases(WAYS, turn):
        options = {"forward": "padded"} | OPTIONS[option] | WAYS[way]
        found = case(name).gradients(**options)
        kind, _, _ = name.partition(",")
        assert relative_difference(stock(name, option), found) < TOLERANCE[kind], way


@pytest.mark.parametrize("option", ENTROPIES)
@pytest.mark.parametrize("loss", LOSSES if DEEP else ["dapo", "grpo"])
def test_losses_with_entropies_are_trls_of_a_step_of_one_micro_batch(option, loss):
    options = {"loss_type": loss, **LOSSES[loss], **ENTROPIES[option]}
    wanted = case(OFF_POLICY).stock_gradients(**options)
    for forward in FORWARDS:
        found = case(OFF_POLICY).gradients(forward=forward, **options)
        assert relative_difference(wanted, found) < TOLERANCE["attention"], forward


@pytest.mark.parametrize("option", ["dapo", "reference"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_gradient_of_an_adapter(option, way):
    options = {"forward": "padded"} | OPTIONS[option] | WAYS[way]
    found = case(OFF_POLICY).gradients(lora=True, **options)
    assert relative_difference(of_an_adapter(option), found) < TOLERANCE["attention"]


def test_every_field_that_changes_the_gradient_is_set():
    fields = TraceGRPOConfig.__annotations__.keys() - {
        "offload_checkpoints",
        "model_init_kwargs",
        "warmup_steps",
        "sharding",
        "routing",
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "teacher_share",
    }
    for values in (*OPTIONS.values(), *ENTROPIES.values(), *WAYS.values()):
        fields -= values.keys()
    assert not fields


def test_options_are_not_the_same_gradient_by_another_name():
    """Options that change nothing here would prove nothing."""
    name = OFF_POLICY
    options = {option for case_name, option in CASES if case_name == name} | ENTROPIES.keys()
    for option in options - {"dapo", "bnpo"}:
        assert relative_difference(stock(name, "dapo"), stock(name, option)) > 1e-3, option


def test_two_processes_compute_the_gradient_of_one(tmp_path):
    run_two("tests.trainer.training.step.invariance", str(tmp_path / "two.pt"))
    two = torch.load(tmp_path / "two.pt")
    assert two.keys() == {(forward, option) for forward in FORWARDS for option in TOGETHER}
    for (forward, option), gradient in two.items():
        one = stock(OFF_POLICY, option)
        assert relative_difference(one, gradient) < TOLERANCE["attention"], (forward, option)
