"""The gradient depends neither on the strategy nor on the split into micro-batches and processes nor on the forward.

Differences are relative to the gradient of merged traces in one padded batch, in float32.
"""

from functools import cache

import pytest
import torch

from rolltap.trainer.training.grpo.config import TraceGRPOConfig
from tests.deep import DEEP
from tests.trainer.training.grpo.gloo import run_two
from tests.trainer.training.grpo.invariance import FORWARDS, OPTIONS, TOGETHER, WAYS, cases
from tests.trainer.training.grpo.tiny import relative_difference

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOLERANCE = {"attention": 1e-5, "hybrid": 2e-4}


@pytest.fixture(scope="module")
def case_by_name():
    return dict(cases())


@pytest.fixture(scope="module")
def padded(case_by_name):
    """Return a function from the names of a case and an option to the gradient in one padded batch."""
    return cache(lambda name, option: case_by_name[name].gradients(**OPTIONS[option], forward="padded"))


HYBRID_OPTIONS = ("dapo", "mask", "reference of LoRA", "two iterations")
"""Options that are enough for the second model: what computes the log-probabilities knows nothing of options."""
OFF_POLICY = [("attention, off policy", option) for option in OPTIONS]
OFF_POLICY += [("hybrid, off policy", option) for option in HYBRID_OPTIONS]
ON_POLICY = [(name.replace("off", "on"), option) for name, option in OFF_POLICY]
# on policy the options change less. The short suite takes the ways in turn, one for each option; the deep one all
CASES = [
    (name, option, WAYS if DEEP else [list(WAYS)[turn % len(WAYS)]])
    for turn, (name, option) in enumerate(OFF_POLICY + (ON_POLICY if DEEP else []))
]


@pytest.mark.parametrize(("name", "option", "ways"), CASES)
def test_every_way_gives_the_same_gradient(case_by_name, padded, name, option, ways):
    for way in ways:
        found = case_by_name[name].gradients(**{"forward": "padded"} | OPTIONS[option] | WAYS[way])
        assert relative_difference(padded(name, option), found) < TOLERANCE[name.partition(",")[0]], way


def test_every_field_that_changes_the_gradient_is_set():
    set_by_cases = {name for values in (*OPTIONS.values(), *WAYS.values()) for name in values}
    others = {"memory_gib", "offload_states", "model_init_kwargs", "warmup_steps", "sharding", "routing"}
    others |= {"learning_rate", "weight_decay", "max_grad_norm", "teacher_share"}
    assert set_by_cases >= TraceGRPOConfig.__annotations__.keys() - others


def test_options_are_not_the_same_gradient_by_another_name(padded):
    """Options that change nothing here would prove nothing."""
    name = "attention, off policy"
    for option, values in OPTIONS.items():
        if option not in ("dapo", "LoRA"):
            plain = padded(name, "LoRA" if values.get("lora") else "dapo")
            assert relative_difference(plain, padded(name, option)) > 1e-3, option


def test_two_processes_compute_the_gradient_of_one(padded, tmp_path):
    run_two("tests.trainer.training.grpo.invariance", str(tmp_path / "two.pt"))
    two = torch.load(tmp_path / "two.pt")
    assert two.keys() == {(forward, option) for forward in FORWARDS for option in TOGETHER}
    for (forward, option), gradient in two.items():
        one = padded("attention, off policy", option)
        assert relative_difference(one, gradient) < TOLERANCE["attention"], (forward, option)
