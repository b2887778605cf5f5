"""Several training processes: an error in one ends all, and gradients are averaged once for each optimizer step.

Objects travel over a gloo group of their own: the main process may roll out for hours while the others wait, with no
kernel of their device, and they are notified at once when it ends. Tensors travel over the default group.
"""

import atexit
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import compress, zip_longest
from socket import gethostname
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from rolltap.addons.errors import InputError, RankError

T = TypeVar("T")

_FAILED = "rolltap: failed"
_PATIENCE = timedelta(days=365)
"""Time that a process waits for the others' objects: longer than the rollouts of any batch."""


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
    outcome: list[Any] = [None, None, None]  # the result, the error's message, and what to call `everywhere`
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

    while True:
        try:
            dist.broadcast_object_list(outcome, group=object_group())
        except RuntimeError as error:
            raise failure or lost(error) from error
        if is_main() or outcome[2] is None:
            break
        everywhere(*outcome[2])
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise RankError(outcome[1])
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
        dist.broadcast_object_list([None, None, (name, *args)], group=object_group())
    return as_one(lambda: _callable[name](*args))


def together(function: Callable[[], T]) -> T:
    """Call `function` on each process. If it fails on any of them, raise on all. Collective.

    `function` must not call collective operations.
    """
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:
        failure = error
    try:
        messages = gathered(failure and _message(failure))
    finally:
        if failure is not None:
            raise failure
    for message in filter(None, messages):
        raise RankError(message)
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
            failure = lost(error)
        with suppress(RuntimeError):  # the store ends with its process
            if store.check([_FAILED]):
                failure = RankError(store.get(_FAILED).decode())
            elif failure is error:
                store.set(_FAILED, _message(error))
        _disconnect()
        raise failure from (None if failure is error else error)


def gathered(value: T) -> list[T]:
    """Return the `value` of each process, which is pickled. Collective. Raises `RankError` if another one ended."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(values, value, group=object_group())
    except RuntimeError as error:
        raise lost(error) from error
    return values


def require_same(parameters: Iterable[tuple[str, Parameter]]) -> None:
    """Raise `InputError` on every process unless all have parameters of the same names, shapes and types. Collective.

    Otherwise they would wait for each other for ever when they exchange tensors.
    """
    everybodys = gathered([f"{name} {[*parameter.shape]} {parameter.dtype}" for name, parameter in parameters])
    for rank, other in enumerate(everybodys):
        for first, here in zip_longest(everybodys[0], other, fillvalue="no more"):
            if first != here:
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
    present = [any(have) for have in zip(*gathered([weight.grad is not None for weight in trained]), strict=True)]
    gradients = []
    for parameter in compress(trained, present):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        gradients.append(parameter.grad)
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    for gradient in gradients:
        gradient /= dist.get_world_size()


@cache
def object_group() -> dist.ProcessGroup:
    """Return the group over which objects travel."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_PATIENCE)
    atexit.register(_disconnect)
    return group


def _disconnect() -> None:
    """End all groups and join their threads: one of gloo's that drops a tensor in an interpreter that is ending would
    abort the process ("terminate called without an active exception")."""
    object_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _message(error: Exception) -> str:
    rank = dist.get_rank() if several() else 0
    return f"process {rank} on {gethostname()} failed: {type(error).__name__}: {error}"


def lost(error: Exception) -> RankError:
    """Return the error of a process that cannot reach another one."""
    return RankError(f"another training process ended: its own output says why ({error})")
