"""Linear attention of transformers' models: its formula in PyTorch, which stays in float32 under
autocast, and the memory of fla's kernel, without fla.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rolltap.trainer.training.forward.decoder import unwrapped

GATED_DELTA_RULE = "torch_chunk_gated_delta_rule"
RULES = (GATED_DELTA_RULE, "chunk_kimi_delta_attention", "mamba2_chunk_scan")
"""Functions that cast to float32 and multiply matrices, where no package has a kernel for them.
Source: transformers 5.23, models/*/modeling_*.py, use_kernel_func_from_hub_with_fallback."""


def in_float32(model: Any) -> None:
    """Turn autocast off in the linear attention of a model, and of all models of its class.

    Autocast would multiply in bfloat16, although the code has cast to float32.
    """
    module = _module(model)
    for name in RULES:
        rule = getattr(module, name, None)
        if rule is not None and not isinstance(rule, _InFloat32):
            setattr(module, name, _InFloat32(rule))


class _InFloat32:
    def __init__(self, of_the_library: Callable[..., Any]) -> None:
        self.of_the_library = of_the_library

    def __call__(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(query.device.type, enabled=False):
            return self.of_the_library(query, *args, **kwargs)


FLA_CHUNK = 64
"""Tokens of a chunk of fla's kernel."""


def has_gated_delta_rule(model: Any) -> bool:
    """Return True if a model has linear attention that `as_fla_saves` knows."""
    return hasattr(_module(model), GATED_DELTA_RULE)


def as_fla_saves(model: Any) -> AbstractContextManager[Any]:
    """Run the gated delta rule of a model without values: it saves the tensors that fla's saves."""
    return patch.object(_module(model), GATED_DELTA_RULE, _saved_by_fla)


def _module(model: Any) -> ModuleType:
    return sys.modules[type(unwrapped(model)).__module__]


def _saved_by_fla(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return an output and a state of the right shapes, for the arguments of transformers' function."""
    out, state = _Saved.apply(query, key, value, g, beta, initial_state)  # type: ignore[no-untyped-call]
    return out, state


class _Saved(torch.autograd.Function):
    """Source: fla 0.6.0, ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction.forward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows, tokens, heads, size = value.shape
        sums = torch.empty_like(g, dtype=torch.float32)
        inverses = key.new_empty(rows, tokens, heads, FLA_CHUNK)  # a matrix for each chunk
        saved = [initial_state, value.contiguous(), beta.contiguous(), sums, inverses]
        for normalized in (query, key):
            saved.append(torch.empty_like(normalized, memory_format=torch.contiguous_format))
            saved.append(normalized.new_empty(normalized.shape[:-1], dtype=torch.float32))
        ctx.save_for_backward(*saved)
        state = value.new_empty(rows, heads, key.shape[-1], size, dtype=torch.float32)
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        return out, state
