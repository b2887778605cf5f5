"""A model's weights under the names of its base checkpoint.

transformers gives weights other names than their checkpoint does, and keeps some of them together: the text part of a
vision-language model, the experts of a layer. vLLM knows the checkpoint's names, so these are written. They are
transformers' own conversions of the loading, reversed, and are compared with what the checkpoint contains.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import frozen_modules
from rolltap.trainer.models.merging import MergedWeights
from rolltap.trainer.models.stored import StoredWeights

_LAYER = re.compile(r".*?\.\d+\.")
"""The beginning of a weight's name up to its layer's number. A conversion concerns the weights of one layer."""


class NamedWeights:
    """The weights of a model that can have changed: all but those of `frozen_modules`, under the base's names.

    Raises `InputError` for a weight that the base checkpoint does not have in this shape.
    """

    def __init__(self, weights: MergedWeights, base: StoredWeights) -> None:
        self._weights = weights
        self._layer_of: dict[str, str] = {}
        """The base's name of a weight -> its layer."""
        self._layers: dict[str, list[str]] = {}
        """Layer -> the model's names."""
        self._renamed: dict[str, bool] = {}
        """Layer -> whether the base has other names than the model."""
        self._cached: tuple[str, dict[str, Tensor]] = ("", {})
        frozen, shapes = {*frozen_modules(weights.model)}, weights.shapes()
        left_out = _written_once(weights, base)
        for name in shapes:
            if name.rpartition(".")[0] not in frozen and name not in left_out:
                match = _LAYER.match(name)
                self._layers.setdefault(match.group() if match else "other", []).append(name)
        for layer, names in self._layers.items():
            here = {name: shapes[name] for name in names}
            stored = _stored_shapes(weights.model, here, base)
            self._renamed[layer] = stored.keys() != here.keys()
            self._layer_of |= dict.fromkeys(stored, layer)

    def __contains__(self, name: str) -> bool:
        return name in self._layer_of

    def __iter__(self) -> Iterator[str]:
        """Return the names, those of a layer one after the other."""
        return iter(self._layer_of)

    def get(self, name: str) -> Tensor:
        """Return a weight by its name in the base checkpoint, in main memory."""
        return self.on_device(name).cpu()

    def on_device(self, name: str) -> Tensor:
        """Return a weight by its name in the base checkpoint, where the model is."""
        layer = self._layer_of[name]
        if self._cached[0] != layer:
            tensors = self._weights.get(self._layers[layer])
            self._cached = layer, _converted(self._weights.model, tensors) if self._renamed[layer] else tensors
        return self._cached[1][name].detach().contiguous()


def stored_module(model: PreTrainedModel, module: str, weight: torch.Size, base: StoredWeights) -> str:
    """Return the base checkpoint's name of a linear layer of `model`, whose weight has this shape.

    Raises `InputError` when the base has no such layer: transformers has made the model's layer of several.
    """
    (name,) = _stored_shapes(model, {f"{module}.weight": weight}, base)
    return name.removesuffix(".weight")


def _written_once(weights: MergedWeights, base: StoredWeights) -> set[str]:
    """Return further names of weights that have several, where the base has only one of them: tied embeddings."""
    left_out: set[str] = set()
    for names in weights.shared:
        absent = {name for name in names if base.shape(name) is None}
        absent -= {name for name in absent if all(map(base.shape, _converted_names(weights.model, name)))}
        left_out |= absent if len(absent) < len(names) else set()
    return left_out


def _converted_names(model: PreTrainedModel, name: str) -> list[str]:
    return list(_converted(model, {name: torch.empty(1, device="meta")}))


def _stored_shapes(
    model: PreTrainedModel, shapes: Mapping[str, torch.Size], base: StoredWeights
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in the base of some weights of the model.

    Most checkpoints have the names that transformers writes. Some have been saved with those of the model.
    """
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    converted = {name: tuple(tensor.shape) for name, tensor in _converted(model, tensors).items()}
    for candidate in (converted, {name: tuple(shape) for name, shape in shapes.items()}):
        if all(base.shape(name) == shape for name, shape in candidate.items()):
            return candidate
    name = next(name for name, shape in converted.items() if base.shape(name) != shape)
    raise InputError(
        f"the weight {name} of shape {[*converted[name]]} is not in {base.folder} (there: {base.shape(name)}): the "
        "engine would not take it; train from the folder that the model was loaded from"
    )


def _converted(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(revert_weight_conversion(model, tensors))
