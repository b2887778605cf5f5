"""The processes of a training, as `torchrun` and `accelerate launch` start them.

The main process alone rolls out, publishes, writes and prints. The others wait for it, for hours, on the CPU.
"""

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rolltap.addons.errors import InputError
from rolltap.trainer.grpo.ranks import is_main, on_main, together
from rolltap.trainer.launcher import processes_started
from rolltap.trainer.training.recipe import Machine

T = TypeVar("T")

_LEFT = "rolltap: the main process has ended"
LEAVE_SECONDS = 25.0
"""Longest that an ending process waits for the main one to end. `torchrun` kills after 30 seconds."""
TENSOR_SECONDS = 1800
"""Longest that a process waits for another one's tensors, for example while that one computes a longer trace.

Nobody waits for rollouts here: objects travel over a gloo group of their own, which waits as long as it takes. A lost
process breaks gloo's connections, and is noticed at once. NCCL does not notice it: then the launcher, or this time,
ends the others.
"""


def join_processes() -> None:
    """Join the other processes that the launcher started, if any. Call it before anything can fail on one of them."""
    if processes_started() == 1 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TENSOR_SECONDS))
    atexit.register(_leave)


def only_on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process, and return its result. Its error is raised on every process. Collective.

    Elsewhere the result is None: use it only in a function that the main process alone calls.
    """
    results: list[Any] = [None]
    on_main(lambda: results.append(function()))
    result: T = results[-1]
    return result


def first_on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process, then on the others. An error that is everybody's is raised once. Collective.

    `function` must not call collective operations.
    """
    results: list[T] = []
    on_main(lambda: results.append(function()))
    return together(lambda: results[0] if results else function())


def require_machine(machine: Machine | None, urls: int | None = None) -> None:
    """Raise `InputError` for other numbers of processes and engine URLs than a recipe's table [machine] gives.

    `urls` None is a training without engines.
    """
    given = {} if machine is None else machine.model_dump(exclude_unset=True)
    started = processes_started()
    if (processes := given.get("processes", started)) != started:
        raise InputError(
            f"machine.processes is {processes}, but the number of training processes is {started}: start them with "
            f"`torchrun --nproc-per-node {processes} -m rolltap train ...`, or change the recipe"
        )
    if urls is not None and (engines := given.get("engines", urls)) != urls:
        raise InputError(
            f"machine.engines is {engines}, but the number of engine URLs is {urls}: give --engine as many, separated "
            "by commas, or change the recipe"
        )


def _leave() -> None:
    """Leave the other processes, the main one first: a launcher stops it as soon as another one has ended.

    So it can say why the training ends, stop the recorder and give the engines back.
    """
    store = dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError, KeyboardInterrupt):  # the store has ended with the main process, or the launcher stops
        if is_main():
            store.set(_LEFT, "")
        until = time.monotonic() + LEAVE_SECONDS
        while not store.check([_LEFT]) and time.monotonic() < until:
            time.sleep(0.05)
        dist.destroy_process_group()
