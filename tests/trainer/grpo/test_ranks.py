"""Several training processes, as gloo ranks in child processes."""

import multiprocessing
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist

from rolltap.trainer.grpo.ranks import anywhere, average_gradients, on_main, several, together
from tests.trainer.grpo.two_processes import run_two

CPU = torch.device("cpu")


def run_ranks(function, number=2):
    """Run `function(rank)` as each rank of a gloo group. Return per rank its result, or "Error: message"."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(function, rank, number, port, results)) for rank in range(number)]
    for rank in ranks:
        rank.start()
    try:
        found = dict(results.get(timeout=120) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    return [found[rank] for rank in range(number)]


def _rank(function, rank, number, port, results):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=number)
    try:
        outcome = function(rank)
    except Exception as error:
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {error}"
    results.put((rank, outcome))
    dist.barrier()


def fail_on(rank, bad):
    if rank == bad:
        raise ValueError(f"no memory on {rank}")
    return rank


def test_the_result_of_the_main_process_is_everybodys():
    assert run_ranks(lambda rank: on_main(lambda: {"from": rank})) == [{"from": 0}, {"from": 0}]


def test_an_error_of_the_main_process_ends_all():
    outcomes = run_ranks(lambda rank: on_main(lambda: fail_on(rank, 0)))
    assert outcomes == ["ValueError: no memory on 0", "RankError: process 0 failed: ValueError: no memory on 0"]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_any_process_ends_all(bad):
    outcomes = run_ranks(lambda rank: together(lambda: fail_on(rank, bad), CPU))
    expected = [f"RankError: process {bad} failed: ValueError: no memory on {bad}"] * 2
    expected[bad] = f"ValueError: no memory on {bad}"
    assert outcomes == expected


def test_without_an_error_each_process_has_its_own_result():
    assert run_ranks(lambda rank: together(lambda: rank, CPU)) == [0, 1]


def test_what_holds_on_one_process_holds_anywhere():
    assert run_ranks(lambda rank: (anywhere(rank == 1, CPU), anywhere(False, CPU))) == [(True, False)] * 2


def test_gradients_become_their_mean_and_a_missing_one_counts_as_zero(monkeypatch):
    monkeypatch.setattr("rolltap.trainer.grpo.ranks._BUCKET", 5)

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


def test_a_process_alone_waits_for_nobody():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    average_gradients([weight])
    assert not several()
    assert weight.grad.tolist() == [1, 1]
    assert on_main(lambda: 1) == together(lambda: 1, CPU) == 1


@pytest.mark.parametrize(
    ("place", "own", "first"),
    [("rollout", "OSError: the disk is full", 0), ("forward", "OutOfMemoryError: no memory", 1)],
)
def test_a_training_ends_on_all_processes_with_the_error_of_one(tmp_path, place, own, first):
    run_two("tests.trainer.grpo.fail_in_one", str(tmp_path), place)
    assert (tmp_path / str(first)).read_text() == own
    assert (tmp_path / str(1 - first)).read_text() == f"RankError: process {first} failed: {own}"
