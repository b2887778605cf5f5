"""Attention of packed rows: an implementation that a Hugging Face model calls as any other.

On CUDA it is FlexAttention, whose mask is made of blocks in closed form. On the CPU it is torch's kernel of
FlashAttention, called for tiles, each of which gives its output and the log-sum-exp of its scores, from which those
over all keys are joined exactly. The backward pass of a tile needs nothing of the others but the joint output and
log-sum-exp. Source: FlashAttention, https://arxiv.org/abs/2205.14135, appendix B.

Nothing of N x N is made, but FlexAttention's list of blocks: (N / 128)^2 integers.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.pack import NAME, Pack

aten: Any = torch.ops.aten

BLOCK = 128
"""Tokens of a block of FlexAttention's mask. Its tensors are padded to a multiple, because other lengths have kernels
of their own. Then a second length compiles a kernel for all lengths, and no later one compiles anew."""
VARIANTS = 64
"""Kernels of FlexAttention that a process may compile. There are up to 8 of each size of a head: with a window and
without, with gradients and without, for the first length and for all. torch's limit is 8. Beyond it torch would run
the formula without a kernel, which makes N x N scores.
"""
TILE = 128
"""Queries of a tile with a mask. Larger ones multiply more pairs that are hidden."""


def register(stock: str) -> str:
    """Register the attention of packs, and return its name. Calls without a pack run the `stock` implementation."""
    name = f"{NAME}_{stock}"
    AttentionInterface.register(name, partial(_attention, stock))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[stock])
    return name


def _attention(
    stock: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return (1, N, heads, D) for queries (1, heads, N, K), keys (1, fewer heads, N, K) and values (1, same, N, D)."""
    pack: Pack | None = options.pop(NAME, None)
    if pack is None:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        implementation = ALL_ATTENTION_FUNCTIONS.get_interface(stock, eager)
        result: tuple[Tensor, Tensor | None] = implementation(
            module, query, key, value, attention_mask, **options
        )
        return result
    if options.get("dropout") or options.get("position_bias") is not None:
        raise InputError("the model's attention has a dropout, or a bias of positions")
    if getattr(module.config, "attention_chunk_size", None) is not None:
        raise InputError("the model's attention is cut into chunks of positions")

    device = query.device.type
    dtype = query.dtype
    if torch.is_autocast_enabled(device):
        # as torch's attention does
        dtype = torch.get_autocast_dtype(device)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    window: int | None = options.get("sliding_window")
    with torch.autocast(device, enabled=False):
        if query.is_cuda:
            out = _flex(module, query, key, value, pack, window, options)
        else:
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            softcap = options.get("softcap")
            tiles = _Tiles(pack, window, whole=softcap is None)
            out = _on_cpu(query, key, value, options.get("s_aux"), _Form(tiles, scale, softcap))
    return out, None


# ----------------------------------------------------------------------------------------- CUDA


def _flex(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, VARIANTS)
    blocks = block_mask(pack, window)
    more = blocks.seq_lengths[0] - pack.tokens
    padded = [pad(x, (0, 0, 0, more)) for x in (query, key, value)]
    given = {name: options.get(name) for name in ("scaling", "softcap", "s_aux")}
    out: Tensor = flex_attention_forward(module, *padded, blocks, **given)[0]
    return out[:, : pack.tokens]


def block_mask(pack: Pack, window: int | None) -> BlockMask:
    """Return FlexAttention's mask of a pack, padded to a multiple of `BLOCK`. Padding sees itself."""
    key = "block_mask", window
    if key not in pack.derived:
        number = -(-pack.tokens // BLOCK)
        more = number * BLOCK - pack.tokens
        device = pack.leave.device
        ends = torch.arange(pack.tokens + 1, number * BLOCK + 1, device=device)
        leave = torch.cat([pack.leave, ends])
        positions = pad(pack.positions[0], (0, more))
        chosen = _blocks(leave, positions, window)
        # for each block of queries: how many blocks of keys, then which
        arguments = []
        for blocks in chosen:
            which = blocks.int().argsort(dim=-1, descending=True, stable=True)
            arguments.append(blocks.sum(-1, dtype=torch.int32)[None, None])
            arguments.append(which.int()[None, None])
        pack.derived[key] = BlockMask.from_kv_blocks(
            *arguments,
            BLOCK_SIZE=BLOCK,
            mask_mod=_mask_mod(leave, positions, window),
            seq_lengths=(number * BLOCK, number * BLOCK),
        )
    found: BlockMask = pack.derived[key]
    return found


def _blocks(leave: Tensor, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return for each block of queries the blocks of keys of which it sees a part, and those of which it sees all, both
    (n, n)."""
    ends = leave.view(-1, BLOCK)
    places = positions.view(-1, BLOCK)
    start = torch.arange(0, len(leave), BLOCK, device=leave.device)
    queries = start[:, None]
    keys = start[None]
    # a key that no other one outlasts is seen by the first query, if it is seen by any
    some = (keys <= queries) & (ends.amax(1)[None] > queries)
    whole = (keys < queries) & (ends.amin(1)[None] >= queries + BLOCK)
    if window is not None:
        some &= places.amin(1)[:, None] - places.amax(1)[None] < window
        whole &= places.amax(1)[:, None] - places.amin(1)[None] < window
    return some & ~whole, whole


def _mask_mod(leave: Tensor, positions: Tensor, window: int | None) -> Any:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < leave[key])

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = positions[query] - positions[key] < window
        return sees(batch, head, query, key) & near

    return sees if window is None else sees_near


# ------------------------------------------------------------------------------------------ CPU


@dataclass(frozen=True)
class _Tile:
    """Queries, and some of the keys that they see."""

    queries: slice
    keys: slice | Tensor
    causal: bool = False
    """True if the keys are those of the queries, and each sees those up to its own."""
    hidden: Tensor | None = None
    """Keys that a query does not see, (n, m)."""

    @property
    def joins(self) -> bool:
        """True if the queries see all keys, and have been in an earlier tile with their own."""
        return not self.causal and self.hidden is None


@dataclass(frozen=True)
class _Tiles:
    """The tiles of a pack. Each query is in a tile with its own key."""

    pack: Pack
    window: int | None
    whole: bool
    """True if tiles may have any number of queries."""

    def __iter__(self) -> Iterator[_Tile]:
        pack = self.pack
        far = self.window is None or self.window >= pack.depth
        if far and self.whole:
            if "stretches" not in pack.derived:
                pack.derived["stretches"] = [*_stretches(pack)]
            yield from pack.derived["stretches"]
        else:
            yield from _masked(pack, None if far else self.window)


def _stretches(pack: Pack) -> Iterator[_Tile]:
    """Yield tiles without masks, and without a copy of a key.

    A segment that lies behind the segment that it continues is in one stretch with it: in a stretch attention is
    causal. All other children of a segment, with all that continues them, are behind one another and see the stretch
    up to that segment. Each query is in at most 1 + log2(N) tiles.
    """
    starts: list[int] = []  # of the stretch of each segment
    ends: dict[int, int] = {}
    others: dict[int, int] = {}  # segment -> first token of its children but the first
    for k, parent in enumerate(pack.parents):
        begin = int(pack.begins[k])
        if parent >= 0 and begin == pack.ends[parent]:
            starts.append(starts[parent])
        else:
            starts.append(begin)
            if parent >= 0:
                others.setdefault(parent, begin)
        ends[starts[k]] = int(pack.ends[k])
    for begin, end in ends.items():
        yield _Tile(slice(begin, end), slice(begin, end), causal=True)
    for parent, begin in others.items():
        end = int(pack.ends[parent])
        leave = int(pack.leave[end - 1])
        yield _Tile(slice(begin, leave), slice(starts[parent], end))


def _masked(pack: Pack, window: int | None) -> Iterator[_Tile]:
    """Yield tiles of `TILE` queries with all keys that they see."""
    every = torch.arange(pack.tokens)
    positions = pack.positions[0]
    for begin in range(0, pack.tokens, TILE):
        end = min(begin + TILE, pack.tokens)
        some = pack.leave[:end] > begin
        if window is not None:
            some &= positions[:end] > positions[begin:end].amin() - window
        keys = some.nonzero()[:, 0]
        queries = every[begin:end, None]
        hidden = (keys > queries) | (queries >= pack.leave[keys])
        if window is not None:
            hidden |= positions[begin:end, None] - positions[keys] >= window
        yield _Tile(slice(begin, end), keys, hidden=hidden)


@dataclass(frozen=True)
class _Form:
    """What the attention of one layer computes, besides its tensors."""

    tiles: _Tiles
    scale: float
    softcap: float | None


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, form: _Form) -> Tensor:
    # the kernel takes keys and values of one size: zeros change no score
    size = max(query.shape[-1], value.shape[-1])
    q, k, v = (pad(x[0], (0, size - x.shape[-1])) for x in (query, key, value))
    out: Tensor = _Attention.apply(q, k, v, sinks, form)  # type: ignore[no-untyped-call]
    return out[None, ..., : value.shape[-1]]


class _Attention(torch.autograd.Function):
    """Attention for queries (H, N, K), keys (h, N, K) and values (h, N, K): (N, H, K)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, form: _Form
    ) -> Tensor:
        ctx.form = form
        grouped = q.unflatten(
            0, (len(k), -1)
        )  # (h, g, N, K): g heads of queries read the same keys
        out = q.new_empty(q.shape[1], *grouped.shape[:2], v.shape[-1], dtype=torch.float32)
        by_head = out.permute(1, 2, 0, 3)
        lse = q.new_full(grouped.shape[:3], -torch.inf, dtype=torch.float32)
        for tile in form.tiles:
            tensors = grouped[:, :, tile.queries], k[:, tile.keys], v[:, tile.keys]
            one, one_lse = _forward(*tensors, tile, form)
            at = by_head[:, :, tile.queries]
            before = lse[:, :, tile.queries]
            if not tile.joins:
                at.copy_(one)
                before.copy_(one_lse)
                continue
            joint = torch.logaddexp(before, one_lse)
            at.mul_((before - joint).exp_()[..., None])
            at.addcmul_(one.float(), (one_lse - joint).exp_()[..., None])
            before.copy_(joint)
        if sinks is not None:
            # a score beside those of the keys, without a value
            joint = torch.logaddexp(lse, sinks.float().view(len(k), -1, 1))
            by_head.mul_((lse - joint).exp_()[..., None])
            lse = joint
        result = out.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        form: _Form = ctx.form
        # (h, g, N, K)
        grouped = q.unflatten(0, (len(k), -1))
        grad, out = (x.transpose(0, 1).unflatten(0, (len(k), -1)) for x in (grad, out))
        dq = torch.zeros_like(grouped, dtype=torch.float32)
        dk = torch.zeros_like(k, dtype=torch.float32)
        dv = torch.zeros_like(v, dtype=torch.float32)
        for tile in form.tiles:
            of_queries = [x[:, :, tile.queries] for x in (grad, grouped, out, lse)]
            one_dq, one_dk, one_dv = _backward(
                *of_queries, k[:, tile.keys], v[:, tile.keys], tile, form
            )
            dq[:, :, tile.queries] += one_dq
            if isinstance(tile.keys, Tensor):
                dk.index_add_(1, tile.keys, one_dk.float())
                dv.index_add_(1, tile.keys, one_dv.float())
            else:
                dk[:, tile.keys] += one_dk
                dv[:, tile.keys] += one_dv
        dsinks = None
        if sinks is not None:
            share = (sinks.float().view(len(k), -1, 1) - lse).exp_()
            total = (grad.float() * out).sum(-1)
            dsinks = -(share * total).sum(-1).flatten().to(sinks.dtype)
        return dq.flatten(0, 1).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _forward(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, form: _Form) -> tuple[Tensor, Tensor]:
    """Return the output (h, g, n, K) and the log-sum-exp (h, g, n) of a tile."""
    if form.softcap is not None:
        scores, _ = _scores(q, k, tile, form)
        lse = scores.logsumexp(-1)
        return scores.sub_(lse[..., None]).exp_() @ v.float()[:, None], lse
    folded = _folded(q, k, v, tile)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *folded, is_causal=tile.causal, attn_mask=_bias(q, tile), scale=form.scale
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    tile: _Tile,
    form: _Form,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from a tile. `out` and `lse` are the joint ones."""
    if form.softcap is not None:
        grad, out = grad.float(), out.float()
        scores, slope = _scores(q, k, tile, form)
        p = scores.sub_(lse[..., None]).exp_()
        ds = p * (grad @ v.float()[:, None].mT - (grad * out).sum(-1, keepdim=True))
        ds.mul_(slope).mul_(form.scale)
        return ds @ k.float()[:, None], (ds.mT @ q.float()).sum(1), (p.mT @ grad).sum(1)
    folded = _folded(q, k, v, tile)
    shape = folded[0].shape
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.reshape(shape),
        *folded,
        out.reshape(shape),
        lse.reshape(shape[:-1]),
        dropout_p=0.0,
        is_causal=tile.causal,
        attn_mask=_bias(q, tile),
        scale=form.scale,
    )
    if tile.joins:
        return dq.reshape(q.shape), dk[0], dv[0]
    return dq, dk.sum(1), dv.sum(1)


def _folded(q: Tensor, k: Tensor, v: Tensor, tile: _Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of torch's kernel for the CPU, which knows no groups: keys that are read again by each head,
    or the queries of a group as one head, where all of them see the same keys."""
    if tile.joins:
        return q.flatten(1, 2)[None], k[None], v[None]
    every = (-1, q.shape[1], -1, -1)
    return q, k[:, None].expand(every), v[:, None].expand(every)


def _bias(q: Tensor, tile: _Tile) -> Tensor | None:
    if tile.hidden is None:
        return None
    bias = q.new_zeros(1, 1, *tile.hidden.shape)
    return bias.masked_fill_(tile.hidden, -torch.inf)


def _scores(q: Tensor, k: Tensor, tile: _Tile, form: _Form) -> tuple[Tensor, Tensor]:
    """Return scores (h, g, n, m) in float32 that tanh limits to the soft cap, and the slope of that."""
    assert form.softcap is not None
    assert tile.hidden is not None
    scores = (q.float() @ k.float()[:, None].mT).mul_(form.scale / form.softcap).tanh_()
    slope = 1 - scores.square()
    return scores.mul_(form.softcap).masked_fill_(tile.hidden, -torch.inf), slope
