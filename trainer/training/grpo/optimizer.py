"""A sharded optimizer, and loss scaling for float16: what weights of 16 bits need.

`ShardedOptimizer`: each process keeps the state of some parameters, and steps them for all. Every process has all
weights and all gradients. Of the parameters that it owns it also has the optimizer's state and, where the weights have
16 bits, a copy of them in float32: a step of 1e-6 of a weight is lost in bfloat16, whose values are 4e-3 apart. For the
same reason gradients of 16-bit weights are accumulated and averaged in float32. torch's `ZeroRedundancyOptimizer` also
shards the state, but steps the weights as they are, without such copies.

`LossScale`: the smallest values of float16 are 6e-8, and gradients of single tokens are less. Each backward pass begins
with gradients of log-probabilities that are scaled so that the largest is about 1. The scale is a power of two, so
scaling loses nothing, and it follows from the pass alone: there is no state to save.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rolltap.addons.errors import InputError
from rolltap.trainer.training.grpo.ranks import send_weights, several


class LossScale:
    """Scales the backward passes of a step, whose gradients are added up in float32, and takes the scale out again."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        """`parameters` are the model's: those that have gradients are trained."""
        self._parameters = list(parameters)
        self._scale = 1.0

    def watch(self, logprobs: Tensor) -> None:
        """Scale the backward pass that begins at `logprobs`, of any shape."""
        logprobs.register_hook(self._scaled)

    def finish(self) -> None:
        """Take the scale out of the gradients."""
        self._multiply(1 / self._scale)
        self._scale = 1.0

    def _scaled(self, gradient: Tensor) -> Tensor:
        largest = float(gradient.abs().max())
        if not 0 < largest < math.inf:
            return gradient
        scale = 2.0 ** -math.frexp(largest)[1]
        # those of the micro-batches before have another scale
        self._multiply(scale / self._scale)
        self._scale = scale
        return gradient * scale

    def _multiply(self, factor: float) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


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

    `param_groups` and `state` are the wrapped optimizer's: a group may be empty. `state_dict` says how the parameters
    are shared out, and has the settings of the groups. The share itself is saved with `save_share`.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        kind: type[torch.optim.Optimizer],
        names: Mapping[Parameter, str],
        **options: Any,
    ) -> None:
        """`kind` is the class to wrap, `options` its arguments, and `groups` those of all parameters.

        `names` are the parameters' names in saved shares.
        """
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._ranks, self._rank = (dist.get_world_size(), dist.get_rank()) if several() else (1, 0)
        owners = shares([parameter.numel() for parameter in parameters], self._ranks)
        self._owners: dict[Parameter, int] = dict(zip(parameters, owners, strict=True))
        self._names = names
        self._masters: dict[Parameter, Parameter] = {}
        for parameter, owner in self._owners.items():
            small = parameter.itemsize < torch.float32.itemsize
            if small:
                parameter.grad_dtype = torch.float32
            if owner == self._rank:
                self._masters[parameter] = Parameter(parameter.detach().float()) if small else parameter
        own = [
            {
                **group,
                "params": [self._masters[parameter] for parameter in group["params"] if parameter in self._masters],
            }
            for group in groups
        ]
        self.optimizer = kind(own, **options)
        self.defaults = self.optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, with the parameters that this process owns, in float32."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state: of the parameters that this process owns."""
        return self.optimizer.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the own share, then exchange the new weights. Collective.

        Parameters without a gradient stay as they are: all processes have the same gradients.
        """
        for parameter, master in self._masters.items():
            master.grad = parameter.grad
        self.optimizer.step()
        for parameter, master in self._masters.items():
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None
        send_weights((weight, rank) for weight, rank in self._owners.items() if weight.grad is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._owners:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of shares, and the settings of the groups."""
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"shares": self._ranks, "groups": settings}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the settings of the groups. Raises `InputError` for the state of another kind of optimizer."""
        if "groups" not in state_dict:
            raise InputError("the checkpoint's optimizer is not one of full weights: start in another folder")
        for group, settings in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(settings)

    def save_share(self, folder: Path) -> None:
        """Write what this process owns to its own file in `folder`. Raises `OSError`."""
        share = {
            self._names[parameter]: {
                "master": None if master is parameter else master.detach(),
                "state": self.state.get(master, {}),
            }
            for parameter, master in self._masters.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(share, _share(folder, self._rank))

    @torch.no_grad()
    def load_shares(self, folder: Path, number: int) -> None:
        """Read what this process owns from the files that `number` processes saved.

        Weights that are in float32 now take the copies in float32 that were saved of them.
        Raises `InputError` when a file, or a parameter, is missing.
        """
        # in the order of the groups, as the wrapped optimizer counts them
        places = {self._names[parameter]: place for place, parameter in enumerate(self._masters)}
        weights = {self._names[parameter]: self._masters.get(parameter, parameter) for parameter in self._owners}
        exact = {name: weight for name, weight in weights.items() if weight.itemsize >= torch.float32.itemsize}
        found: dict[int, Any] = {}
        for rank in range(number):
            file = _share(folder, rank)
            try:
                share = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except FileNotFoundError as error:
                raise InputError(
                    f"the checkpoint lacks {file}: all processes must write to, and read from, storage that they share"
                ) from error
            for name in places.keys() & share.keys():
                found[places[name]] = copy.deepcopy(share[name]["state"])  # the file may be overwritten
            for name in exact.keys() & share.keys():
                if share[name]["master"] is not None:
                    exact[name].copy_(share[name]["master"])
        if lacking := [name for name, place in places.items() if place not in found]:
            raise InputError(f"no share of the optimizer in {folder} has the parameter {lacking[0]}")
        state = {place: one for place, one in found.items() if one}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})


def _share(folder: Path, rank: int) -> Path:
    return folder / f"optimizer-{rank}.pt"
