"""Several training processes: they share results and weights, and an error in one of them ends all.

Objects travel over a gloo group of their own: the main process may roll out for hours while the
others wait, without a kernel on their device, and an end of the main process is noticed at once.
Tensors travel over the default group, in the collectives of DDP and FSDP2.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from socket import gethostname
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn import Parameter
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from rolltap.addons.errors import InputError, RankError
from rolltap.trainer.models.merging import without_adapter

T = TypeVar("T")

_FAILED = "rolltap: failed"
"""Key of the store of the groups: the message of the first process that left them after an
error."""
_HEARD = "rolltap: heard"
"""Key of the number of processes that have read the message."""
_PATIENCE = timedelta(days=365)
"""Time that a process waits for the others' objects: longer than the rollouts of any batch."""
_WATCH_SECONDS = 0.5
"""Time between two looks of a process whether another one has failed."""
_HEARD_SECONDS = 10.0
"""Longest that a process which failed waits for the looks of the others."""


def several() -> bool:
    """Return True with more than one training process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_main() -> bool:
    """Return True on the main process, which rolls out, publishes and writes. It is the only one,
    or rank 0."""
    return not several() or dist.get_rank() == 0


# ------------------------------------------------------------------------------ results and errors
def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process. Return its result, or raise its error, on every process.
    Collective.

    The whole result is pickled for each of the others: see `scattered`. Raises `RankError` if
    another process failed or ended.
    """
    global _leads
    if not several():
        return function()
    if not is_main():
        result: T = _follow()
        return result
    _leads = True
    try:
        result = function()
    except Exception as error:
        if several():  # else `abort_on_error` has told the others
            with suppress(RankError):
                _broadcast([None, _message(error), None])
        raise
    finally:
        _leads = False
    _broadcast([result, None, None])
    return result


_leads = False
"""True on the main process within `on_main`, while the others wait."""


def _follow() -> Any:
    """Take part in the calls of the main process, until it sends a result or the message of an
    error."""
    while True:
        result, message, call = _broadcast([None, None, None])
        if message is not None:
            raise RankError(message)
        if call is None:
            return result
        call_on_all_ranks(*call)


def _broadcast(objects: list[Any]) -> list[Any]:
    """Return the objects of the main process. Collective."""
    with _reaching_others():
        dist.broadcast_object_list(objects, group=object_group())
    return objects


def scattered(function: Callable[[], list[T]]) -> T:
    """Call `function` on the main process. It returns one part for each process, and each gets its
    own. Collective.

    Only a process's own part is sent to it, pickled. Raises the error of `function` on every
    process, and `RankError` if another process failed or ended.
    """
    parts: list[T] = []
    on_main(lambda: parts.extend(function()))
    if not several():
        return parts[0]
    received: list[Any] = [None]
    with _reaching_others():
        dist.scatter_object_list(received, parts or None, group=object_group())
    own: T = received[0]
    return own


_registered: dict[str, Callable[..., Any]] = {}


def register(name: str, function: Callable[..., Any]) -> None:
    """Let `call_on_all_ranks` call a collective function by this name."""
    _registered[name] = function


def call_on_all_ranks(name: str, *args: Any) -> Any:
    """Call a function of `register` on all processes, and return its result on this one.

    The main process calls it within `on_main`, whose others take part, or all processes call it. It
    is called as by `abort_on_error`.
    """
    if _leads:
        _broadcast([None, None, (name, *args)])
    return abort_on_error(partial(_registered[name], *args))


def gathered(value: T) -> list[T]:
    """Return the `value` of each process, which is pickled. Collective. Raises `RankError` if
    another one ended."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with _reaching_others():
        dist.all_gather_object(values, value, group=object_group())
    return values


def raise_on_all(function: Callable[[], T]) -> T:
    """Call `function` on each process. If it fails on any of them, raise on all. Collective.

    The process that failed raises its own error, the others a `RankError` with its message.
    `function` must not call collective operations: the others would wait in them. For those there
    is `abort_on_error`.
    """
    try:
        result = function()
    except Exception as error:
        with suppress(RankError):
            gathered(_message(error))
        raise
    for message in gathered(""):
        if message:
            raise RankError(message)
    return result


def abort_on_error(function: Callable[[], T]) -> T:
    """Call `function`, which may call collective operations, on each process. If it fails on any of
    them, raise on all.

    The process that fails raises its own error. It leaves its message in the groups' store, waits
    until all others have read it, and leaves the groups. So operations in which the others wait for
    it end: gloo notices the lost connection, and of NCCL each process aborts its own groups when it
    reads the message. They raise a `RankError` with it. No collective operation is possible
    afterwards.
    """
    if not several():
        return function()
    object_group()  # and its watch
    try:
        result = function()
    except Exception as error:
        if isinstance(error, RankError) or not several():
            raise  # from within another call, which has left the groups
        failure = _tell(error)
        _abort_groups()
        _disconnect()
        if failure is error:
            raise
        raise failure from error
    if _watch is not None and _watch.message is not None:
        # the operations that were aborted have left wrong numbers
        failure = RankError(_watch.message)
        _disconnect()
        raise failure
    return result


def _tell(error: Exception) -> Exception:
    """Tell the others of an error. Return what this process raises: the error itself, unless
    another one was first."""
    assert _watch is not None
    if isinstance(error, RuntimeError) and "gloo" in str(error):  # another process has ended
        if _watch.message is not None:
            return RankError(_watch.message)
        return lost(error)
    own = _message(error)
    with suppress(RuntimeError):  # the store ends with its process
        store: Any = dist.distributed_c10d._get_default_store()
        first = store.compare_set(_FAILED, "", own).decode()
        # the store may end with this process
        until = time.monotonic() + _HEARD_SECONDS
        while store.add(_HEARD, 0) < dist.get_world_size() and time.monotonic() < until:
            time.sleep(0.05)
        if first != own:
            return RankError(first)
    return error


@contextmanager
def _reaching_others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost(error) from error


def lost(error: Exception) -> RankError:
    """Return the error of a process that cannot reach another one."""
    return RankError(f"another training process ended: its own output says why ({error})")


def _message(error: Exception) -> str:
    rank = dist.get_rank() if several() else 0
    return f"process {rank} on {gethostname()} failed: {type(error).__name__}: {error}"


@cache
def object_group() -> dist.ProcessGroup:
    """Return the group over which objects travel. Collective when it is called first."""
    global _watch
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_PATIENCE)
    store: Any = dist.distributed_c10d._get_default_store()
    _watch = _Watch(store.clone(), _abort_groups)
    _watch.start()
    atexit.register(_disconnect)
    return group


class _Watch(threading.Thread):
    """Waits until a process has failed, and calls `abort`: operations of NCCL do not notice it
    themselves."""

    def __init__(self, store: Any, abort: Callable[[], None]) -> None:
        super().__init__(name="rolltap: watch of the processes", daemon=True)
        self.message: str | None = None
        """That of the process that failed."""
        self._store = store
        self._abort = abort
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look until `stop` is called. The store ends with its process, whose launcher ends this
        one."""
        with suppress(RuntimeError):
            while not self._stopped.wait(_WATCH_SECONDS):
                if self._store.check([_FAILED]):
                    self.message = self._store.get(_FAILED).decode()
                    self._store.add(_HEARD, 1)
                    self._abort()
                    return

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self.join()


_watch: _Watch | None = None


def _abort_groups() -> None:
    """End the operations of NCCL that are under way, for which a group would wait when it is left.
    Those of gloo end when one process leaves."""
    for group in dist.distributed_c10d._world.pg_names:
        with suppress(RuntimeError):
            group.abort()


def _disconnect() -> None:
    """Leave all groups and join their threads: one of gloo's that drops a tensor in an interpreter
    that is ending would abort the process ("terminate called without an active exception")."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
    object_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


# --------------------------------------------------------------------------- weights of the model
def require_same_parameters(parameters: Iterable[tuple[str, Parameter]]) -> None:
    """Raise `InputError` on every process unless all have parameters of the same names, shapes and
    types. Collective.

    Otherwise they would wait for each other for ever when they exchange tensors.
    """
    described = set()
    for name, parameter in parameters:
        described.add(f"{name} {[*parameter.shape]} {parameter.dtype}")
    of_ranks = gathered(described)
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            first = min(other ^ of_ranks[0])
            owner = rank if first in other else 0
            raise InputError(
                f"the processes train different models: of the processes 0 and {rank}, only "
                f"{owner} has {first}: load the same folder, with the same adapter and dtype, on "
                "each"
            )


def require_sharded_optimizer(
    args: TrainingArguments,
    model: Any,
    optimizers: tuple[Any, Any],
) -> None:
    """Raise `InputError` for an optimizer whose state FSDP2 would not shard with the weights."""
    if any(optimizers):
        raise InputError('sharding="full" makes the optimizer: leave optimizers out, and set optim')
    kind, _ = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if not kind.__module__.startswith("torch.optim."):
        said = "looks at whole matrices: choose adamw_torch_fused, or sgd"
        raise InputError(f"optim={args.optim!r} {said}")


def use_fsdp(args: TrainingArguments, model: nn.Module) -> None:
    """Let the trainer that is made of `args` shard a model with FSDP2, by accelerate's plugin. Call
    it on all.

    Each process keeps a part of every weight in the type that the weight has, in float32 if it is
    trained. A layer is whole while it runs, in bfloat16 if `args.bf16` is set; its gradients are
    reduced in float32 after each micro-batch. The weights are those of the main process: others may
    have loaded empty ones, as transformers does after accelerate's
    `enable_fsdp_ram_efficient_loading`. Raises `InputError` for a model of unknown layers.
    """
    layers = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            layers.add(type(module).__name__)
    if not layers:
        name = type(model).__name__
        raise InputError(f'sharding="full" does not know the layers of {name}: set it to "none"')
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.device.type == "cpu":  # on which accelerate would not shard
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU
    # transformers makes the plugin of these, and takes a few of its fields from `fsdp_config`
    args.fsdp = True
    args.fsdp_config = {"xla": False}
    args.fsdp_plugin_args = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": sorted(layers),
        "reshard_after_forward": True,
        "mixed_precision_policy": policy,
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "FULL_STATE_DICT",
    }
    # else the gradients of all layers would be whole until the last micro-batch
    accumulation = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    args.accelerator_config = replace(args.accelerator_config, **accumulation)
    inner = without_adapter(model)
    register("gather", partial(_gather, inner))
    inner.gather_weights = partial(call_on_all_ranks, "gather")


def use_replicas(args: TrainingArguments) -> None:
    """Let the trainer that is made of `args` have the whole model on each process, by DDP, whatever
    `accelerate config` says."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    # an expert, or its adapter, that no token has chosen
    args.ddp_find_unused_parameters = True


def _gather(model: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    """Return weights, by name, whole, one after another, on the main process only. Collective."""
    _reshard(model)
    found = []
    for name in names:
        part: Any = model.get_parameter(name).detach()
        whole = part.full_tensor()
        if is_main():
            found.append(whole)
    return found


def shard_reference(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return a model that is not trained, sharded as the trained one is where that one is.
    Collective."""
    prepared: nn.Module
    if accelerator.is_fsdp2:
        prepared = fsdp2_prepare_model(accelerator, model)
    else:
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared


def reduce_unused(model: nn.Module) -> None:
    """Let FSDP2 reduce the gradients that it would leave out, of a model that it has sharded. Call
    it once, on all.

    These are gradients that only some processes have, as of experts that no token of the others
    chose, and those of the output embeddings: TRL reads their weights without a call of the module,
    which FSDP2 waits for.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_reduce_scatter_unused_params(True)
    inner = without_adapter(model)
    head = inner.get_output_embeddings()

    def gather_head(*_: Any) -> None:
        head.unshard()

    if isinstance(head, FSDPModule):
        inner.base_model.register_forward_hook(gather_head)


def trained_parameters(model: nn.Module) -> dict[str, Parameter]:
    """Return the parameters that are trained, by name. Those that FSDP2 shards are the parts of
    this process."""
    _reshard(model)
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 keeps whole between two passes: the embeddings, the last norm,
    the head."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
