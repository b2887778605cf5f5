"""The costs of a deep model, measured on a few of its layers: they are linear in the layers of each kind.

A model's numbers for a plan, taken from its configuration: nothing is loaded, and no memory is taken.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import ModuleList
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.integrations import hub_kernels

from rolltap.addons.errors import InputError
from rolltap.trainer.models.loading import Dtype, frozen_modules, meta_policy
from rolltap.trainer.training.arguments import lora_config, model_arguments, without_frozen
from rolltap.trainer.training.forward.sizes import Costs, measure
from rolltap.trainer.training.recipe import Recipe


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


FLOAT32 = 4
"""Bytes of a value in float32."""


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """Sizes of a model as it is trained. Sizes in memory are bytes."""

    architecture: str
    """Class that is trained, such as Qwen3_5ForCausalLM."""
    model_type: str
    parameters: int
    """Number of parameters, without an adapter's."""
    weights: int
    """Weights and buffers of the trained model, without an adapter's."""
    adapter: int
    """Weights of the adapter."""
    sizes: tuple[int, ...] = field(repr=False)
    """Number of values of each trained parameter."""
    served: int
    """Weights that the engine loads: the text part, if it is told to leave other towers out."""
    other_towers: int
    """Weights of towers that are not trained, such as vision. 0 for a model of text alone."""
    item: int
    """Bytes of a value of the weights."""
    context: int
    """Longest input, in tokens."""
    tied: bool
    """True if the embeddings are the head too."""
    linear_attention: bool
    costs: Costs

    @property
    def trained(self) -> int:
        """Number of trained values."""
        return sum(self.sizes)


def model_numbers(recipe: Recipe, dtype: Dtype) -> ModelNumbers:
    """Return the numbers of a recipe's model with weights of `dtype`.

    Raises `InputError` for a model that cannot be built, for an adapter that does not fit it, and for one with layers
    whose states are not known.
    """
    model = meta_policy(recipe.model, dtype, **model_arguments(recipe))
    for name in frozen_modules(model):
        model.get_submodule(name).requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    own = list(model.parameters())
    weights = _bytes(model)
    counts = {"parameters": sum(p.numel() for p in own), "weights": weights, "served": weights}
    adapter = lora_config(recipe)
    costs, sizes, adapter_bytes = _measured(model, dtype, adapter)
    return ModelNumbers(
        architecture=type(model).__name__,
        model_type=config.model_type,
        adapter=adapter_bytes,
        sizes=sizes,
        other_towers=_other_towers(recipe, dtype, weights),
        item=own[0].element_size(),
        context=int(config.max_position_embeddings),
        tied=bool(model.config.tie_word_embeddings),
        linear_attention=costs.state_per_segment > 0,
        costs=costs,
        **counts,
    )


def _measured(model: Any, dtype: Dtype, adapter: LoraConfig | None) -> tuple[Costs, tuple[int, ...], int]:
    """Return the costs of the model with its adapter, the sizes of the trained parameters, and the adapter's bytes.

    The tensors are fake ones on the CPU, so that torch chooses kernels that keep no attention weights, as on a GPU.
    Linear attention is torch's own, which keeps more than the fast kernels do: these run on GPUs alone.
    """
    base = _bytes(model)
    if adapter is not None:
        adapter.init_lora_weights = False  # there are none to begin from
        try:
            inject_adapter_in_model(without_frozen(adapter, model), model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise InputError(f"the [lora] table does not fit the model: {error}") from error
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    sizes = tuple(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    added = _bytes(model) - base
    with _kernels_of_torch(), FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        model.tie_weights()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
        mixed = getattr(torch, dtype)
        context = partial(torch.autocast, "cpu", mixed, enabled=dtype != "float32")
        costs = of_all_layers(model, lambda: measure(model, context))
    return costs, sizes, added


@contextmanager
def _kernels_of_torch() -> Iterator[None]:
    """Let transformers take the functions that it exports models with, and not warn that they are slow."""
    with (
        patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
        patch.object(hub_kernels, "is_torchdynamo_compiling", lambda: True),
    ):
        yield


def _other_towers(recipe: Recipe, dtype: Dtype, text: int) -> int:
    """Return the bytes of what the checkpoint has besides the text part, as its configuration says."""
    config, unused = AutoConfig.from_pretrained(recipe.model, return_unused_kwargs=True, **model_arguments(recipe))
    if config.get_text_config(decoder=True) is config or type(config) not in AutoModelForImageTextToText._model_mapping:
        return 0
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype), **unused)
    return max(0, _bytes(whole) - text)


def _bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
