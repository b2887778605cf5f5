"""A model's numbers for a plan, taken from its configuration: no weights are loaded, and none are made."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import hub_kernels, moe

from rolltap.trainer.models.loading import LINEAR_ATTENTION, Dtype, frozen_modules, kernels, meta_policy
from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.training.arguments import add_adapter, model_arguments
from rolltap.trainer.training.forward.caches import Layers
from rolltap.trainer.training.forward.linear import as_fla_saves, has_gated_delta_rule, in_float32
from rolltap.trainer.training.forward.sizes import Costs, measure
from rolltap.trainer.training.grpo.sharding import layers_of
from rolltap.trainer.training.recipe import Recipe

FLOAT32 = 4
"""Bytes of a value in float32."""


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """Sizes of a model as it is trained. Sizes in memory are bytes."""

    architecture: str
    model_type: str
    parameters: int
    """Number of them, without an adapter's, as in `weights`: all of the text part, which trainer and engine load."""
    weights: int
    adapter: int
    """In float32."""
    merged: int
    """Weights of a layer with an adapter on its experts, into which PEFT merges it, and their gradient."""
    sizes: tuple[int, ...]
    """Number of values of each trained parameter."""
    layers: tuple[int, ...]
    """Number of values of each decoder layer, without an adapter's."""
    whole: tuple[int, ...]
    """As `sizes`, of those that are whole on each process where weights are sharded."""
    item: int
    """Bytes of a value of the weights."""
    vocabulary: int
    """Number of logits of a token."""
    attention_layers: int
    """Layers that keep keys and values."""
    linear_layers: int
    """Layers that keep a state of linear attention."""
    fla: bool
    """True if the gated delta rule of linear attention is counted as flash-linear-attention computes it."""
    context: int
    """Longest input, in tokens."""
    tied: bool
    """True if the embeddings are the head too."""
    costs: Costs

    @property
    def trained(self) -> int:
        """Number of trained values."""
        return sum(self.sizes)


def model_numbers(recipe: Recipe, dtype: Dtype, *, gpu: bool = False) -> ModelNumbers:
    """Return the numbers of a recipe's model with weights of `dtype`, trained on a GPU or on a CPU.

    A GPU of this machine has the kernels that are installed here. Another machine's has flash-linear-attention, which
    the documented installation includes.

    Raises `InputError` for a model that cannot be built, for an adapter that does not fit it, and for one with layers
    whose states are not known.
    """
    init = model_arguments(recipe)
    model = meta_policy(recipe.model, dtype, **init)
    for name in frozen_modules(model):
        model.get_submodule(name).requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    parameters, item = sum(p.numel() for p in model.parameters()), next(model.parameters()).element_size()
    weights = _bytes(model)
    layers = [[*layer.parameters()] for layer in layers_of(model.get_decoder())]
    sharded = {id(weight) for layer in layers for weight in layer}
    add_adapter(recipe, model)
    kept = Layers(model.get_decoder().config)
    installed = kernels(config.model_type).get(LINEAR_ATTENTION, False) or not torch.cuda.is_available()
    fla = gpu and installed and has_gated_delta_rule(model)
    return ModelNumbers(
        architecture=type(model).__name__,
        model_type=config.model_type,
        parameters=parameters,
        weights=weights,
        adapter=_bytes(model) - weights,
        merged=merge_again(model),
        sizes=tuple(p.numel() for p in model.parameters() if p.requires_grad),
        layers=tuple(sum(weight.numel() for weight in layer) for layer in layers),
        whole=tuple(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in sharded),
        item=item,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        attention_layers=kept.attention,
        linear_layers=kept.linear,
        fla=fla,
        context=int(config.max_position_embeddings),
        tied=bool(model.config.tie_word_embeddings),
        costs=_costs(model, dtype, fla=fla),
    )


def _costs(model: Any, dtype: Dtype, *, fla: bool) -> Costs:
    """Return the costs of the model, which gets fake tensors on the CPU.

    There torch chooses kernels that keep no attention weights, as on a GPU.
    """
    in_float32(model)
    # the functions that transformers exports, quietly; its experts in a form that knows shapes in every type
    exporting: dict[str, Any] = dict.fromkeys(("is_torchdynamo_exporting", "is_torchdynamo_compiling"), lambda: True)
    experts = patch.object(moe, "_can_use_grouped_mm", lambda *_: False)
    linear = as_fla_saves(model) if fla else nullcontext()
    with patch.multiple(hub_kernels, **exporting), experts, linear, FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        model.tie_weights()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
        autocast = partial(torch.autocast, "cpu", getattr(torch, dtype), enabled=dtype != "float32")
        return measure(model, autocast)


def _bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
