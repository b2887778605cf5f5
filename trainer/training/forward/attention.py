"""Attention of a segment to its ancestors, with one mask for all layers.

Torch's attention turns a mask of booleans into numbers in each layer, and keeps them for the backward pass: layers x
tokens x positions. Transformers also repeats keys and values for the heads that share them, when there is a mask.
Here the layers share the mask's numbers, and heads read the same keys. Where a kernel of CUDA knows what is later
without a mask, there is none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "rolltap_segments"
"""Name of this attention in a model's configuration."""

ALIGNED = 8
"""Values of which a row of a mask has a multiple, or CUDA's kernel copies the mask in each layer."""

BLOCK = 512
"""New tokens that are multiplied at once with all that they may see. With a mask, torch multiplies what is later too,
and adds minus infinity."""


@contextmanager
def segment_attention(config: Any) -> Iterator[None]:
    """Let a model use this attention if it uses torch's. `config` is the configuration of its decoder."""
    if config._attn_implementation != "sdpa":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _compute_type(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def _mask(*, device: torch.device, dtype: torch.dtype, **options: Any) -> Tensor | None:
    """Return numbers to add, (B, 1, n, positions), or None if the new tokens see all positions up to their own."""
    dtype = _compute_type(device, dtype)
    plain = options["mask_function"] is causal_mask_function and options["attention_mask"] is None
    if plain and device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        return None
    allowed = sdpa_mask(device=device, dtype=dtype, **options)
    if allowed is None:
        return None
    *shape, positions = allowed.shape
    mask = torch.zeros(*shape, -(-positions // ALIGNED) * ALIGNED, dtype=dtype, device=device)[..., :positions]
    return mask.masked_fill_(~allowed, float("-inf"))


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (B, n, heads, size) for queries (B, heads, n, size), and keys and values (B, fewer heads, P, size)."""
    batch, heads, n, _ = query.shape
    groups = heads // key.shape[1]
    unmasked = attention_mask is None and 1 < n < key.shape[2]
    usual = options.get("position_bias") is not None or options.get("softcap") is not None
    if usual or not (unmasked or (attention_mask is not None and batch == 1)):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    # as torch's attention does under autocast
    dtype = _compute_type(query.device, query.dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is None:
        bias: Tensor = causal_lower_right(n, key.shape[2])
        if not can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, groups > 1)):
            bias = torch.ones(n, key.shape[2], dtype=torch.bool, device=key.device).tril(key.shape[2] - n)
        out = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling, enable_gqa=groups > 1)
    else:
        # each group of heads becomes a row, whose keys are not copied but read again
        query = query.reshape(heads // groups, groups, n, -1)
        key, value = (x.transpose(0, 1).expand(-1, groups, -1, -1) for x in (key, value))
        parts = []
        for start in range(0, n, BLOCK):
            new = slice(start, start + BLOCK)
            seen = slice(key.shape[2] - n + min(start + BLOCK, n))
            mask = attention_mask[:, :, new, seen]
            parts.append(
                scaled_dot_product_attention(
                    query[:, :, new], key[:, :, seen], value[:, :, seen], mask, dropout, scale=scaling
                )
            )
        out = torch.cat(parts, 2).reshape(1, heads, n, -1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
