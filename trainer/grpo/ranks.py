"""Several training processes: an error in one ends all, and gradients are averaged once for each optimizer step."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rolltap.addons.errors import RankError

T = TypeVar("T")

_BUCKET = 64 * 2**20
"""Number of values that one all-reduce averages."""


def initialise(args: Any) -> None:
    """Do nothing."""


def is_main() -> bool:
    """Return True on the main process, and on the only one."""
    return not several() or dist.get_rank() == 0


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process. Return its result, or raise its error, on every process.

    A result is pickled for the others. Collective.
    """
    if not several():
        return function()
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            failure, outcome[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise RankError(f"process 0 failed: {outcome[1]}")
    result: T = outcome[0]
    return result


def together(function: Callable[[], T], device: torch.device = torch.device("cpu")) -> T:
    """Call `function` on each process. If it fails on any of them, raise on all. Collective.

    `function` must not call collective operations. `device` is where the processes communicate from.
    """
    if not several():
        return function()
    failure: Exception | None = None
    result = None
    try:
        result = function()
    except Exception as error:
        failure = error
    if anywhere(failure is not None, device):
        messages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, failure and f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        rank, message = next((rank, message) for rank, message in enumerate(messages) if message)
        raise RankError(f"process {rank} failed: {message}")
    return result  # type: ignore[return-value]


def anywhere(value: bool, device: torch.device) -> bool:
    """Return True if `value` is true on any process. Collective; `device` is where the processes communicate from."""
    if not several():
        return value
    flag = torch.tensor(int(value), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its mean over the processes. A process without a gradient counts as 0. Collective.

    All processes have the same parameters. A parameter without a gradient on any process keeps None.
    """
    if not several():
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([parameter.grad is not None for parameter in trained], device=trained[0].device).int()
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    gradients = []
    for parameter, somewhere in zip(trained, present.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def several() -> bool:
    """Return True with more than one training process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Group neighbours of the same type, up to `_BUCKET` values together."""
    buckets: list[list[Tensor]] = []
    for gradient in gradients:
        last = buckets[-1] if buckets else None
        if last and last[0].dtype == gradient.dtype and sum(g.numel() for g in last) + gradient.numel() <= _BUCKET:
            last.append(gradient)
        else:
            buckets.append([gradient])
    return buckets
