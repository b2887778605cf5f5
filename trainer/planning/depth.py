"""The costs of a deep model, measured on a few of its layers: they are linear in the layers of each kind."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch.nn import ModuleList

from rolltap.trainer.grpo.plan import Costs


def of_all_layers(model: Any, measure: Callable[[], Costs]) -> Costs:
    """Return what `measure` returns of the whole `model`.

    It measures one layer of each kind, and once more for each kind with two of them: the difference is what a further
    layer costs. A model without a list of layers, or with few of each kind, is measured as it is.
    """
    body = model.get_decoder()
    layers = getattr(body, "layers", None)
    if not isinstance(layers, ModuleList) or len(layers) != body.config.num_hidden_layers or _share_states(body.config):
        return measure()
    places: dict[Hashable, list[int]] = {}
    for i, layer in enumerate(layers):
        places.setdefault(_kind(body.config, i, layer), []).append(i)
    repeated = [places_of for places_of in places.values() if len(places_of) > 1]
    first = [places_of[0] for places_of in places.values()]
    if len(first) * (len(repeated) + 1) + len(repeated) >= len(layers):
        return measure()
    with _only(body, first):
        one = measure()
    total = one
    for places_of in repeated:
        with _only(body, sorted([*first, places_of[1]])):
            total = _sum(total, len(places_of) - 1, measure(), one)
    return total


def _sum(total: Costs, number: int, more: Costs, less: Costs) -> Costs:
    """Return `total` and `number` times the difference of two costs."""
    values = {
        field.name: getattr(total, field.name) + number * (getattr(more, field.name) - getattr(less, field.name))
        for field in fields(Costs)
    }
    return Costs(**values)


def _kind(config: Any, i: int, layer: Any) -> Hashable:
    """Return what layers with the same costs have in common."""
    named = getattr(config, "layer_types", None)
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    weights = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return named[i] if named else None, modules, weights


def _share_states(config: Any) -> bool:
    """Return True if layers read the keys and values of other layers."""
    return bool(getattr(config, "num_kv_shared_layers", 0))


@contextmanager
def _only(body: Any, places: Sequence[int]) -> Iterator[None]:
    """Leave only these layers in a decoder."""
    config, layers = body.config, body.layers
    named = getattr(config, "layer_types", None)
    indices = {module: module.layer_idx for module in layers.modules() if hasattr(module, "layer_idx")}
    body.layers = ModuleList([layers[i] for i in places])
    config.num_hidden_layers = len(places)
    if named:
        config.layer_types = [named[i] for i in places]
    for new, layer in enumerate(body.layers):
        for module in layer.modules():
            if module in indices:
                module.layer_idx = new
    try:
        yield
    finally:
        body.layers, config.num_hidden_layers = layers, len(layers)
        if named:
            config.layer_types = named
        for module, index in indices.items():
            module.layer_idx = index
