"""Sharded weights: trainings of several gloo ranks are those of one, which has all weights."""

import pytest
import torch

from tests.deep import DEEP
from tests.trainer.training.grpo.gloo import run_two
from tests.trainer.training.grpo.sharded import BEGAN, CASES, RESUMED, resumed, trained
from tests.trainer.training.grpo.tiny import largest_difference, relative_difference

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning", "ignore:The following:RuntimeWarning"
)

RANKS = (2, 4) if DEEP else (2,)
ROUNDED = 2**-6
"""A unit in the last place of weights of up to 4 in bfloat16, to which one process rounds them."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what one rank trains, and what several do: number -> what rank 0 has."""
    folder = tmp_path_factory.mktemp("sharded")
    several = {}
    for number in RANKS:
        run_two("tests.trainer.training.grpo.sharded", str(folder), number=number)
        several[number] = torch.load(folder / f"{number}-0.pt")
    return trained(folder, 1), several, resumed(folder, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_and_weights_are_those_of_one_process(found, case, ranks):
    one, other = found[0][case], found[1][ranks]["trained"][case]
    near = 2e-4 if "qwen3.5" in case else 1e-5
    assert relative_difference(one.gradients[0], other["gradients"][0]) < near
    apart = largest_difference(one.weights[-1], other["weights"][-1])
    assert apart < (ROUNDED if "bfloat16" in case else near)


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_a_part_and_counts_what_it_gathers(found, case):
    one, other = found[0][case], found[1][2]["trained"][case]
    assert other["held"] < one.held * (1.2 if "bfloat16" in case else 0.8)  # float32 copies are in place of 16 bits
    assert all(gib > 0 for gib in other["gathered"])


@pytest.mark.parametrize("case", RESUMED)
def test_any_number_of_processes_resumes_it(found, case):
    one, several, by_one = found
    for weights in (by_one[case], *(several[number]["resumed"][case] for number in RANKS)):
        near = ROUNDED if "bfloat16" in case else 2e-4 if "qwen3.5" in case else 1e-5
        assert largest_difference(several[BEGAN]["trained"][case]["weights"][-1], weights) < near
    assert largest_difference(one[case].weights[-1], one[case].weights[0]) > 1e-4


@pytest.mark.parametrize("case", RESUMED)
def test_what_is_published_is_the_whole_model(found, case):
    for results in found[1].values():
        saved, whole, scores, own, dtype = results["trained"][case]["published"]
        assert saved.keys() == whole.keys()
        for name, weight in whole.items():
            assert weight.dtype == saved[name].dtype == dtype
            torch.testing.assert_close(saved[name], weight, rtol=0, atol=1e-6 if "LoRA" in case else 0)
        assert scores == pytest.approx(own, abs=1e-4 if dtype == torch.float32 else 0.1)
