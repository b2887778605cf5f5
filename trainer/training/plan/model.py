"""A model's numbers for a plan, taken from its configuration: no weights are loaded, and none are
made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rolltap.trainer.models.loading import (
    LINEAR_ATTENTION,
    Dtype,
    frozen_modules,
    kernels,
    meta_policy,
)
from rolltap.trainer.models.merging import merge_again
from rolltap.trainer.training.arguments import add_adapter, model_arguments
from rolltap.trainer.training.plan.stand_ins import delta_rules, without_values
from rolltap.trainer.training.plan.traced_step import FakeStep
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step.model import prepare

FLOAT32 = 4
"""Bytes of a value in float32."""
BFLOAT16 = 2
"""Bytes of a value in bfloat16."""
TOKENS = 64
"""Tokens whose keys and values are counted."""


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """Sizes of a model as it is served and trained. Sizes in memory are bytes."""

    architecture: str
    model_type: str
    parameters: int
    """Number of them, without an adapter's: all of the text part, which trainer and engine load."""
    weights: int
    """In the engine, without an adapter."""
    item: int
    """Of a value of the weights in the engine."""
    trained: int
    """Number of trained values: an adapter's, if there is one."""
    largest_layer: int
    """Number of values of the largest decoder layer."""
    outside: int
    """Number of values outside of the decoder layers: embeddings and head."""
    vocabulary: int
    """Number of logits of a token."""
    attention_layers: int
    """Layers that keep keys and values."""
    linear_layers: int
    """Layers that keep a state of linear attention."""
    token: int
    """Keys and values of a token, of all layers, in the engine."""
    state: int
    """Of a sequence in all layers of linear attention, in the engine."""
    fla: bool
    """True if linear attention is counted as flash-linear-attention computes it."""
    context: int
    """Longest input, in tokens."""
    tied: bool
    """True if the embeddings are the head too."""


def model_numbers(recipe: Recipe, dtype: Dtype, *, gpu: bool = False) -> ModelNumbers:
    """Return the numbers of a recipe's model, served with weights of `dtype`, trained on a GPU or
    on a CPU.

    A GPU of this machine has the kernels that are installed here. Another machine's has
    flash-linear-attention, which the documented installation includes.

    Raises `InputError` for a model that cannot be built, and for an adapter that does not fit it.
    """
    model = meta_policy(recipe.model, dtype, **model_arguments(recipe))
    config = model.config.get_text_config(decoder=True)
    weights = [*model.parameters()]
    parameters = _values(model)
    weight_bytes = sum(tensor.nbytes for tensor in [*weights, *model.buffers()])
    layers = [_values(layer) for layer in model.get_decoder().layers]
    installed = kernels(config.model_type).get(LINEAR_ATTENTION, False)
    if not torch.cuda.is_available():
        installed = True
    _make_trainable(recipe, model)
    return ModelNumbers(
        architecture=type(model).__name__,
        model_type=config.model_type,
        parameters=parameters,
        weights=weight_bytes,
        item=weights[0].element_size(),
        trained=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        largest_layer=max(layers),
        outside=parameters - sum(layers),
        vocabulary=model.get_output_embeddings().weight.shape[0],
        fla=gpu and installed and bool(delta_rules(model)),
        context=int(config.max_position_embeddings),
        tied=bool(model.config.tie_word_embeddings),
        **_cache(model.get_decoder()),
    )


def fake_step(
    recipe: Recipe,
    numbers: ModelNumbers,
    dtype: Dtype,
    *,
    sharded: bool,
) -> FakeStep:
    """Return the model as it is trained, for steps without values.

    All its weights are trained in float32, under autocast if `dtype` is bfloat16. Layers of
    `sharded` weights are gathered in `dtype`.
    """
    held: Dtype = dtype if recipe.lora or sharded else "float32"
    model = meta_policy(recipe.model, held, **model_arguments(recipe))
    _make_trainable(recipe, model)
    merge_again(model)
    return FakeStep(
        model,
        packed=recipe.grpo.get("forward") != "padded",
        checkpointing=recipe.grpo.get("activation_checkpointing", True),
        low_precision=dtype != "float32",
        fla=numbers.fla,
    )


def _make_trainable(recipe: Recipe, model: Any) -> None:
    """Give a model on the meta device what a training does: packs, frozen parts, an adapter."""
    for name in frozen_modules(model):
        model.get_submodule(name).requires_grad_(False)
    prepare(model, 1.0)
    add_adapter(recipe, model)


def _values(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _cache(decoder: Any) -> dict[str, int]:
    """Return what an engine keeps of a sequence, by the caches of transformers."""
    cache = DynamicCache(config=decoder.config)
    with without_values([]), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        decoder.to_empty(device="cpu").eval()
        decoder(
            input_ids=torch.zeros(1, TOKENS, dtype=torch.long),
            past_key_values=cache,
            use_cache=True,
        )
    found = dict.fromkeys(("attention_layers", "linear_layers", "token", "state"), 0)
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None:
            found["attention_layers"] += 1
            found["token"] += (keys.nbytes + layer.values.nbytes) // keys.shape[-2]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
            found["linear_layers"] += 1
            found["state"] += sum(state.nbytes for state in states if state is not None)
    return found
