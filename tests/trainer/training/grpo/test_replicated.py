"""Trainings on two gloo ranks, and their checkpoints, against those of one."""

import pytest
import torch

from tests.trainer.training.grpo.replicated import CASES, RESUMED, resumed, two_steps, whole
from tests.trainer.training.grpo.tiny import largest_difference
from tests.trainer.training.grpo.two_processes import run_two

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the weights of one rank, of rank 0 of two, and of rank 1 of two."""
    folder = tmp_path_factory.mktemp("replicated")
    one = {"two steps": two_steps(folder, 1), "whole": whole(folder, 1), "resumed": resumed(folder, 1, 1)}
    run_two("tests.trainer.training.grpo.replicated", str(folder))
    one["resumed from two"] = resumed(folder, 2, 1)
    return one, torch.load(folder / "rank-0.pt"), torch.load(folder / "rank-1.pt"), folder


@pytest.mark.parametrize("case", CASES)
def test_two_steps_of_two_ranks_are_those_of_one(found, case):
    one, first, second, _ = found
    assert largest_difference(first["two steps"][case], second["two steps"][case]) == 0
    assert largest_difference(one["two steps"][case], first["two steps"][case]) < 1e-5


@pytest.mark.parametrize("case", RESUMED)
def test_a_training_that_is_resumed_is_the_training_without_a_break(found, case):
    one, first, second, _ = found
    assert largest_difference(one["whole"][case], one["resumed"][case]) == 0
    assert largest_difference(first["whole"][case], first["resumed"][case]) == 0
    assert largest_difference(second["whole"][case], first["resumed"][case]) == 0


@pytest.mark.parametrize("case", RESUMED)
def test_another_number_of_ranks_may_resume_it(found, case):
    one, first, second, _ = found
    assert largest_difference(one["whole"][case], one["resumed from two"][case]) < 1e-5
    assert largest_difference(one["whole"][case], first["resumed from one"][case]) < 1e-5
    assert largest_difference(second["resumed from one"][case], first["resumed from one"][case]) == 0


def test_a_gradient_that_is_no_number_on_one_rank_skips_the_step_of_all(found):
    _, first, second, _ = found
    for ours, others in zip(first["spoiled"], second["spoiled"], strict=True):
        assert largest_difference(ours, others) == 0
        assert all(weight.isfinite().all() for weight in ours.values())
    assert largest_difference(*first["spoiled"]) > 0


def test_each_rank_saves_its_own_share_of_a_full_model(found):
    folder = found[-1]
    for case, shares in zip(RESUMED, [2, 2, 0], strict=True):
        names = {file.name for file in (folder / "2" / case / "checkpoint-2").glob("optimizer*")}
        assert names == {"optimizer.pt", *(f"optimizer-{rank}.pt" for rank in range(shares))}
