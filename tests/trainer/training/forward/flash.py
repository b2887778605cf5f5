"""FlashAttention as torch has it for CUDA: the conditions on its arguments, its formula.

The names and the order of the arguments are those of aten's schemas. Source: torch 2.13,
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd and mha_varlen_bwd.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST_HEAD = 256


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor]:
    """Return the output (n, H, D) and the log-sum-exp (H, n) float32."""
    check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p)
    assert not return_debug_mask
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for queries, keys, hidden in _runs(cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right):
        scores = _scores(query[queries], key[keys], hidden, scale)
        lse[:, queries] = scores.logsumexp(-1)
        values = _repeated(value[keys], query)
        out[queries] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values).to(out.dtype)
    return out, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p)
    check_backward(grad_out, query, out, logsumexp)
    dq = torch.empty_like(query)
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for queries, keys, hidden in _runs(cum_seq_q, cum_seq_k, is_causal, window_size_left, window_size_right):
        q, g, o = (x[queries].float() for x in (query, grad_out, out))
        k, v = (_repeated(x[keys], query) for x in (key, value))
        p = (_scores(query[queries], key[keys], hidden, scale) - logsumexp[:, queries, None]).exp()
        ds = p * (torch.einsum("nhd,mhd->hnm", g, v) - (g * o).sum(-1).T[..., None]) * scale
        dq[queries] = torch.einsum("hnm,mhd->nhd", ds, k).to(dq.dtype)
        for total, one in (
            (dk, torch.einsum("hnm,nhd->mhd", ds, q)),
            (dv, torch.einsum("hnm,nhd->mhd", p, g)),
        ):
            total[keys] = one.unflatten(1, (key.shape[1], -1)).sum(2).to(total.dtype)
    return dq, dk, dv


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
) -> None:
    """Check the kernels' conditions of both passes. Functions for tensors without data do not."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert key.dtype == value.dtype == query.dtype
    for tensor in (query, key, value, cum_seq_q, cum_seq_k):
        assert tensor.is_cuda
        assert tensor.stride(-1) == 1
    for offsets in (cum_seq_q, cum_seq_k):
        assert offsets.dtype == torch.int32
        assert offsets.shape == cum_seq_q.shape
    n, heads, size = query.shape
    m, fewer, _ = key.shape
    assert key.shape == value.shape == (m, fewer, size)
    assert heads % fewer == 0
    assert size <= LARGEST_HEAD
    assert size % 8 == 0
    assert 1 <= max_q <= n
    assert 1 <= max_k <= m
    assert dropout_p == 0


def check_backward(grad_out: Tensor, query: Tensor, out: Tensor, logsumexp: Tensor) -> None:
    """Check the further conditions of the backward pass."""
    for tensor in (grad_out, out):
        assert tensor.is_cuda
        assert tensor.dtype == query.dtype
        assert tensor.shape == query.shape
        assert tensor.is_contiguous()
    # read by its address
    assert logsumexp.is_cuda
    assert logsumexp.dtype == torch.float32
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.is_contiguous()


def _runs(
    cum_seq_q: Tensor, cum_seq_k: Tensor, causal: bool, left: int, right: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries and the keys of each run, and the keys that are hidden from a query, (n, m).

    The last query is at the last key.
    """
    right = 0 if causal else right
    for a, b, c, d in zip(cum_seq_q, cum_seq_q[1:], cum_seq_k, cum_seq_k[1:], strict=False):
        n, m = int(b - a), int(d - c)
        apart = torch.arange(m) - torch.arange(m - n, m)[:, None]
        hidden = torch.zeros(n, m, dtype=torch.bool)
        if right >= 0:
            hidden |= apart > right
        if left >= 0:
            hidden |= apart < -left
        yield slice(a, b), slice(c, d), hidden


def _scores(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Return the scores (H, n, m), float32."""
    scores = torch.einsum("nhd,mhd->hnm", query.float(), _repeated(key, query)) * scale
    return scores.masked_fill(hidden, float("-inf"))


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Return a head for each of the queries', float32."""
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], 1)
