"""Attention of a batch of segments: to their own tokens, and to the keys and values that are kept of their ancestors.

It takes the place of a model's own attention, and of the masks that go with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from rolltap.addons.errors import InputError
from rolltap.trainer.training.forward.kernels import Kernel, join
from rolltap.trainer.training.forward.paths import Batch, Pair, Slice

NAME = "rolltap_segments"
"""Name of this attention in a model's configuration."""

_running: list[Batch] = []


@contextmanager
def segment_attention(config: Any, batch: Batch) -> Iterator[None]:
    """Let a model run `batch`. `config` is the configuration of its decoder."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    batch.layers = 0
    _running.append(batch)
    try:
        yield
    finally:
        _running.pop()
        config._attn_implementation = before


def _mask(
    *, allow_is_causal_skip: bool, local_size: int | None = None, config: Any, device: torch.device, **options: Any
) -> Tensor | None:
    """Return a tensor (window, 1, 1, 1) for layers with a sliding window, None for those that see all before them.

    Models slice a mask by its tokens and its positions, but not by its first dimension.
    """
    # transformers says by the first that nothing but causality, and the window, is in the mask
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if chunked or not allow_is_causal_skip:
        raise InputError("the model's attention has a mask of another kind than causality and a sliding window")
    return None if local_size is None else torch.ones((), dtype=torch.bool, device=device).expand(local_size, 1, 1, 1)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (B, n, heads, D) for queries (B, heads, n, K), keys (B, fewer heads, n, K) and values (B, same, n, D).

    `s_aux` are the sinks of gpt-oss, (heads,): a score beside those of the keys, without a value.
    """
    if position_bias is not None or dropout:
        raise InputError("the model's attention has a bias of positions, or a dropout")
    batch = _running[-1]
    window = None if attention_mask is None else len(attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # as torch's attention does under autocast
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    q, k, v = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    with torch.autocast(device, enabled=False):
        out: Tensor = _Attention.apply(q, k, v, s_aux, Kernel(q, v, scale, softcap), batch, window)  # type: ignore[no-untyped-call]
    batch.layers += 1
    return out.unflatten(0, (batch.rows, -1)), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


class _Attention(torch.autograd.Function):
    """Attention of a batch's N tokens in one layer: queries (N, H, K), keys (N, h, K), values (N, h, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        kernel: Kernel,
        batch: Batch,
        window: int | None,
    ) -> Tensor:
        layer = batch.layers
        ctx.kernel, ctx.batch, ctx.layer = kernel, batch, layer
        ctx.tails = batch.tails(window) if window else None
        if ctx.tails is not None:
            out, lse = kernel.forward(q, *_with_tails(batch, layer, (k, v), ctx.tails[1]), ctx.tails[0])
        else:
            out, lse = kernel.forward(q, k, v, batch.spans)
            out = out.float() if batch.views else out
            for tokens, at, spans in batch.views:
                part = kernel.forward(q[tokens], *batch.paths.read(at, layer, q.device), spans)
                join(out[tokens], lse[:, tokens], *part)
        if sinks is not None:
            joint = torch.logaddexp(lse, sinks.float()[:, None])
            out, lse = out * (lse - joint).exp().T[..., None], joint
        if batch.writes:
            for tokens, at in batch.own:
                batch.paths.write(at, layer, (k[tokens], v[tokens]))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        kernel, batch, layer = ctx.kernel, ctx.batch, ctx.layer
        upstream = ctx.needs_input_grad[1]  # keys and values of a layer below the first that is trained have none
        if ctx.tails is not None:
            spans, tails = ctx.tails
            keys, values = _with_tails(batch, layer, (k, v), tails)
            dq, dk, dv = kernel.backward(grad, q, keys, values, out, lse, spans)
            dk, dv = _without_tails(batch, layer, (dk, dv), tails, add=upstream)
        else:
            dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, batch.spans)
            dq = dq.float() if batch.views else dq
            for tokens, at, spans in batch.views:
                pair = batch.paths.read(at, layer, q.device)
                one, *above = kernel.backward(grad[tokens], q[tokens], *pair, out[tokens], lse[:, tokens], spans)
                dq[tokens] += one
                if upstream:
                    batch.paths.add(at, layer, (above[0], above[1]))
        for tokens, at in batch.own if upstream else ():
            if (below := batch.paths.gradients(at, layer, q.device)) is not None:
                dk, dv = dk.float(), dv.float()
                dk[tokens] += below[0]
                dv[tokens] += below[1]
        dsinks = None
        if sinks is not None:
            share = (sinks.float()[:, None] - lse).exp()
            dsinks = -(share * (grad.float() * out).sum(-1).T).sum(1).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _with_tails(batch: Batch, layer: int, own: Pair, tails: list[list[Slice]]) -> Pair:
    """Return for each segment the keys and values of its slices, then its own."""
    parts: list[Pair] = []
    for seen, k, v in zip(tails, *(x.split(list(batch.lengths)) for x in own), strict=True):
        parts += [batch.paths.read(at, layer, k.device) for at in seen] + [(k, v)]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys), torch.cat(values)


def _without_tails(batch: Batch, layer: int, every: Pair, tails: list[list[Slice]], *, add: bool) -> Pair:
    """Add the gradients of the slices to theirs, and return those of the segments' own keys and values."""
    own: list[Pair] = []
    places = [(at, length) for seen, length in zip(tails, batch.lengths, strict=True) for at in (*seen, None)]
    sizes = [length if at is None else at.end - at.start for at, length in places]
    for (at, _), k, v in zip(places, *(x.split(sizes) for x in every), strict=True):
        if at is None:
            own.append((k, v))
        elif add:
            batch.paths.add(at, layer, (k, v))
    keys, values = zip(*own, strict=True)
    return torch.cat(keys), torch.cat(values)
