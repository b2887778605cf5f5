"""Attention of packed rows: an implementation that a Hugging Face model calls as any other.

On CUDA it is FlexAttention, whose mask is made of blocks in closed form. On the CPU it is the
model's own attention, for some queries at a time with the keys that they see. Where no window hides
a key it is torch's kernel of FlashAttention, for stretches that need no mask. Each stretch of keys
gives an output and the log-sum-exp of its scores, from which those over all keys are joined
exactly. The backward pass of a stretch needs nothing of the others but the joint output and
log-sum-exp. Source: FlashAttention, https://arxiv.org/abs/2205.14135, appendix B.

Nothing of N x N is made, but FlexAttention's list of blocks: (N / 128)^2 integers.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.pack import PACK_ARGUMENT, Pack

flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

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

SPECIAL = ("softcap", "s_aux")
"""Options of models whose attention has caps of its scores, or sinks."""

Stretches = list[tuple[slice, slice]]
"""Queries, with keys that they see."""


def register(stock: str) -> str:
    """Register the attention of packs, and return its name.

    Calls without a pack run the implementation of transformers that is named `stock`.
    """
    name = f"{PACK_ARGUMENT}_{stock}"
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
    pack: Pack | None = options.pop(PACK_ARGUMENT, None)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    implementation: Any = ALL_ATTENTION_FUNCTIONS.get_interface(stock, eager)
    if pack is None:
        output, weights = implementation(module, query, key, value, attention_mask, **options)
        return output, weights
    if getattr(module.config, "attention_chunk_size", None) is not None:
        # the rows of the probe are shorter
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
            return on_cuda(module, query, key, value, pack, window, **options), None
        window = min(window or pack.depth, pack.depth)
        special = window < pack.depth or any(options.get(name) is not None for name in SPECIAL)
        if special:
            own = partial(implementation, module, **options)
            return in_tiles(own, query, key, value, pack, window), None
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        return in_stretches(query, key, value, pack, scale), None


# ------------------------------------------------------------------------------------------- CUDA
def on_cuda(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    window: int | None,
    **options: Any,
) -> Tensor:
    """Return the output of FlexAttention, (1, N, heads, D)."""
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, VARIANTS)
    blocks: BlockMask = pack.derive(block_mask, window)
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
    length = -(-pack.tokens // BLOCK) * BLOCK
    ends = torch.arange(pack.tokens + 1, length + 1, device=pack.subtree_end.device)
    subtree_end = torch.cat([pack.subtree_end, ends])
    positions = pad(pack.positions[0], (0, length - pack.tokens))

    # which blocks of keys the queries of a block see, some of them or all, (blocks, blocks)
    last = subtree_end.view(-1, BLOCK)
    starts = torch.arange(0, length, BLOCK, device=subtree_end.device)
    queries = starts[:, None]
    # the first query of a block sees the key that outlasts the others, if any query sees a key
    some = (starts <= queries) & (last.amax(1) > queries)
    whole = (starts < queries) & (last.amin(1) >= queries + BLOCK)
    reach = window or pack.tokens
    low, high = positions.view(-1, BLOCK).aminmax(dim=1)
    some &= low[:, None] - high < reach
    whole &= high[:, None] - low < reach

    def sees(
        batch: Tensor,
        head: Tensor,
        query: Tensor,
        key: Tensor,
    ) -> Tensor:
        return (key <= query) & (query < subtree_end[key])

    def sees_near(
        batch: Tensor,
        head: Tensor,
        query: Tensor,
        key: Tensor,
    ) -> Tensor:
        return sees(batch, head, query, key) & (positions[query] - positions[key] < reach)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees if window is None else sees_near,
        seq_lengths=(length, length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of queries the number of its blocks of keys, and these first."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]


# ------------------------------------------------------------------------------ CPU, with a mask
def in_tiles(
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    window: int,
) -> Tensor:
    """Return the output of a model's own attention, (1, N, heads, D), for `TILE` queries at a time.

    The scores of a tile are computed again for the backward pass. Its tensors are arguments,
    because the layer's own checkpoint drops arguments, and keeps what a closure holds.
    """

    def tile(
        queries: slice,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        keys, hidden = keys_of(pack, queries, window)
        bias = query.new_zeros(1, 1, *hidden.shape).masked_fill_(hidden, -torch.inf)
        own = query[:, :, queries], key.index_select(2, keys), value.index_select(2, keys)
        output: Tensor = attend(*own, bias)[0]
        return output

    outputs = []
    for begin in range(0, pack.tokens, TILE):
        queries = slice(begin, min(begin + TILE, pack.tokens))
        tensors = [query, key, value]
        output = checkpoint(tile, queries, *tensors, use_reentrant=False, preserve_rng_state=False)
        outputs.append(output)
    return torch.cat(outputs, 1)


def keys_of(pack: Pack, queries: slice, window: int) -> tuple[Tensor, Tensor]:
    """Return the keys that any of some queries sees (m,), and which are hidden from each (n, m)."""
    own = torch.arange(queries.start, queries.stop)
    subtree_end = pack.subtree_end[: queries.stop]
    positions = pack.positions[0, : queries.stop]
    near = positions > positions[own].amin() - window
    keys = ((subtree_end > queries.start) & near).nonzero()[:, 0]
    own = own[:, None]
    distances = positions[own] - positions[keys]
    hidden = (keys > own) | (own >= subtree_end[keys]) | (distances >= window)
    return keys, hidden


# --------------------------------------------------------------------------- CPU, without a mask
def stretches(pack: Pack) -> Stretches:
    """Return stretches that have each query with each key that it sees once.

    They come first where both are the same: there attention is causal. Elsewhere all queries see
    all keys. A query is in at most 1 + log2(N) of them.

    A segment that lies behind the segment that it continues is in one stretch with it. The other
    children of a segment, with all that continues them, lie behind one another, and see the stretch
    up to that segment.
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
    found = [(slice(begin, end), slice(begin, end)) for begin, end in ends.items()]
    for parent, begin in others.items():
        end = int(pack.ends[parent])
        subtree_end = int(pack.subtree_end[end - 1])
        found.append((slice(begin, subtree_end), slice(starts[parent], end)))
    return found


def in_stretches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    scale: float,
) -> Tensor:
    """Return the output of attention, (1, N, heads, D), by torch's kernel."""
    # the kernel takes keys and values of one size: zeros change no score
    width = value.shape[-1]
    size = max(query.shape[-1], width)
    tensors = []
    for x in (query, key, value):
        missing = size - x.shape[-1]
        tensors.append(pad(x, (0, missing)) if missing else x)
    found: Stretches = pack.derive(stretches)
    output: Tensor = _Attention.apply(*tensors, found, scale)  # type: ignore[no-untyped-call]
    return output[..., :width]


class _Attention(torch.autograd.Function):
    """Attention (1, N, H, K) for queries (1, H, N, K), keys (1, h, N, K) and values (1, h, N, K).

    Each head of keys is read by a group of heads of queries: these are (h, g, N, K) here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pairs: Stretches,
        scale: float,
    ) -> Tensor:
        q = query[0].unflatten(0, (key.shape[1], -1))
        # joined in float32
        by_token = q.new_empty(q.shape[2], *q.shape[:2], q.shape[3], dtype=torch.float32)
        out = by_token.permute(1, 2, 0, 3)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for queries, keys in pairs:
            causal = queries == keys
            tensors = _kernel_form(q[:, :, queries], key[0, :, keys], value[0, :, keys], causal)
            one, one_lse = flash(*tensors, is_causal=causal, scale=scale)
            own = out[:, :, queries]
            own_lse = lse[:, :, queries]
            one = one.reshape(own.shape)
            one_lse = one_lse.reshape(own_lse.shape)
            if causal:
                own.copy_(one)
                own_lse.copy_(one_lse)
                continue
            joint = torch.logaddexp(own_lse, one_lse)
            own.mul_((own_lse - joint).exp_()[..., None])
            own.addcmul_(one.float(), (one_lse - joint).exp_()[..., None])
            own_lse.copy_(joint)
        result: Tensor = by_token.flatten(1, 2).to(q.dtype)[None]
        ctx.pairs = pairs
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, lse = ctx.saved_tensors
        groups = (key.shape[1], -1)
        q = query[0].unflatten(0, groups)
        out = result[0].transpose(0, 1).unflatten(0, groups)
        upstream = grad[0].transpose(0, 1).unflatten(0, groups)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dk = torch.zeros_like(key[0], dtype=torch.float32)
        dv = torch.zeros_like(value[0], dtype=torch.float32)
        for queries, keys in ctx.pairs:
            causal = queries == keys
            tensors = _kernel_form(q[:, :, queries], key[0, :, keys], value[0, :, keys], causal)
            shape = tensors[0].shape
            of_q, of_k, of_v = flash_backward(
                upstream[:, :, queries].reshape(shape),
                *tensors,
                out[:, :, queries].reshape(shape),
                lse[:, :, queries].reshape(shape[:-1]),
                dropout_p=0.0,
                is_causal=causal,
                scale=ctx.scale,
            )
            dq[:, :, queries] += of_q.reshape(dq[:, :, queries].shape)
            # of the group's heads, or of the batch of one
            over = 1 if causal else 0
            dk[:, keys] += of_k.sum(over)
            dv[:, keys] += of_v.sum(over)
        gradients = [x.to(query.dtype)[None] for x in (dq.flatten(0, 1), dk, dv)]
        return *gradients, None, None


def _kernel_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return arguments of torch's kernel for the CPU, which knows no groups of heads.

    Where all queries see the same keys, those of a group are one head. Otherwise each head of a
    group reads the keys again.
    """
    if not causal:
        return q.flatten(1, 2)[None], k[None], v[None]
    shape = (-1, q.shape[1], -1, -1)
    return q, k[:, None].expand(shape), v[:, None].expand(shape)
