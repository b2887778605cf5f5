"""A model's numbers for a plan, taken from its configuration: no weights are loaded, and none are made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
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
    """Weights and buffers of the text part, which the trainer and the engine load, without an adapter's."""
    adapter: int
    """Weights of the adapter, in float32."""
    sizes: tuple[int, ...] = field(repr=False)
    """Number of values of each trained parameter."""
    other_towers: int
    """Weights of towers that are not trained, such as vision. 0 for a model of text alone."""
    item: int
    """Bytes of a value of the weights."""
    context: int
    """Longest input, in tokens."""
    tied: bool
    """True if the embeddings are the head too."""
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
    parameters, item = sum(p.numel() for p in model.parameters()), next(model.parameters()).element_size()
    weights = _bytes(model)
    if adapter := lora_config(recipe):
        _add_adapter(model, adapter)
    return ModelNumbers(
        architecture=type(model).__name__,
        model_type=config.model_type,
        parameters=parameters,
        weights=weights,
        adapter=_bytes(model) - weights,
        sizes=tuple(p.numel() for p in model.parameters() if p.requires_grad),
        other_towers=_other_towers(recipe, dtype, weights),
        item=item,
        context=int(config.max_position_embeddings),
        tied=bool(model.config.tie_word_embeddings),
        costs=_costs(model, dtype),
    )


def of_all_layers(model: Any, measure: Callable[[], Costs]) -> Costs:
    """Return what `measure` returns of the whole `model`.

    Costs are linear in the layers. Where these repeat, such as three of linear attention and one of full attention,
    the first repetition is measured, and the first two: the difference is what each further one costs.
    """
    body = model.get_decoder()
    layers, config = getattr(body, "layers", None), body.config
    number = config.num_hidden_layers
    shared_states = bool(getattr(config, "num_kv_shared_layers", 0))  # layers that read other layers' keys and values
    if not isinstance(layers, ModuleList) or len(layers) != number or shared_states:
        return measure()
    kinds = [_kind(config, i, layer) for i, layer in enumerate(layers)]
    period = next(n for n in range(1, number + 1) if kinds == (kinds[:n] * number)[:number])
    if number % period or number <= 3 * period:
        return measure()
    with _first_layers(body, period):
        one = measure()
    with _first_layers(body, 2 * period):
        two = measure()
    more = number // period - 1
    return Costs(*(a + more * (b - a) for a, b in zip(astuple(one), astuple(two), strict=True)))


def _kind(config: Any, i: int, layer: Any) -> tuple[Any, ...]:
    """Return what layers with the same costs have in common."""
    modules = [(name, type(module)) for name, module in layer.named_modules()]
    weights = [(name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return (config.layer_types[i] if getattr(config, "layer_types", None) else None, modules, weights)


@contextmanager
def _first_layers(body: Any, number: int) -> Iterator[None]:
    """Leave only the first layers in a decoder."""
    config, layers, types = body.config, body.layers, getattr(body.config, "layer_types", None)
    body.layers, config.num_hidden_layers = layers[:number], number
    if types:
        config.layer_types = types[:number]
    try:
        yield
    finally:
        body.layers, config.num_hidden_layers = layers, len(layers)
        if types:
            config.layer_types = types


def _add_adapter(model: Any, adapter: LoraConfig) -> None:
    """Add an adapter in float32 to a model on the meta device."""
    adapter.init_lora_weights = False  # there are none to begin from
    try:
        inject_adapter_in_model(without_frozen(adapter, model), model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise InputError(f"the [lora] table does not fit the model: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _costs(model: Any, dtype: Dtype) -> Costs:
    """Return the costs of the model, which gets fake tensors on the CPU.

    There torch chooses kernels that keep no attention weights, as on a GPU. Linear attention is torch's own, which
    keeps more than the fast kernels do: these run on GPUs alone.
    """
    exporting = partial(patch.object, hub_kernels, new=lambda: True)  # the functions that transformers exports, quietly
    with (
        exporting(attribute="is_torchdynamo_exporting"),
        exporting(attribute="is_torchdynamo_compiling"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        model = model.to_empty(device="cpu").train()
        model.tie_weights()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
        autocast = partial(torch.autocast, "cpu", getattr(torch, dtype), enabled=dtype != "float32")
        return of_all_layers(model, lambda: measure(model, autocast))


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
