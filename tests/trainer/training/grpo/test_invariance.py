"""The gradient depends neither on the strategy nor on the split into micro-batches and processes nor on the forward.

Differences are relative to the gradient of merged traces in one padded batch, in float32.
"""

import pytest
import torch

from rolltap.trainer.training.grpo.config import CHANGING
from tests.trainer.training.grpo.invariance import OPTIONS, WAYS, cases, every_option, relative_difference
from tests.trainer.training.grpo.two_processes import run_two

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOLERANCE = {"attention": 1e-5, "hybrid": 2e-4}


@pytest.fixture(scope="module")
def case_by_name():
    return dict(cases())


HYBRID_OPTIONS = ("dapo", "mask", "reference of LoRA", "two iterations")
"""Options that are enough for the second model: what computes the log-probabilities knows nothing of options."""
CASES = [
    (f"{model}, {policy} policy", option)
    for model, options in [("attention", OPTIONS), ("hybrid", HYBRID_OPTIONS)]
    for policy in ("on", "off")
    for option in options
]


@pytest.mark.parametrize(("name", "option"), CASES)
def test_every_way_gives_the_same_gradient(case_by_name, name, option):
    case, values = case_by_name[name], OPTIONS[option]
    expected = case.gradients(**values, forward="padded")
    for way in WAYS.values():
        assert (
            relative_difference(expected, case.gradients(**{"forward": "padded"} | values | way))
            < TOLERANCE[name.partition(",")[0]]
        )


def test_every_field_that_changes_the_gradient_is_set():
    set_by_cases = {name for values in (*OPTIONS.values(), *WAYS.values()) for name in values}
    assert set_by_cases >= CHANGING


def test_options_are_not_the_same_gradient_by_another_name(case_by_name):
    """Options that change nothing here would prove nothing."""
    case = case_by_name["attention, off policy"]
    plain = {lora: case.gradients(forward="padded", lora=lora) for lora in (False, True)}
    for option, values in OPTIONS.items():
        if values not in ({}, {"lora": True}):
            other = case.gradients(**values, forward="padded")
            assert relative_difference(plain[bool(values.get("lora"))], other) > 1e-3, option


@pytest.mark.parametrize("forward", ["padded", "segments"])
def test_two_processes_compute_the_gradient_of_one(tmp_path, forward):
    run_two("tests.trainer.training.grpo.invariance", str(tmp_path / "two.pt"), forward)
    two, one = torch.load(tmp_path / "two.pt"), every_option("padded")
    assert two.keys() == one.keys()
    for name in one:
        assert relative_difference(one[name], two[name]) < TOLERANCE[name.partition(",")[0]], name
