"""Attention whose keys lie in several places, joined exactly.

Each part gives its output and the log-sum-exp of its scores, from which `join` makes those over all keys. The backward
pass of a part needs nothing of the others but the joint output and log-sum-exp: with P = exp(S - lse), the gradient of
the scores is P * (dP - rowsum(dO * O)). Source: FlashAttention, https://arxiv.org/abs/2205.14135, appendix B.

Tensors are (tokens, heads, size); keys and values may have fewer heads, each of which several heads of queries read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

aten: Any = torch.ops.aten

BLOCK = 512
"""Queries that are multiplied at once with the positions of a window."""
SCORES = 2**24
"""Scores that the formula computes at once."""
FLASH_SIZE = 256
"""Largest size of a head that FlashAttention has. https://github.com/Dao-AILab/flash-attention"""


class Tile(NamedTuple):
    """Queries and the keys that they see."""

    queries: slice
    keys: slice
    first: int | None
    """Position of the first query among the keys, where each query sees those up to its own. None: each sees all."""


@dataclass(eq=False)
class Spans:
    """Runs of queries, each of which sees a run of keys. With `causal`, the last query is at the last key."""

    queries: Sequence[int]
    """Number of queries of each run."""
    keys: Sequence[int]
    """Number of keys of each run."""
    causal: bool = True
    window: int | None = None
    """Positions that a query sees, its own included."""

    def tiles(self, block: int | None) -> Iterator[Tile]:
        """Yield tiles of at most `block` queries, which together have each query once."""
        q = k = 0
        for n, m in zip(self.queries, self.keys, strict=True):
            for start in range(0, n, block or n):
                end = min(n, start + (block or n))
                first = m - n + start
                low = max(0, first + 1 - self.window) if self.window else 0
                keys = slice(k + low, k + m - n + end) if self.causal else slice(k, k + m)
                yield Tile(slice(q + start, q + end), keys, first - low if self.causal else None)
            q, k = q + n, k + m

    @cached_property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Arguments of CUDA's kernel: the first query and the first key of each run, then the numbers of all, int32, on
        the device; the most of one run."""
        found = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (self.queries, self.keys))
        queries, keys = (offsets.pin_memory().cuda(non_blocking=True) for offsets in found)
        return queries, keys, max(self.queries), max(self.keys)

    @property
    def flash(self) -> dict[str, Any]:
        """Options of CUDA's kernel."""
        left, right = (self.window - 1, 0) if self.window else (-1, -1)
        return {"window_size_left": left, "window_size_right": right}


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join another part into `out` (n, H, D) float32 and `lse` (H, n), in place."""
    joint = torch.logaddexp(lse, part_lse)
    own, other = (logs.exp().T[..., None] for logs in (lse - joint, part_lse - joint))  # (n, H, 1)
    out.mul_(own).add_(part * other)
    lse.copy_(joint)


class Kernel:
    """Attention of one layer's shapes: torch's FlashAttention where it has them, otherwise the formula in float32."""

    def __init__(self, query: Tensor, value: Tensor, scale: float, cap: float | None = None) -> None:
        """`scale` multiplies the scores, which tanh limits to `cap`."""
        self._scale, self._cap = scale, cap
        size = query.shape[-1]
        self._flash = cap is None and value.shape[-1] <= size
        if query.is_cuda:
            self._flash &= query.itemsize == 2 and size <= FLASH_SIZE and size % 8 == 0
        # values may be narrower than keys, which the kernels do not have
        self._wider = size - value.shape[-1] if self._flash else 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        """Return the output (n, H, D) and the log-sum-exp (H, n) float32 for queries (n, H, K), keys (m, h, K) and
        values (m, h, D)."""
        value = pad(value, (0, self._wider))
        if self._flash and query.is_cuda:
            out, lse, *_ = aten._flash_attention_forward(
                query, key, value, *spans.lengths, 0.0, spans.causal, False, scale=self._scale, **spans.flash
            )
            return self._narrow(out), lse
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        for tile in self._tiles(spans, query, key):
            q, k, v = (x.transpose(0, 1) for x in (query[tile.queries], key[tile.keys], value[tile.keys]))
            q = q.unflatten(0, (len(k), -1))  # (h, g, n, K): g heads of queries read the same keys
            one, one_lse = (_flash_cpu if self._flash else self._formula)(q, k, v, self._options(tile, spans, q, k))
            out[tile.queries] = _by_token(one)
            lse[:, tile.queries] = one_lse.flatten(0, 1)
        return self._narrow(out), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values from this part. `out` and `lse` are the joint ones."""
        value, out, grad = (pad(x, (0, self._wider)) for x in (value, out, grad))
        if self._flash and query.is_cuda:
            # of dropout, which there is not: not read
            random = torch.empty(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
            dq, dk, dv = aten._flash_attention_backward(
                *(x.contiguous() for x in (grad, query, key, value, out, lse)),
                *(*spans.lengths, 0.0, spans.causal, *random),
                **{"scale": self._scale, **spans.flash},
            )
            return dq, dk, self._narrow(dv)
        tiles = [*self._tiles(spans, query, key)]
        dq = torch.empty_like(query)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value)) if len(tiles) > 1 else (key, value)
        for tile in tiles:
            k, v = (x[tile.keys].transpose(0, 1) for x in (key, value))
            q, g, o = (x[tile.queries].transpose(0, 1).unflatten(0, (len(k), -1)) for x in (query, grad, out))
            options = self._options(tile, spans, q, k)
            step = _flash_cpu_backward if self._flash else self._formula_backward
            found = map(_by_token, step(g, q, k, v, o, lse[:, tile.queries].view(q.shape[:-1]), options))
            if len(tiles) == 1:
                # no copies of gradients of thousands of positions
                dq, dk, dv = found
                break
            dq[tile.queries], one_dk, one_dv = found
            dk[tile.keys] += one_dk
            dv[tile.keys] += one_dv
        return dq, dk, self._narrow(dv)

    def _narrow(self, x: Tensor) -> Tensor:
        return x[..., : x.shape[-1] - self._wider]

    def _tiles(self, spans: Spans, query: Tensor, key: Tensor) -> Iterator[Tile]:
        if not self._flash:
            return spans.tiles(max(16, SCORES // (query.shape[1] * max(spans.keys))))
        return spans.tiles(BLOCK if spans.window else None)

    def _options(self, tile: Tile, spans: Spans, query: Tensor, key: Tensor) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": self._scale}
        n, m = query.shape[2], key.shape[1]
        if self._flash and tile.first == 0 and n == m and spans.window is None:
            options["is_causal"] = True
        elif tile.first is not None:
            apart = torch.arange(m, device=key.device) - torch.arange(n, device=key.device)[:, None] - tile.first
            hidden = apart > 0 if spans.window is None else (apart > 0) | (apart <= -spans.window)
            options["attn_mask"] = query.new_zeros(1, 1, n, m).masked_fill_(hidden, float("-inf"))
        return options

    def _scores(self, q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the scores (h, g, n, m) in float32, and what tanh made of them, if it did."""
        scores = (q.float() @ k.float()[:, None].mT).mul_(self._scale)
        tanh = None
        if self._cap is not None:
            tanh = torch.tanh(scores / self._cap)
            scores = tanh * self._cap
        return (scores + options["attn_mask"] if "attn_mask" in options else scores), tanh

    def _formula(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(q, k, options)
        lse = scores.logsumexp(-1)
        return scores.sub_(lse[..., None]).exp_() @ v.float()[:, None], lse

    def _formula_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, q, k, v, out = (x.float() for x in (g, q, k, v, out))
        scores, tanh = self._scores(q, k, options)
        p = scores.sub_(lse[..., None]).exp_()
        ds = p * (g @ v[:, None].mT - (g * out).sum(-1, keepdim=True))
        if tanh is not None:
            ds *= 1 - tanh.square()
        ds *= self._scale
        return ds @ k[:, None], (ds.mT @ q).sum(1), (p.mT @ g).sum(1)


def _by_token(x: Tensor) -> Tensor:
    """Return (n, heads, size) for (heads, n, size), or for grouped heads."""
    return x.flatten(0, -3).transpose(0, 1)


def _folded(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what torch's kernel for the CPU takes, which knows no groups: keys that are read again by each head, or
    the queries of a group as one head, where all of them see the same keys."""
    if "is_causal" in options or "attn_mask" in options:
        every = (-1, q.shape[1], -1, -1)
        return q, k[:, None].expand(every), v[:, None].expand(every)
    return q.flatten(1, 2)[None], k[None], v[None]


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_folded(q, k, v, options), **options)
    return out.view(*q.shape[:-1], -1), lse.view(q.shape[:-1])


def _flash_cpu_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    folded = _folded(q, k, v, options)
    shape = folded[0].shape
    tensors = (g.reshape(shape), *folded, out.reshape(shape), lse.reshape(shape[:-1]))
    options = {"is_causal": False, **options}
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, dropout_p=0.0, **options)
    if dk.shape[:2] == (1, len(k)):
        return dq.view(q.shape), dk[0], dv[0]
    return dq, dk.sum(1), dv.sum(1)
