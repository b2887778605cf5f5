"""Several training processes, as gloo ranks in child processes."""

import os
import threading
from functools import partial
from socket import gethostname

import pytest
import torch
import torch.distributed as dist

from rolltap.trainer.training.step.distributed import (
    _FAILED,
    _Watch,
    abort_on_error,
    call_on_all_ranks,
    gathered,
    is_main,
    on_main,
    raise_on_all,
    register,
    require_same_parameters,
    scattered,
    several,
)
from tests.trainer.training.step.gloo import run_ranks

FAILURE = "ValueError: no memory on {}"


def fail_on(rank, bad):
    if rank == bad:
        raise ValueError(f"no memory on {rank}")
    return rank


def own_and_reported(bad, number=2):
    """Return the outcome of each rank if one fails in `fail_on`."""
    own = FAILURE.format(bad)
    outcomes = [f"RankError: process {bad} on {gethostname()} failed: {own}"] * number
    outcomes[bad] = own
    return outcomes


def total(value):
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


def total_with(own, value):
    return total(own + value)


def nothing():
    return None


def test_each_process_has_the_values_of_all_and_only_rank_0_is_the_main_process():
    def function(rank):
        own = partial(int, rank)
        return {
            "main": is_main(),
            "result": on_main(own),
            "all": raise_on_all(own),
            "gathered": gathered(rank),
        }

    assert is_main()
    first = {"main": True, "result": 0, "all": 0, "gathered": [0, 1]}
    assert run_ranks(function) == [first, first | {"main": False, "all": 1}]


class Part:
    """Counts, in each process, how many parts are unpickled there."""

    received = 0

    def __reduce__(self):
        return Part.receive, ()

    @staticmethod
    def receive():
        Part.received += 1
        return Part()


def test_each_process_receives_its_own_part_of_a_list_of_the_main_process():
    def parts():
        return [[Part()] * 3, [Part()], [Part(), Part()]]

    def receive(rank):
        return len(scattered(parts)), Part.received

    first, *others = run_ranks(receive, 3)
    assert first[0] == 3
    assert others == [(1, 1), (2, 2)]


def on_main_in_a_step(function):
    return abort_on_error(partial(on_main, function))


@pytest.mark.parametrize("function", [on_main, scattered, on_main_in_a_step])
def test_an_error_of_the_main_process_is_everybodys(function):
    def run(rank):
        return function(partial(fail_on, rank, 0))

    assert run_ranks(run) == own_and_reported(0)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_any_process_is_raised_on_all_and_they_go_on(bad):
    def function(rank):
        try:
            raise_on_all(partial(fail_on, rank, bad))
        except Exception as error:
            return f"{type(error).__name__}: {error}", total(rank)

    assert run_ranks(function) == [(outcome, 1) for outcome in own_and_reported(bad)]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_process_that_fails_between_collective_operations_does_not_leave_the_others_in_one(bad):
    def step(rank):
        total(1)
        fail_on(rank, bad)
        total(1)

    def train(rank):
        gathered(rank)
        abort_on_error(partial(step, rank))

    assert run_ranks(train, 3) == own_and_reported(bad, 3)


def test_when_all_processes_fail_they_report_one_error():
    def function(rank):
        abort_on_error(partial(fail_on, rank, rank))

    outcomes = run_ranks(function)
    assert outcomes in (own_and_reported(0), own_and_reported(1))


def scatter_nothing(_):
    return scattered(partial(list, [None, None]))


@pytest.mark.parametrize("collective", [on_main, raise_on_all, scatter_nothing])
@pytest.mark.parametrize("dead", [0, 1])
def test_the_others_hear_of_a_process_that_ends(collective, dead):
    def function(rank):
        raise_on_all(nothing)  # the group is there
        if rank == dead:
            os._exit(9)
        collective(nothing)
        collective(nothing)

    survivor = run_ranks(function, dead=[dead])[1 - dead]
    said = "RankError: another training process ended: its own output says why"
    assert survivor.startswith(said)


def test_an_error_that_cannot_be_told_is_still_raised():
    def function(rank):
        raise_on_all(nothing)
        if rank == 1:
            os._exit(9)
        raise_on_all(partial(fail_on, rank, 0))

    assert run_ranks(function, dead=[1])[0] == FAILURE.format(0)


def test_the_main_process_calls_a_collective_function_of_all_while_the_others_wait():
    def call():
        return [call_on_all_ranks("total", 10), call_on_all_ranks("total", 20)]

    def function(rank):
        register("total", partial(total_with, rank))
        return on_main(call)

    assert run_ranks(function) == [[21, 41], [21, 41]]


def test_the_others_hear_of_an_error_in_a_function_of_all():
    def function(rank):
        def fail():
            total(fail_on(rank, 1))

        register("fail", fail)
        return on_main(partial(call_on_all_ranks, "fail"))

    assert run_ranks(function) == own_and_reported(1)


def test_operations_that_do_not_notice_a_lost_process_are_aborted():
    store = dist.HashStore()
    aborted = threading.Event()
    watch = _Watch(store, aborted.set)
    watch.start()
    store.set(_FAILED, "process 7 failed")
    assert aborted.wait(120)
    assert watch.message == "process 7 failed"
    watch.stop()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3], "only 0 has a0 [2] torch.float32"),
        ([2, 2], "only 1 has a1 [2] torch.float32"),
    ],
)
def test_processes_with_other_parameters_do_not_wait_for_each_other(sizes, message):
    def check(rank):
        parameters = {}
        for i, size in enumerate(sizes if rank else [2]):
            parameters[f"a{i}"] = torch.nn.Parameter(torch.zeros(size))
        require_same_parameters(parameters.items())

    for outcome in run_ranks(check):
        assert outcome.startswith("InputError: the processes train different models: ")
        assert message in outcome


def test_a_process_alone_waits_for_nobody():
    assert not several()
    for function in (on_main, raise_on_all, abort_on_error):
        assert function(int) == 0
    assert scattered(partial(list, [1])) == 1
