"""Functions that stand for kernels while a step is traced: they allocate and save the same tensors,
and compute nothing."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import hub_kernels, moe
from trl.kernels import chunked_logprob

from rolltap.trainer.training.step.linear import DELTA_RULES

ATTENTION = "rolltap_plan"
"""Name of the attention that stands for FlexAttention."""
FLA_CHUNK = 64
"""Tokens of a chunk of fla's kernel."""


def _yes(*_: Any) -> bool:
    return True


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def without_values(rules: Sequence[Any]) -> Iterator[None]:
    """Replace functions that need values, and gated delta rules of `delta_rules` by fla's."""
    with ExitStack() as stack:
        replace = stack.enter_context
        # transformers' functions for an export know shapes alone
        exporting: Any = {"is_torchdynamo_exporting": _yes, "is_torchdynamo_compiling": _yes}
        replace(patch.multiple(hub_kernels, **exporting))
        # experts in a form that has shapes in every type
        replace(patch.object(moe, "_can_use_grouped_mm", _nothing))
        # kernels fold a tile of logits into statistics, and make it its own gradient, in place
        replace(patch.multiple(chunked_logprob, _forward_tile=_nothing, _backward_tile=_nothing))
        for rule in rules:
            replace(patch.multiple(rule, of_the_library=fla_delta_rule, knows_lengths=True))
        yield


def delta_rules(model: Any) -> list[Any]:
    """Return the gated delta rules that the layers of a prepared model call."""
    found = {}
    for module in model.modules():
        names = vars(sys.modules[type(module).__module__])
        for name in DELTA_RULES:
            rule = names.get(name)
            if hasattr(rule, "of_the_library"):
                found[name] = rule
    return [*found.values()]


def _flex_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    """Return (1, N, heads, D). Source: transformers 5.23, integrations/flex_attention.py."""
    dtype = query.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    heads = query.shape[1]
    if heads & (heads - 1):
        # the kernel knows groups of heads for powers of 2 alone
        groups = heads // key.shape[1]
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    padded = [x.to(dtype).clone() for x in (query, key, value)]
    out = padded[0].new_empty(*query.shape[:-1], value.shape[-1])
    sums = out.new_empty(out.shape[:-1], dtype=torch.float32)
    result = _Kernel.apply(out, [out, sums], [out.shape], *padded)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).contiguous(), None


def fla_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    **options: Any,
) -> Any:
    """Return an output and the last states, for the arguments of transformers' function.

    Source: fla 0.6.0, ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction.
    """
    rows, tokens, heads, size = value.shape
    value = value.contiguous()
    inverses = key.new_empty(rows, tokens, heads, FLA_CHUNK)  # a matrix for each chunk
    saved = [inverses, torch.empty_like(g, dtype=torch.float32)]
    for normalized in (query, key):
        saved.append(torch.empty_like(normalized, memory_format=torch.contiguous_format))
        saved.append(normalized.new_empty(normalized.shape[:-1], dtype=torch.float32))
    states = rows
    if initial_state is not None:
        states = len(initial_state)
    state = value.new_empty(states, heads, key.shape[-1], size, dtype=torch.float32)
    # the states before all chunks, and their gradients
    working = [(rows, -(-tokens // FLA_CHUNK), heads, key.shape[-1], size)] * 2
    inputs = (query, key, value, g, beta.contiguous(), initial_state)
    outputs = (torch.empty_like(value), state)
    return _Kernel.apply(outputs, saved, working, *inputs)  # type: ignore[no-untyped-call]


class _Kernel(torch.autograd.Function):
    """Returns `outputs`. Keeps inputs and `saved` for the backward pass, which makes tensors of the
    shapes `working` for its own use."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Any,
        saved: Sequence[Tensor],
        working: Sequence[Sequence[int]],
        *inputs: Tensor | None,
    ) -> Any:
        ctx.inputs = len(inputs)
        ctx.working = working
        ctx.save_for_backward(*inputs, *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors[: ctx.inputs]
        working = [inputs[0].new_empty(shape) for shape in ctx.working]
        made = [None if x is None else torch.empty_like(x) for x in inputs]
        del working
        return None, None, None, *made


AttentionInterface.register(ATTENTION, _flex_attention)
AttentionMaskInterface.register(ATTENTION, _nothing)
