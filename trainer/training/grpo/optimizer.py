"""A sharded optimizer: what weights of 16 bits need.

Each process has all weights and gradients, keeps the state of some parameters, and steps them for all. Of these it also
has, where the weights have 16 bits, a copy in float32: a step of 1e-6 of a weight is lost in bfloat16, whose values are
4e-3 apart. For the same reason gradients of 16-bit weights are accumulated and averaged in float32. torch's
`ZeroRedundancyOptimizer` has no such copies.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from rolltap.addons.errors import InputError
from rolltap.trainer.training.grpo.ranks import object_group, send_weights, several, together


def shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each of the parameters with these `sizes`: the largest first, to the one with the least."""
    owned = [0] * ranks
    owners = [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        owners[k] = owned.index(min(owned))
        owned[owners[k]] += sizes[k]
    return owners


class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer of this process's share of the parameters.

    Of sharded weights (DTensor) each process steps its part. `param_groups` and `state` are the wrapped optimizer's: a
    group may be empty. `state_dict` has the settings of the groups; weights and state are saved with `save`.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        kind: type[torch.optim.Optimizer],
        names: Mapping[Parameter, str],
        **options: Any,
    ) -> None:
        """`kind` is the class to wrap, `options` its arguments. `names` are the parameters' names in saved shares."""
        merged: dict[str, dict[str, Any]] = {}  # transformers parts what is sharded from what is not
        for group in groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            merged.setdefault(repr(settings), {**settings, "params": []})["params"] += group["params"]
        parameters = [parameter for group in merged.values() for parameter in group["params"]]
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if several() else (1, 0)
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        owners = shares([parameter.numel() for parameter in whole], ranks)
        self._owners: dict[Parameter, int] = dict(zip(whole, owners, strict=True))
        self._names = names
        self._masters: dict[Parameter, Parameter] = {}
        for parameter in parameters:
            small = parameter.itemsize < torch.float32.itemsize
            if small:
                parameter.grad_dtype = torch.float32
            if parameter not in self._owners:
                self._masters[parameter] = Parameter(local(parameter.detach()))  # the same memory
            elif self._owners[parameter] == rank:
                self._masters[parameter] = Parameter(parameter.detach().float()) if small else parameter
        for group in merged.values():
            group["params"] = [self._masters[parameter] for parameter in group["params"] if parameter in self._masters]
        self.optimizer = kind([*merged.values()], **options)
        self.defaults = self.optimizer.defaults
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the own share, then exchange the new weights. Collective.

        Parameters without a gradient stay as they are: all processes have the same gradients.
        """
        for parameter, master in self._masters.items():
            master.grad = local(parameter.grad)
        self.optimizer.step()
        for parameter, master in self._masters.items():
            if master is not parameter:
                if parameter in self._owners:
                    parameter.copy_(master)
                master.grad = None
        send_weights((weight, rank) for weight, rank in self._owners.items() if weight.grad is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._names:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the groups."""
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"groups": settings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the settings of the groups. Raises `InputError` for the state of another kind of optimizer."""
        if "groups" not in state_dict:
            raise InputError("the checkpoint's optimizer is not one of full weights: start in another folder")
        for group, settings in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(settings)

    def save(self, folder: Path) -> None:
        """Write the trained weights, in float32, and the optimizer's state. Collective. Raises `InputError`."""
        state: dict[str, Any] = {}
        for parameter, master in self._masters.items():
            name = self._names[parameter]
            state[name] = (parameter if isinstance(parameter, DTensor) else master).detach()
            for key, value in self.state.get(master, {}).items():
                if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == master.shape:
                    whole: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
                    value = DTensor.from_local(value, parameter.device_mesh, parameter.placements, **whole)
                state[f"{name}/{key}"] = value
        _checkpoint(save, state, folder)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what any number of processes saved in `folder`. Collective.

        Raises `InputError` when a file, or a parameter, is missing.
        """
        state: dict[str, Any] = {}
        for parameter, name in self._names.items():
            weight = parameter if isinstance(parameter, DTensor) else self._masters.get(parameter, parameter)
            if weight.itemsize >= torch.float32.itemsize:
                state[name] = weight.detach()
        owned = {self._names[parameter]: parameter for parameter in self._masters}
        fields: defaultdict[str, list[str]] = defaultdict(list)
        for key, saved in together(lambda: _saved(folder)).items():
            name, _, field = key.partition("/")
            if not field or name not in owned:
                continue
            fields[name].append(field)
            if not isinstance(saved, TensorStorageMetadata):
                state[key] = None
            elif isinstance(owned[name], DTensor) and saved.size == owned[name].shape:
                state[key] = torch.empty_like(owned[name], dtype=saved.properties.dtype)
            else:
                state[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
        _checkpoint(load, state, folder)
        # in the order of the groups, as the wrapped optimizer counts them
        found = {
            place: {field: local(state[f"{name}/{field}"]) for field in fields[name]}
            for place, name in enumerate(owned)
            if name in fields
        }
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": found})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


def local(value: Any) -> Any:
    """Return this process's part of a sharded tensor, and other values as they are."""
    return value.to_local() if isinstance(value, DTensor) else value


def load_weights(weights: Mapping[str, Parameter], folder: Path) -> None:
    """Read trained weights that `ShardedOptimizer.save` has written. Collective. Raises `InputError`."""
    _checkpoint(load, {name: weight.detach() for name, weight in weights.items()}, folder)


def _saved(folder: Path) -> dict[str, Any]:
    """Return what the checkpoint in a folder has, by name."""
    try:
        return dict(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except OSError as error:
        raise InputError(f"the checkpoint lacks {folder}: {error}; start in another folder") from error


def _checkpoint(function: Callable[..., Any], state: dict[str, Any], folder: Path) -> None:
    """Call torch's `save` or `load`."""
    group = object_group() if several() else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process, or files of a checkpoint that was not finished
            function(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except (CheckpointException, RuntimeError, OSError) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise InputError(
            f"the checkpoint {folder} cannot be written or read: {cause}; all processes must write to, and read from, "
            "storage that they share, and resume with the model, and the version of rolltap, that saved it"
        ) from error
