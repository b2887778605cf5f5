"""The weights of a model without its adapter, merged one module at a time, so that there is never a
second model.

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

_ADAPTER = ("lora_", "modules_to_save", "token_adapter")
"""How a part of a weight's name begins if the weight is an adapter's. Source: PEFT 0.21,
`adapter_layer_names` of LoRA's layers and of `AuxiliaryTrainingWrapper`."""
_WRAPPED = ("base_layer", "original_module")
"""Parts of a weight's name that PEFT inserts below a module with an adapter."""


def without_adapter(model: Any) -> Any:
    """Return the model without PEFT's wrapper; its modules may have adapters."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


class MergedWeights:
    """The weights of a model as it would be without its adapter. The model itself stays as it is.

    Sharded weights are gathered when they are asked for, by the model's `gather_weights`. The
    constructor raises `InputError` for a quantized model, and for an adapter on a module that
    shares its weight with another one.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self.model: PreTrainedModel = without_adapter(model)
        if getattr(self.model, "hf_quantizer", None) is not None:
            said = "publish LoRA adapters, or load it without quantization_config"
            raise InputError(f"the model is quantized: {said}")
        self._adapted = _adapted(self.model)
        self.unmerged: dict[str, Tensor] = {}
        """Weights as they are in memory, by their names without adapters."""
        for name, weight in self.model.state_dict().items():
            if self._adapted_module(name) is None or not _is_of_adapter(name):
                parts = [part for part in name.split(".") if part not in _WRAPPED]
                self.unmerged[".".join(parts)] = weight
        for name, other in self.model.all_tied_weights_keys.items():
            if self._adapted_module(name) or self._adapted_module(other):
                raise InputError(
                    f"the adapter changes one of {name} and {other}, which are the same weight: "
                    "leave the module out of the adapter"
                )

    def _adapted_module(self, name: str) -> str | None:
        """Return the name of the module whose adapter changes a weight."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._adapted:
                return name
        return None

    @torch.no_grad()
    def get(self, names: list[str]) -> dict[str, Tensor]:
        """Return weights by name. Those of modules with an adapter are merged copies."""
        plain: dict[str, Tensor] = {}
        paths = set()
        for name in names:
            path = self._adapted_module(name)
            if path is None:
                plain[name] = self.unmerged[name]
            else:
                paths.add(path)
        found = _gathered(self.model, plain)
        for path in paths:
            found |= self._merged(path)
        return found

    def _merged(self, path: str) -> dict[str, Tensor]:
        """Return the weights of a module with its adapter merged."""
        module: Any = _copied(self._adapted[path])
        prefix = f"{path}."
        own = dict(module.named_parameters(prefix=path))
        for name, weight in _gathered(self.model, own).items():
            parent, _, last = name.removeprefix(prefix).rpartition(".")
            parameter = nn.Parameter(weight, own[name].requires_grad)
            setattr(module.get_submodule(parent), last, parameter)
        # as PEFT 0.21 does for a whole model: BaseTuner._unload_and_optionally_merge
        if hasattr(module, "unload_and_optionally_merge_module"):
            module = module.unload_and_optionally_merge_module(True, False, None)
        else:
            module.merge()
            module = module.get_base_layer()
        return dict(module.state_dict(prefix=prefix))


def _is_of_adapter(name: str) -> bool:
    return any(part.startswith(_ADAPTER) for part in name.split("."))


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module without the hooks of FSDP2, which cannot be copied. Its weights
    stay sharded."""
    if not isinstance(module, FSDPModule):
        return copy.deepcopy(module)
    kind = type(module).__bases__[1]  # that of the module before FSDP2 changed it
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
    gathered = dict(weights)
    if sharded:
        gathered.update(zip(sharded, model.gather_weights(sharded), strict=True))
    return gathered


PREFIX = "base_model.model."
"""PEFT puts it before the names of the model that it wraps."""


def adapter_weights(model: PeftModel) -> dict[str, Tensor]:
    """Return the weights of all adapters whole, by the names of the `PeftModel`."""
    inner = without_adapter(model)
    own = {}
    for name, weight in inner.state_dict().items():
        if _is_of_adapter(name):
            own[name] = weight
    found = {}
    for name, weight in _gathered(inner, own).items():
        found[PREFIX + name] = weight
    return found


def merge_again(model: nn.Module) -> int:
    """Let adapters on parameters, such as the experts of a layer, be merged again in the backward
    pass.

    Returns the most bytes that a layer's take then, with the gradient of the largest; 0 without
    such adapters.
    """
    most = 0
    for module in _adapted(model).values():
        if isinstance(module, ParamWrapper):
            run = MethodType(ParamWrapper.forward, module)
            module.forward = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
            sizes = []
            for part in module.modules():
                if isinstance(part, ParamWrapper):
                    sizes.append(part.get_param().nbytes)
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
