"""The weights of a model without its adapter, merged one module at a time, so that there is never a second model.

PEFT runs an adapter on the experts of a layer by merging it into all of them, in each forward pass.
"""

import copy
from functools import partial
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rolltap.addons.errors import InputError


class MergedWeights:
    """The weights of a model as it would be without its adapter. The model itself stays as it is.

    Sharded weights are gathered when they are asked for, by the model's `gather_weights`. The constructor raises
    `InputError` for a quantized model, and for an adapter on a module that shares its weight with another one.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self.model: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
        if getattr(self.model, "hf_quantizer", None) is not None:
            raise InputError("the model is quantized: publish LoRA adapters, or load it without quantization_config")
        self._adapted = _adapted(self.model)
        self._stored: dict[str, Tensor] = {}
        """Weights as they are in memory, under names without adapters."""
        self._module: dict[str, str] = {}
        """Name of a weight -> the module whose adapter changes it."""
        ignored = set(self.model._keys_to_ignore_on_save or ())
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if name not in ignored and not any(name.startswith(f"{path}.") for path in self._adapted):
                self._stored[name] = tensor
        for path, module in self._adapted.items():
            plain: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
            for key, tensor in plain.state_dict(keep_vars=True).items():
                self._stored[f"{path}.{key}"] = tensor
                self._module[f"{path}.{key}"] = path
        self.shared = _shared(self._stored)
        """Groups of names of the same weight."""
        for names in self.shared:
            if changed := [name for name in names if name in self._module]:
                other = next(name for name in names if name != changed[0])
                what = f"the adapter changes {changed[0]}, which is the same weight as {other}"
                raise InputError(f"{what}: leave the module out of the adapter")

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each weight, by name."""
        return {name: tensor.shape for name, tensor in self._stored.items()}

    @torch.no_grad()
    def get(self, names: list[str]) -> dict[str, Tensor]:
        """Return weights by name. Those of modules with an adapter are merged copies."""
        found = self._whole({name: self._stored[name].detach() for name in names if name not in self._module})
        for path in {self._module[name] for name in names if name in self._module}:
            module = _copied(self._adapted[path])
            whole = self._whole({f"{path}.{name}": weight for name, weight in module.named_parameters()})
            for name, weight in module.named_parameters():
                parent, _, own = name.rpartition(".")
                setattr(module.get_submodule(parent), own, nn.Parameter(whole[f"{path}.{name}"], weight.requires_grad))
            merged = _merge(module).state_dict()
            found |= {name: merged[name.removeprefix(f"{path}.")] for name in names if self._module.get(name) == path}
        return found

    def _whole(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return _gathered(self.model, weights)


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module without the hooks of FSDP2, which cannot be copied. Its weights stay sharded."""
    if not isinstance(module, FSDPModule):
        return copy.deepcopy(module)
    _, kind = type(module).__bases__  # that of the module before FSDP2 changed it
    found: nn.Module = object.__new__(kind)
    for name, value in vars(module).items():
        if name.endswith("_hooks"):
            vars(found)[name] = type(value)()
        elif not name.startswith("__composable"):
            vars(found)[name] = copy.deepcopy(value)
    return found


def _gathered(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a model whole, by name, as they are if they are not sharded."""
    sharded = [name for name, weight in weights.items() if isinstance(weight, DTensor)]
    whole: list[Tensor] = []
    if sharded:
        whole = model.gather_weights(sharded)
    return weights | dict(zip(sharded, whole, strict=True))


PREFIX = "base_model.model."
"""PEFT puts it before the names of the model that it wraps."""


def adapter_weights(model: PeftModel) -> dict[str, Tensor]:
    """Return the weights of all adapters whole, by the names of the `PeftModel`."""
    found: dict[str, Tensor] = {}
    inner: PreTrainedModel = model.get_base_model()
    for path, module in _adapted(inner).items():
        for name, weight in module.state_dict().items():
            if not _is_of_the_base(name):
                found[f"{path}.{name}"] = weight
    whole = _gathered(inner, found)
    return {f"{PREFIX}{name}": weight for name, weight in whole.items()}


def _is_of_the_base(name: str) -> bool:
    """Return True for a weight below a module with an adapter that is the base model's.

    Adapters on several parameters of a module are around one another: their own weights are below `base_layer` too.
    """
    own = name.startswith("lora_") or ".lora_" in name
    return name.startswith(("base_layer.", "original_module.")) and not own


def merge_again(model: nn.Module) -> int:
    """Let adapters on parameters, such as the experts of a layer, be merged again in the backward pass.

    Returns the most bytes that a layer's take then, with the gradient of the largest; 0 without such adapters.
    """
    most = 0
    for module in _adapted(model).values():
        if isinstance(module, ParamWrapper):
            run = MethodType(ParamWrapper.forward, module)
            module.forward = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            sizes = [part.get_param().nbytes for part in module.modules() if isinstance(part, ParamWrapper)]
            most = max(most, sum(sizes) + max(sizes))
    return most


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with an adapter, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{path}.") for path in found)
        if not inside and isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            found[name] = module
    return found


def _merge(module: Any) -> nn.Module:
    # as PEFT 0.21 does for a whole model: BaseTuner._unload_and_optionally_merge
    if hasattr(module, "unload_and_optionally_merge_module"):
        merged = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        module.merge()
        merged = module.get_base_layer()
    assert isinstance(merged, nn.Module)
    return merged


def _shared(weights: dict[str, Tensor]) -> list[list[str]]:
    """Return groups of names of the same weight."""
    by_place: dict[object, list[str]] = {}
    for name, tensor in weights.items():
        place: object = (tensor.device, tensor.data_ptr(), tensor.shape)
        if isinstance(tensor, DTensor):
            place = id(tensor)  # a process's part may be empty
        if tensor.numel():
            by_place.setdefault(place, []).append(name)
    return [names for names in by_place.values() if len(names) > 1]
