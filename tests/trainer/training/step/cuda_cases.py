"""Packs through small models on a GPU, by tensors without data: see `fake_cuda`.

torch checks these as on a GPU: devices that do not match, the rules of autocast, the shapes of
FlexAttention's forward and backward pass. Its kernels are not compiled.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from rolltap.trainer.training.step.model import prepare
from rolltap.trainer.training.step.pack import Pack
from tests.trainer.training.step.small_models import branching_rows, small_model


class Values(TorchDispatchMode):
    """Answers where a tensor's values matter: Python gets 0, and a mask chooses all."""

    supports_higher_order_operators = True  # FlexAttention is one

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because torch traces functions of FlexAttention only under such modes."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        if function is torch.ops.aten.index.Tensor:
            values, (mask, *_) = args
            if mask is not None and mask.dtype == torch.bool:
                assert mask.device == values.device
                return values.flatten(0, mask.ndim - 1)
        return function(*args, **(kwargs or {}))


def on_meta(family: str, dtype: torch.dtype, *, lora: bool) -> Any:
    """Return a prepared model of a family without data."""
    with torch.device("meta"):
        model = prepare(small_model(family).to(dtype), 1.0)
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return model


def attention_kinds(config: Any) -> list[str]:
    """Return the kind of attention of each layer that has FlexAttention."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [kind for kind in kinds if kind != "linear_attention"]


def train(family: str, dtype: torch.dtype, *, lora: bool = False) -> None:
    """Run the forward and the backward pass of a pack."""
    autocast: Any = nullcontext()
    if dtype == torch.bfloat16:
        autocast = torch.autocast("cuda", dtype)
    calls = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(options["block_mask"])
        return flex_attention(*arguments, **options)

    # torch compiles for tensors with data only
    uncompiled = patch(
        "transformers.integrations.flex_attention.WrappedFlexAttention",
        lambda training: lambda: call,
    )
    model = on_meta(family, dtype, lora=lora)
    with FakeTensorMode(allow_non_fake_inputs=True), Values(), uncompiled:
        model = model.to_empty(device="cuda").train()
        model.tie_weights()
        model.activation_checkpointing_enable()
        if lora:
            model.enable_input_require_grads()
        pack = Pack([branching_rows()[:8]], "cuda")
        with autocast:
            output = model(**pack.inputs())
        logprobs = pack.unpack(output.log_probs)
        assert logprobs.device.type == "cuda"
        logprobs.float().sum().backward()
        kinds = attention_kinds(model.config)
        # the forward pass, and again for the backward pass
        assert len(calls) >= 2 * len(kinds)
        # layers with the same window share a mask
        assert len({id(mask) for mask in calls}) == len({*kinds})
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                assert weight.grad is None, f"{name} has a gradient"
                continue
            assert weight.grad is not None, f"{name} has no gradient"
            assert weight.grad.shape == weight.shape
            assert weight.grad.device == weight.device


CASES: dict[str, Callable[[], None]] = {
    "float32": partial(train, "qwen3", torch.float32),
    "an adapter": partial(train, "qwen3", torch.bfloat16, lora=True),
    "windows and sinks": partial(train, "gpt-oss", torch.bfloat16),
    "windows and soft caps": partial(train, "gemma2", torch.bfloat16),
    "values narrower than keys": partial(train, "deepseek-v3", torch.bfloat16),
    "linear attention": partial(train, "qwen3.5", torch.bfloat16),
}
