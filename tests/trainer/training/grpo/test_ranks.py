"""Several training processes, as gloo ranks in child processes."""

import json
import os
from socket import gethostname

import pytest
import torch

from rolltap.trainer.training.grpo.ranks import (
    average_gradients,
    gathered,
    is_main,
    on_main,
    require_same,
    send_weights,
    several,
    together,
)
from tests.trainer.training.grpo.gloo import run_ranks, run_two


def fail_on(rank, bad):
    if rank == bad:
        raise ValueError(f"no memory on {rank}")
    return rank


def test_the_result_or_the_error_of_the_main_process_is_everybodys():
    assert run_ranks(lambda rank: on_main(lambda: {"from": rank})) == [{"from": 0}, {"from": 0}]
    outcomes = run_ranks(lambda rank: on_main(lambda: fail_on(rank, 0)))
    why = f"process 0 on {gethostname()} failed: ValueError: no memory on 0"
    assert outcomes == ["ValueError: no memory on 0", f"RankError: {why}"]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_any_process_ends_all(bad):
    outcomes = run_ranks(lambda rank: together(lambda: fail_on(rank, bad)))
    expected = [f"RankError: process {bad} on {gethostname()} failed: ValueError: no memory on {bad}"] * 2
    expected[bad] = f"ValueError: no memory on {bad}"
    assert outcomes == expected


@pytest.mark.parametrize("collective", [on_main, together])
@pytest.mark.parametrize("dead", [0, 1])
def test_the_others_hear_of_a_process_that_ends(collective, dead):
    def function(rank):
        together(lambda: None)  # the group is there
        if rank == dead:
            os._exit(9)
        return [collective(lambda: None) for _ in range(2)]

    survivor = run_ranks(function, dead=[dead])[1 - dead]
    assert survivor.startswith("RankError: another training process ended: its own output says why")


def test_an_error_that_cannot_be_told_is_still_raised():
    def function(rank):
        together(lambda: None)
        if rank == 1:
            os._exit(9)
        return together(lambda: fail_on(rank, 0))

    assert run_ranks(function, dead=[1])[0] == "ValueError: no memory on 0"


def test_each_process_has_the_values_of_all_and_only_rank_0_is_the_main_process():
    assert is_main()
    found = run_ranks(lambda rank: (is_main(), together(lambda: rank), gathered(rank == 1)))
    assert found == [(True, 0, [False, True]), (False, 1, [False, True])]


def test_gradients_become_their_mean_and_a_missing_one_counts_as_zero():
    def average(rank):
        weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
        weights.append(torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
        weights.append(torch.nn.Parameter(torch.zeros(2), requires_grad=False))
        for weight, gradient in zip(weights, [rank, 2.0, None if rank else 4.0, None, rank], strict=False):
            if gradient is not None:
                weight.grad = torch.full_like(weight, gradient)
        average_gradients(weights)
        return [None if weight.grad is None else weight.grad.tolist() for weight in weights]

    expected = [[0.5] * 3, [2.0] * 3, [2.0] * 3, None, [0.5] * 2, None]
    assert run_ranks(average) == [expected, expected]


def test_gradients_of_16_bits_weights_are_averaged_in_float32():
    def average(rank):
        weights = [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
        for weight in weights:
            weight.grad_dtype = torch.float32
        weights[rank].grad = torch.full((2,), 1 + 2.0**-20)
        average_gradients(weights)
        return [weight.grad.tolist() for weight in weights]

    assert run_ranks(average) == [[[0.5 + 2.0**-21] * 2] * 2] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_sent_by_the_process_that_has_them(dtype):
    def send(rank):
        weights = [torch.nn.Parameter(torch.full((2, 2), 10.0 * rank + i, dtype=dtype)) for i in range(2)]
        send_weights(zip(weights, [1, 0], strict=True))
        return [weight[0, 0].item() for weight in weights]

    assert run_ranks(send) == [[10.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("shape", "number", "message"),
    [
        (3, 1, r"process 0 has a0 [2] torch.float32, process 1 has a0 [3] torch.float32"),
        (2, 2, "process 0 has no more, process 1 has a1 [2]"),
    ],
)
def test_processes_with_other_parameters_do_not_wait_for_each_other(shape, number, message):
    def check(rank):
        sizes = [shape] * number if rank else [2]
        require_same((f"a{i}", torch.nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes))

    for outcome in run_ranks(check):
        assert outcome.startswith("InputError: the processes train different models: ")
        assert message in outcome


def test_a_process_alone_waits_for_nobody():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    average_gradients([weight])
    assert not several()
    assert weight.grad.tolist() == [1, 1]
    assert on_main(lambda: 1) == together(lambda: 1) == 1


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what each of two processes says, in order of their ranks: see `fail_in_one.py`."""
    folder = tmp_path_factory.mktemp("two")
    run_two("tests.trainer.training.grpo.fail_in_one", str(folder))
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def test_processes_find_each_other_before_there_is_a_trainer(said):
    assert [each["meeting"] for each in said] == ["rank 0 of 2"] * 2


@pytest.mark.parametrize(
    ("place", "own", "first"),
    [
        ("rollout", "OSError: the disk is full", 0),
        ("forward", "OutOfMemoryError: no memory", 1),
        ("sharded", "OutOfMemoryError: no memory", 1),
    ],
)
def test_a_training_ends_on_all_processes_with_the_error_of_one(said, place, own, first):
    assert said[first][place] == own
    assert said[1 - first][place] == f"RankError: process {first} on {gethostname()} failed: {own}"


def test_a_training_of_different_models_ends_before_they_wait_for_each_other(said):
    why = "process 0 has lm_head.weight [32, 32] torch.float32, process 1 has lm_head.weight [33, 32]"
    assert [why in each["model"] for each in said] == [True, True]
