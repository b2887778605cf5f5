"""The gradient is TRL's own, whatever the strategy, the split into micro-batches and processes, and the way of rows.

Differences are relative to the gradient of TRL's trainer on merged traces in one padded batch, in float32.
"""

from functools import cache

import pytest
import torch

from rolltap.trainer.training.step.config import TraceGRPOConfig
from tests.deep import DEEP
from tests.trainer.training.step.gloo import run_two
from tests.trainer.training.step.invariance import ENTROPIES, FORWARDS, LOSSES, OPTIONS, TOGETHER, WAYS, cases
from tests.trainer.training.step.tiny import relative_difference

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOLERANCE = {"attention": 1e-5, "hybrid": 5e-4}
"""That of the hybrid is its rounding: with chunks of another size the formula of linear attention differs by 2e-4, and
a step before doubles it."""


@pytest.fixture(scope="module")
def case_by_name():
    return dict(cases())


@pytest.fixture(scope="module")
def stock(case_by_name):
    """Return a function from the names of a case and an option to TRL's gradient."""
    return cache(lambda name, option: case_by_name[name].stock_gradients(**(OPTIONS | ENTROPIES)[option]))


HYBRID_OPTIONS = ("dapo", "grpo, sequences", "token mask", "two iterations")
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
def test_every_way_gives_trls_gradient(case_by_name, stock, name, option, ways):
    for way in ways:
        found = case_by_name[name].gradients(**{"forward": "padded"} | OPTIONS[option] | WAYS[way])
        assert relative_difference(stock(name, option), found) < TOLERANCE[name.partition(",")[0]], way


@pytest.mark.parametrize("option", ENTROPIES)
@pytest.mark.parametrize("loss", LOSSES if DEEP else ["dapo", "grpo"])
def test_losses_with_entropies_are_trls_of_a_step_of_one_micro_batch(case_by_name, option, loss):
    case = case_by_name["attention, off policy"]
    options = {"loss_type": loss, **LOSSES[loss], **ENTROPIES[option]}
    wanted = case.stock_gradients(**options)
    for forward in FORWARDS:
        found = case.gradients(forward=forward, **options)
        assert relative_difference(wanted, found) < TOLERANCE["attention"], forward


@pytest.mark.parametrize("options", [{}, {"beta": 0.3}])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_gradient_of_an_adapter(case_by_name, options, way):
    case = case_by_name["attention, off policy"]
    one = case.gradients(lora=True, forward="padded", **options)
    found = case.gradients(lora=True, **{"forward": "padded"} | options | WAYS[way])
    assert relative_difference(one, found) < TOLERANCE["attention"]


def test_every_field_that_changes_the_gradient_is_set():
    set_by_cases = {name for values in (*OPTIONS.values(), *ENTROPIES.values(), *WAYS.values()) for name in values}
    others = {"offload_checkpoints", "model_init_kwargs", "warmup_steps", "sharding", "routing"}
    others |= {"learning_rate", "weight_decay", "max_grad_norm", "teacher_share"}
    assert set_by_cases >= TraceGRPOConfig.__annotations__.keys() - others


def test_options_are_not_the_same_gradient_by_another_name(stock):
    """Options that change nothing here would prove nothing."""
    name = "attention, off policy"
    for option in (OPTIONS | ENTROPIES).keys() - {"dapo", "bnpo"}:
        assert relative_difference(stock(name, "dapo"), stock(name, option)) > 1e-3, option


def test_two_processes_compute_the_gradient_of_one(stock, tmp_path):
    run_two("tests.trainer.training.step.invariance", str(tmp_path / "two.pt"))
    two = torch.load(tmp_path / "two.pt")
    assert two.keys() == {(forward, option) for forward in FORWARDS for option in TOGETHER}
    for (forward, option), gradient in two.items():
        one = stock("attention, off policy", option)
        assert relative_difference(one, gradient) < TOLERANCE["attention"], (forward, option)
