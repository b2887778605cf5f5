"""Several training processes: an error in one ends all, and gradients are averaged once for each optimizer step.

Objects travel over a gloo group of their own. The main process may roll out for hours while the others wait: they hold
no kernel of their device then, and are notified at once when it ends. Tensors travel over the default group.
"""

import atexit
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import TrainingArguments

from rolltap.addons.errors import InputError, RankError

T = TypeVar("T")

_BUCKET = 64 * 2**20
"""Number of values that one all-reduce averages."""
_FAILED = "rolltap: failed"
_PATIENCE = timedelta(days=365)
"""Time that a process waits for the others' objects: longer than the rollouts of any batch."""


def initialise(args: TrainingArguments) -> None:
    """Let the processes find each other, as `args` says, so that collective functions work before there is a trainer.

    With one process, or when they have found each other, nothing happens. Collective.
    """
    _ = args.device  # reading it makes the default group
    connect()


def connect() -> None:
    """Make the group over which objects travel, if there is a default group. Collective."""
    if several():
        object_group()


def several() -> bool:
    """Return True with more than one training process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_main() -> bool:
    """Return True on the main process, which rolls out, publishes and writes. It is the only one, or rank 0."""
    return not several() or dist.get_rank() == 0


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process. Return its result, or raise its error, on every process.

    A result is pickled for the others. Raises `RankError` where another process failed or ended. Collective.
    """
    if not several():
        return function()
    global _leads
    outcome: list[Any] = [None, None, None]
    failure: Exception | None = None
    if _leads := is_main():
        try:
            outcome[0] = function()
        except Exception as error:
            if not several():  # `as_one` has told the others
                raise
            failure, outcome[1] = error, _message(error)
        finally:
            _leads = False

    def tell() -> None:
        try:
            dist.broadcast_object_list(outcome, group=object_group())
        except RuntimeError as error:
            raise failure or _lost(error) from error

    tell()
    while not is_main() and outcome[2] is not None:
        _with_all(*outcome[2])
        tell()
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise RankError(f"process 0 failed: {outcome[1]}")
    result: T = outcome[0]
    return result


_callable: dict[str, Callable[..., Any]] = {}
_leads = False
"""True on the main process within `on_main`, while the others wait."""


def let_call(name: str, function: Callable[..., Any]) -> None:
    """Let `everywhere` call a collective function by this name."""
    _callable[name] = function


def everywhere(name: str, *args: Any) -> Any:
    """Call a function of `let_call` on all processes, and return its result on this one.

    The main process calls it within `on_main`, whose others take part, or all processes call it.
    """
    if _leads:
        dist.broadcast_object_list([None, None, (name, args)], group=object_group())
    return _with_all(name, args)


def _with_all(name: str, args: Sequence[Any]) -> Any:
    return as_one(lambda: _callable[name](*args))


def together(function: Callable[[], T]) -> T:
    """Call `function` on each process. If it fails on any of them, raise on all. Collective.

    `function` must not call collective operations.
    """
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        if not several():
            raise
        failure = error
    try:
        messages = gathered(failure and _message(failure))
    except RankError:
        if failure is not None:
            raise failure from None
        raise
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message:
            raise RankError(f"process {rank} failed: {message}")
    return result


def as_one(function: Callable[[], T]) -> T:
    """Call a collective `function` on each process. If it fails on any of them, raise on all.

    The one that fails leaves the groups: the others wait for it in operations which then end. NCCL may not notice it:
    then the launcher, or its own timeout, ends the others.
    """
    if not several():
        return function()
    store = dist.distributed_c10d._get_default_store()
    try:
        return function()
    except Exception as error:
        if isinstance(error, RankError) or not several():  # within another call, which has left the groups
            raise
        failure: Exception = error
        if isinstance(error, RuntimeError) and "gloo" in str(error):
            failure = _lost(error)
        with suppress(RuntimeError):  # the store ends with its process
            if store.check([_FAILED]):
                failure = RankError(store.get(_FAILED).decode())
            elif failure is error:
                store.set(_FAILED, f"process {dist.get_rank()} failed: {_message(error)}")
        _disconnect()
        raise failure from (None if failure is error else error)


def anywhere(value: bool) -> bool:
    """Return True if `value` is true on any process. Collective."""
    return any(gathered(value))


def gathered(value: T) -> list[T]:
    """Return the `value` of each process, which is pickled. Collective. Raises `RankError` if another one ended."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(values, value, group=object_group())
    except RuntimeError as error:
        raise _lost(error) from error
    return values


def require_same(parameters: Iterable[tuple[str, Parameter]]) -> None:
    """Raise `InputError` on every process unless all have parameters of the same names, shapes and types. Collective.

    Otherwise they would wait for each other for ever when they exchange tensors.
    """
    own = [f"{name} {[*parameter.shape]} {parameter.dtype}" for name, parameter in parameters]
    for rank, other in enumerate(everybodys := gathered(own)):
        if other != everybodys[0]:
            first, here = next(
                ((a, b) for a, b in zip(everybodys[0], other, strict=False) if a != b),
                (f"{len(everybodys[0])} trained parameters", f"{len(other)}"),
            )
            raise InputError(
                f"the processes train different models: process 0 has {first}, process {rank} has {here}: load the "
                "same folder, with the same adapter and dtype, on each"
            )


def send_weights(parameters: Iterable[tuple[Parameter, int]]) -> None:
    """Overwrite each parameter with that of the given rank. Collective."""
    if several():
        for work in [dist.broadcast(weight.detach(), src=rank, async_op=True) for weight, rank in parameters]:
            work.wait()


def average_gradients(parameters: Iterable[Parameter]) -> None:
    """Replace each gradient by its mean over the processes. A process without a gradient counts as 0. Collective.

    All processes have the same parameters. A parameter without a gradient on any process keeps None.
    """
    if not several():
        return
    # those that are sharded have been averaged in the backward pass
    trained = [weight for weight in parameters if weight.requires_grad and not isinstance(weight, DTensor)]
    if not trained:
        return
    present = torch.tensor([parameter.grad is not None for parameter in trained], device=trained[0].device).int()
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    gradients = []
    for parameter, somewhere in zip(trained, present.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        # one gradient alone is not copied: that of the embeddings takes gigabytes
        flat = torch.cat([gradient.flatten() for gradient in bucket]) if len(bucket) > 1 else bucket[0].flatten()
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


@cache
def object_group() -> dist.ProcessGroup:
    """Return the group over which objects travel."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_PATIENCE)
    atexit.register(_disconnect)
    return group


def _disconnect() -> None:
    """End all groups and join their threads.

    One of gloo's threads that drops the last reference to a tensor asks for the interpreter's lock. In an interpreter
    that is ending it is killed for that, and the process aborts ("terminate called without an active exception").
    """
    object_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _lost(error: Exception) -> RankError:
    return RankError(f"another training process ended: its own output says why ({error})")


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
