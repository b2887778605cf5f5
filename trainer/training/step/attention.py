"""Attention of packed rows: an implementation that a Hugging Face model calls as any other.

On CUDA it is FlexAttention, whose mask is made of blocks in closed form. On the CPU it is torch's
kernel of FlashAttention, called for tiles. Each tile gives its output and the log-sum-exp of its
scores, from which those over all keys are joined exactly. The backward pass of a tile needs nothing
of the others but the joint output and log-sum-exp.
Source: FlashAttention, https://arxiv.org/abs/2205.14135, appendix B.

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
"""Tokens of a block of FlexAttention's mask. Its tensors are padded to a multiple, because other
lengths have kernels of their own. Then the second length of a process compiles kernels for all
lengths, and no later one compiles anew."""

VARIANTS = 64
"""Kernels of FlexAttention that a process may compile. There are up to 8 for each size of a head:
with a window and without, with gradients and without, for the first length and for all. torch's
own limit is 8. Beyond the limit torch runs the formula, which makes N x N scores."""

TILE = 128
"""Queries of a tile with a mask. Larger tiles multiply more pairs that are hidden."""


def register(stock: str) -> str:
    """Register the attention of packs, and return its name.

    Calls without a pack run the implementation of transformers that is named `stock`.
    """
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
    """Return the output (1, N, heads, D), and None in place of the weights.

    `query` has the shape (1, heads, N, K), `key` (1, fewer heads, N, K), `value` (1, same, N, D).
    """
    pack: Pack | None = options.pop(NAME, None)
    if pack is None:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        implementation: Any = ALL_ATTENTION_FUNCTIONS.get_interface(stock, eager)
        output, weights = implementation(module, query, key, value, attention_mask, **options)
        return output, weights
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
    # models whose windows FlashAttention knows give it
    window: int | None = options.get("sliding_window")
    with torch.autocast(device, enabled=False):
        if query.is_cuda:
            return _on_cuda(module, query, key, value, pack, window, options), None
        return _on_cpu(query, key, value, pack, window, options), None


# ------------------------------------------------------------------------------------------- CUDA


def _on_cuda(
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
    padding = blocks.seq_lengths[0] - pack.tokens
    if padding:
        query, key, value = (pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    given = {name: options.get(name) for name in ("scaling", "softcap", "s_aux")}
    output: Tensor = flex_attention_forward(module, query, key, value, blocks, **given)[0]
    return output[:, : pack.tokens]


def block_mask(pack: Pack, window: int | None) -> BlockMask:
    """Return FlexAttention's mask of a pack, which is padded to a multiple of `BLOCK`.

    A token of the padding sees itself. `window` is the number of positions that a query sees.
    """
    key = "block_mask", window
    if key not in pack.derived:
        pack.derived[key] = _make_block_mask(pack, window)
    found: BlockMask = pack.derived[key]
    return found


def _make_block_mask(pack: Pack, window: int | None) -> BlockMask:
    length = -(-pack.tokens // BLOCK) * BLOCK
    ends = torch.arange(pack.tokens + 1, length + 1, device=pack.leave.device)
    leave = torch.cat([pack.leave, ends])
    positions = pad(pack.positions[0], (0, length - pack.tokens))
    part, whole = _blocks(leave, positions, window)
    part_numbers, part_indices = _listed(part)
    whole_numbers, whole_indices = _listed(whole)
    return BlockMask.from_kv_blocks(
        part_numbers,
        part_indices,
        whole_numbers,
        whole_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_function(leave, positions, window),
        seq_lengths=(length, length),
    )


def _blocks(leave: Tensor, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return which blocks of keys a block of queries sees in part, and which it sees whole.

    Both have the shape (blocks, blocks).
    """
    ends = leave.view(-1, BLOCK)
    places = positions.view(-1, BLOCK)
    starts = torch.arange(0, len(leave), BLOCK, device=leave.device)
    queries = starts[:, None]
    keys = starts[None]
    # the first query of a block sees the key that outlasts the others, if any query sees a key
    some = (keys <= queries) & (ends.amax(1)[None] > queries)
    whole = (keys < queries) & (ends.amin(1)[None] >= queries + BLOCK)
    if window is not None:
        some &= places.amin(1)[:, None] - places.amax(1)[None] < window
        whole &= places.amax(1)[:, None] - places.amin(1)[None] < window
    return some & ~whole, whole


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of queries the number of its blocks of keys, and these first."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]


def _mask_function(leave: Tensor, positions: Tensor, window: int | None) -> Any:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < leave[key])

    if window is None:
        return sees
    size = window

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = positions[query] - positions[key] < size
        return sees(batch, head, query, key) & near

    return sees_near


# -------------------------------------------------------------------------------------------- CPU


@dataclass(frozen=True)
class Tile:
    """Queries, and some of the keys that they see."""

    queries: slice
    keys: slice | Tensor
    causal: bool = False
    """True if the keys are those of the queries, and a query sees those up to its own."""
    hidden: Tensor | None = None
    """Keys that a query does not see, (n, m)."""

    @property
    def joins(self) -> bool:
        """True if the queries see all keys, and have been in an earlier tile with their own."""
        return not self.causal and self.hidden is None


def make_tiles(pack: Pack, window: int | None, *, masked: bool = False) -> Iterator[Tile]:
    """Yield tiles that have each query with each key that it sees once, and with its own first.

    Where no window hides a key, tiles have no masks, unless these are wanted (`masked`): such
    tiles have at most `TILE` queries.
    """
    if window is not None and window < pack.depth:
        yield from _masked_tiles(pack, window)
    elif masked:
        yield from _masked_tiles(pack, None)
    else:
        if "tiles" not in pack.derived:
            pack.derived["tiles"] = [*_whole_tiles(pack)]
        yield from pack.derived["tiles"]


def _whole_tiles(pack: Pack) -> Iterator[Tile]:
    """Yield tiles whose keys are not copied. Each query is in at most 1 + log2(N) of them.

    A segment that lies behind the segment that it continues is in one stretch with it. In a
    stretch attention is causal. The other children of a segment, with all that continues them,
    lie behind one another, and see the stretch up to that segment.
    """
    starts: list[int] = []  # of the stretch of each segment
    ends: dict[int, int] = {}  # of the stretches
    others: dict[int, int] = {}  # segment -> the first token of its children but the first
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
        yield Tile(slice(begin, end), slice(begin, end), causal=True)
    for parent, begin in others.items():
        end = int(pack.ends[parent])
        leave = int(pack.leave[end - 1])
        yield Tile(slice(begin, leave), slice(starts[parent], end))


def _masked_tiles(pack: Pack, window: int | None) -> Iterator[Tile]:
    """Yield tiles of `TILE` queries with all keys that these see."""
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
            hidden |= positions[queries] - positions[keys] >= window
        yield Tile(slice(begin, end), keys, hidden=hidden)


@dataclass(frozen=True)
class _Form:
    """Everything that the attention of one layer takes besides its tensors."""

    pack: Pack
    window: int | None
    scale: float
    softcap: float | None

    def tiles(self) -> Iterator[Tile]:
        # only the formula, which makes all scores of a tile, has soft caps
        return make_tiles(self.pack, self.window, masked=self.softcap is not None)


def _on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    form = _Form(pack, window, scale, options.get("softcap"))
    # the kernel takes keys and values of one size: zeros change no score
    width = value.shape[-1]
    size = max(query.shape[-1], width)
    tensors = [_widened(x[0], size) for x in (query, key, value)]
    sinks = options.get("s_aux")
    output: Tensor = _Attention.apply(*tensors, sinks, form)  # type: ignore[no-untyped-call]
    return output[None, ..., :width]


def _widened(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[-1]
    if not missing:
        return x
    return pad(x, (0, missing))


class _Attention(torch.autograd.Function):
    """Attention (N, H, K) for queries (H, N, K), keys (h, N, K) and values (h, N, K).

    Each head of keys is read by a group of heads of queries: these are (h, g, N, K) here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        form: _Form,
    ) -> Tensor:
        grouped = q.unflatten(0, (len(k), -1))
        heads = grouped.shape[:2]
        # joined in float32
        by_token = q.new_empty(q.shape[1], *heads, q.shape[2], dtype=torch.float32)
        out = by_token.permute(1, 2, 0, 3)
        lse = q.new_empty(*heads, q.shape[1], dtype=torch.float32)
        for tile in form.tiles():
            of_tile = grouped[:, :, tile.queries], k[:, tile.keys], v[:, tile.keys]
            one, one_lse = _forward(*of_tile, tile, form)
            if tile.joins:
                _join(out[:, :, tile.queries], lse[:, :, tile.queries], one, one_lse)
            else:
                out[:, :, tile.queries] = one
                lse[:, :, tile.queries] = one_lse
        if sinks is not None:
            # a score beside those of the keys, without a value
            joint = torch.logaddexp(lse, sinks.float().view(*heads, 1))
            out.mul_((lse - joint).exp_()[..., None])
            lse = joint
        result = by_token.flatten(1, 2).to(q.dtype)
        ctx.form = form
        ctx.save_for_backward(q, k, v, sinks, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, result, lse = ctx.saved_tensors
        form: _Form = ctx.form
        grouped = q.unflatten(0, (len(k), -1))
        out = result.transpose(0, 1).unflatten(0, (len(k), -1))
        upstream = grad.transpose(0, 1).unflatten(0, (len(k), -1))
        dq = torch.zeros_like(grouped, dtype=torch.float32)
        dk = torch.zeros_like(k, dtype=torch.float32)
        dv = torch.zeros_like(v, dtype=torch.float32)
        for tile in form.tiles():
            queries = tile.queries
            one_dq, one_dk, one_dv = _backward(
                upstream[:, :, queries],
                grouped[:, :, queries],
                k[:, tile.keys],
                v[:, tile.keys],
                out[:, :, queries],
                lse[:, :, queries],
                tile,
                form,
            )
            dq[:, :, queries] += one_dq
            _add(dk, tile.keys, one_dk)
            _add(dv, tile.keys, one_dv)
        dsinks = None
        if sinks is not None:
            share = (sinks.float().view(*lse.shape[:2], 1) - lse).exp_()
            total = (upstream.float() * out).sum(-1)
            dsinks = -(share * total).sum(-1).flatten().to(sinks.dtype)
        return dq.flatten(0, 1).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join another part into `out` (h, g, n, K) and `lse` (h, g, n), in place."""
    joint = torch.logaddexp(lse, part_lse)
    out.mul_((lse - joint).exp_()[..., None])
    out.addcmul_(part.float(), (part_lse - joint).exp_()[..., None])
    lse.copy_(joint)


def _add(total: Tensor, keys: slice | Tensor, part: Tensor) -> None:
    if isinstance(keys, Tensor):
        total.index_add_(1, keys, part.float())
    else:
        total[:, keys] += part


def _forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, form: _Form) -> tuple[Tensor, Tensor]:
    """Return the output (h, g, n, K) and the log-sum-exp (h, g, n) of a tile."""
    if form.softcap is not None:
        scores, _ = _capped_scores(q, k, tile, form.scale, form.softcap)
        lse = scores.logsumexp(-1)
        return scores.sub_(lse[..., None]).exp_() @ v.float()[:, None], lse
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_ungrouped(q, k, v, tile),
        is_causal=tile.causal,
        attn_mask=_bias(q, tile),
        scale=form.scale,
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    form: _Form,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from a tile.

    `out` and `lse` are those over all keys of the queries.
    """
    if form.softcap is not None:
        grad = grad.float()
        scores, slope = _capped_scores(q, k, tile, form.scale, form.softcap)
        p = scores.sub_(lse[..., None]).exp_()
        ds = p * (grad @ v.float()[:, None].mT - (grad * out).sum(-1, keepdim=True))
        ds.mul_(slope).mul_(form.scale)
        return ds @ k.float()[:, None], (ds.mT @ q.float()).sum(1), (p.mT @ grad).sum(1)
    tensors = _ungrouped(q, k, v, tile)
    shape = tensors[0].shape
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.reshape(shape),
        *tensors,
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


def _ungrouped(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Return arguments of torch's kernel for the CPU, which knows no groups of heads.

    Where all queries see the same keys, those of a group are one head. Otherwise each head of a
    group reads the keys again.
    """
    if tile.joins:
        return q.flatten(1, 2)[None], k[None], v[None]
    shape = (-1, q.shape[1], -1, -1)
    return q, k[:, None].expand(shape), v[:, None].expand(shape)


def _bias(q: Tensor, tile: Tile) -> Tensor | None:
    if tile.hidden is None:
        return None
    bias = q.new_zeros(1, 1, *tile.hidden.shape)
    return bias.masked_fill_(tile.hidden, -torch.inf)


def _capped_scores(
    q: Tensor,
    k: Tensor,
    tile: Tile,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return float32 scores (h, g, n, m) that tanh limits to `softcap`, and its slope there."""
    assert tile.hidden is not None
    scores = (q.float() @ k.float()[:, None].mT).mul_(scale / softcap).tanh_()
    slope = 1 - scores.square()
    return scores.mul_(softcap).masked_fill_(tile.hidden, -torch.inf), slope
