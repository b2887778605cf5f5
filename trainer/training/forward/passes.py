"""Scorers: from rows to the log-probabilities of their trained tokens, as padded rows or as segments.

The forward pass runs the segments of the rows' prefix forest, parents first, and keeps the state of each that others
continue: keys and values, or the states of linear attention. The backward pass runs them again, children first: it
begins with the gradient of a state, which descendants have added up. The activations of one batch are alive at a time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.trainer.training.forward.caches import LinearAttention, State
from rolltap.trainer.training.forward.decoder import Decoder, idle, most, unwrapped
from rolltap.trainer.training.forward.forest import Row, batches, build_forest, leaves_before, own_tokens, stretches
from rolltap.trainer.training.forward.paths import Batch, Paths
from rolltap.trainer.training.forward.routing import Replay


class Scores(NamedTuple):
    """Values of the N scored tokens: row by row, each row's positions in order."""

    logprobs: Tensor
    """Natural-log probabilities at the trainer's temperature, shape (N,), float32. They have a gradient unless the
    scorer was called under `torch.no_grad()`."""
    entropies: Tensor
    """Entropies of the distributions that the tokens were drawn from, in nats, shape (N,), without gradient."""


class PaddedScorer:
    """Runs all rows as one batch, padded on the right.

    There is no attention mask: under causal attention nothing on the right of a token changes it. A mask would make
    torch's attention build a matrix of T x T values for each row.
    """

    def __init__(self, autocast: Callable[[], AbstractContextManager[Any]], device: torch.device) -> None:
        self._autocast, self._device = autocast, device
        self.replay = Replay()
        self.forwarded = 0

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """See `SegmentScorer`. `model` has TRL's fused head (`add_fused_lm_head`), which divides by the temperature.

        Raises torch's out-of-memory error for rows that do not fit.
        """
        device = self._device
        rows = [row for row in rows if len(row.scored)]
        self.replay.end()
        with self._autocast():
            instead = [*idle(unwrapped(model).get_decoder(), int(bool(rows)))]
        if not rows:
            self.forwarded = 0
            nothing = torch.zeros(0, device=device)
            logprobs = nothing.clone().requires_grad_(torch.is_grad_enabled())
            return Scores(sum((hidden.flatten()[:0].float() for hidden in instead), logprobs), nothing)
        length = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full((len(rows), length), -100)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.from_numpy(row.ids)
            labels[i, row.scored] = torch.from_numpy(row.ids[row.scored]).long()
        self.forwarded = ids.numel()
        self.replay.begin(model, [row.experts for row in rows], [length] * len(rows))
        with self._autocast():
            output = model(input_ids=ids.to(device), labels=labels.to(device), fused_lm_head=True)
        # the value of position p is at p - 1
        scored = (labels[:, 1:] != -100).to(device)
        logprobs = output.log_probs[scored].float()
        # a reference model's head has no entropies
        entropies = torch.zeros_like(logprobs) if output.entropy is None else output.entropy[scored].float()
        return Scores(logprobs, entropies.detach())


class SegmentScorer:
    """Runs rows as segments of their prefix forest."""

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[Any]],
        temperature: float,
        *,
        tokens_per_segment: int,
        keep_graph: bool = False,
        offload_states: bool = False,
        tokens_in_memory: int | None = None,
    ) -> None:
        """`autocast` makes the context of mixed precision. `temperature` divides the logits.

        - `tokens_per_segment`: bounds a segment and a batch of them, padding included, and so the activations.
        - `keep_graph`: one pass, whose activations are kept. Otherwise the backward pass runs all again.
        - `offload_states`: states rest in pinned memory of the CPU.
        - `tokens_in_memory`: rows with more tokens of their own than this are run in several parts, one after another.
          Only the states of one are kept, and the backward pass computes them again.
        """
        self._autocast, self._temperature = autocast, temperature
        self._keep_graph, self._offload = keep_graph, offload_states
        self.tokens_per_segment = tokens_per_segment
        self.tokens_in_memory = tokens_in_memory
        self.logits_tokens: int | None = None
        """Tokens whose logits are computed at once. None: as many as have `LOGITS`."""
        self.tokens_per_branch = 0
        """Number of tokens in memory that a row counts for which leaves another one: see `Costs`."""
        self.tokens_per_row = 0
        """Number of tokens of a batch that each row of linear attention counts for besides its own: see `Costs`."""
        self.replay = Replay()
        self.forwarded = 0
        """Number of tokens that the last call put through the model, padding included, in its forward pass."""

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """Return the scores of all rows. `model` is the model itself or a `PeftModel` around it.

        Raises `InputError` for a model with layers whose states are not known.
        """
        decoder = Decoder(model, self._temperature, self._autocast)
        decoder.replay = self.replay
        decoder.head.chunk = self.logits_tokens or decoder.head.chunk
        parts = split_rows(rows, self.tokens_in_memory, self.tokens_per_branch)
        parts = [part for part in parts if any(len(row.scored) for row in part)]
        parts += [[]] * (most(decoder.body, len(parts)) - len(parts))
        sizes = self.tokens_per_segment, self.tokens_per_row
        groves = [Grove(decoder, part, *sizes, offload=self._offload) for part in parts]
        self.forwarded = sum(sum(batch.lengths) for grove in groves for batch in grove.batches)
        trains = torch.is_grad_enabled()
        options = {"graphs": trains and self._keep_graph, "states": trains and len(groves) == 1}
        hook = torch.zeros(0, device=decoder.device, requires_grad=trains)
        found = [(hook.clone(), hook.detach())]
        with decoder.prepared(), decoder.autocast():
            found += [_Passes.apply(hook, grove, options) for grove in groves]  # type: ignore[no-untyped-call]
        return Scores(*(torch.cat(values) for values in zip(*found, strict=True)))


def split_rows(rows: Sequence[Row], tokens: int | None, branch: int = 0) -> list[list[Row]]:
    """Split rows, in their order, into parts of at most `tokens` tokens, or one row.

    Tokens that a row shares with the row before it in its part count once. A row that leaves the one before it counts
    as `branch` tokens more.
    """
    own = [n + branch * leaves for n, leaves in zip(own_tokens(rows), leaves_before(rows), strict=True)]
    parts = stretches([len(row.ids) for row in rows], own, math.inf if tokens is None else tokens)
    return [[rows[i] for i in part] for part in parts]


class Grove:
    """Rows whose states are kept together: a forest, and its execution."""

    def __init__(
        self, decoder: Decoder, rows: Sequence[Row], tokens: int, tokens_per_row: int, *, offload: bool
    ) -> None:
        self._decoder, self._offload = decoder, offload
        self.segments = build_forest(rows, tokens)
        self.paths = Paths(self.segments, offload=offload)
        self._apart = decoder.layers.linear > 0
        found = batches(self.segments, tokens, apart=self._apart, row=tokens_per_row)
        self.batches = [self._batch(batch) for batch in found]
        self._states: dict[int, State] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        self._graphs: list[tuple[Tensor, list[LinearAttention]]] = []
        self._kept = False
        # the states that no later batch reads, once a batch has run
        last = {k: i for i, batch in enumerate(self.batches) for k in batch.segments}
        for k in reversed(range(len(self.segments))):
            if (parent := self.segments[k].parent) >= 0:
                last[parent] = max(last[parent], last[k])
        self._done: list[list[int]] = [[] for _ in self.batches]
        for k, i in last.items():
            self._done[i].append(k)

    def score(self, *, graphs: bool = False, states: bool = False) -> Scores:
        """Run all segments, parents first. Keep `graphs` of batches, or `states` of segments, for `backward`."""
        self._kept = graphs or states
        nothing = torch.zeros(0, device=self._decoder.device)
        found, order = [(nothing, nothing)], [np.zeros(0, np.int64)]
        list(self._idle(len(self.batches)))
        for batch, done in zip(self.batches, self._done, strict=True):
            with torch.set_grad_enabled(graphs):
                run = self._run(batch)
            if graphs:
                self._graphs.append(run)
            flat, places, tokens = self._targets(batch)
            at = run[0].detach()[places]
            with torch.no_grad():
                found += [self._decoder.head(at[part], tokens[part]) for part in self._chunks(len(flat))]
            order.append(flat)
            if not self._kept:
                self._free(done)
        by_row = self._decoder.tensor(np.argsort(np.concatenate(order)))
        logprobs, entropies = (torch.cat(values)[by_row] for values in zip(*found, strict=True))
        return Scores(logprobs, entropies)

    def backward(self, gradient: Tensor) -> None:
        """Add the gradients of the parameters to their `.grad`. `gradient` is that of the flat scores, shape (N,)."""
        with self._decoder.prepared():
            if not self._kept:
                inner = [batch for batch in self.batches if self.segments[batch.segments[0]].inner]
                with self._decoder.autocast():
                    list(self._idle(len(inner)))
                    for batch in inner:
                        self._run(batch)
            with torch.enable_grad(), self._decoder.autocast():
                for hidden in self._idle(len(self.batches)):
                    hidden.backward(torch.zeros_like(hidden))
            for batch in reversed(self.batches):
                batch.writes = False
                if self._graphs:
                    run = self._graphs.pop()
                else:
                    with torch.enable_grad(), self._decoder.autocast():
                        run = self._run(batch)
                self._backward(batch, *run, gradient)
                self._free(batch.segments)

    def _backward(self, batch: Batch, hidden: Tensor, linear: list[LinearAttention], gradient: Tensor) -> None:
        flat, places, tokens = self._targets(batch)
        at = hidden.detach()[places]
        own = gradient[self._decoder.tensor(flat)]
        with torch.enable_grad(), self._decoder.autocast():
            grads = [self._decoder.head.backward(at[part], tokens[part], own[part]) for part in self._chunks(len(flat))]
        upstream = torch.zeros_like(hidden).index_put_(places, torch.cat(grads).to(hidden), accumulate=True)
        # keys and values get theirs on the way, from what is kept with them
        ends = [(hidden, upstream)]
        below = [self._gradients.pop(k, None) for k in batch.segments]
        if any(below):
            for i, new in enumerate(state for layer in linear for state in layer.new):
                rows = [torch.zeros_like(new[:1]) if one is None else one[i].to(new) for one in below]
                ends.append((new, torch.cat(rows)))
        if ends := [(x, g) for x, g in ends if x.requires_grad]:
            torch.autograd.backward([x for x, _ in ends], [g for _, g in ends])
        given = [torch.zeros_like(x) if x.grad is None else x.grad for layer in linear for x in layer.given]
        for row, k in enumerate(batch.segments):
            if (parent := self.segments[k].parent) >= 0 and linear:
                self._add(parent, [gradient[row : row + 1] for gradient in given])

    def _add(self, segment: int, gradients: list[Tensor]) -> None:
        """Add the gradients of a segment's states in float32: in bfloat16, small ones would be lost."""
        if segment not in self._gradients:
            self._gradients[segment] = [gradient.float() for gradient in gradients]
        else:
            for total, gradient in zip(self._gradients[segment], gradients, strict=True):
                total += gradient

    def _free(self, segments: Sequence[int]) -> None:
        for k in segments:
            self._states.pop(k, None)
            self.paths.free(k)

    def _idle(self, batches: int) -> Iterator[Tensor]:
        self._decoder.replay.end()
        return idle(self._decoder.body, batches)

    def _chunks(self, tokens: int) -> list[slice]:
        size = self._decoder.head.chunk
        return [slice(i, i + size) for i in range(0, max(tokens, 1), size)]

    def _batch(self, batch: list[int]) -> Batch:
        # in the order of their paths, what several of them see is seen by neighbours
        batch = sorted(batch, key=self.paths.before)
        lengths = [len(self.segments[k].ids) for k in batch]
        if self._apart:
            # kernels of linear attention have no gradient for one token that continues a state
            lengths = [max(*lengths, 1 if self.segments[batch[0]].inner else 2)] * len(batch)
        starts = [self.segments[k].start for k in batch]
        return Batch(self.paths, batch, starts, lengths, rows=len(batch) if self._apart else 1)

    def _run(self, batch: Batch) -> tuple[Tensor, list[LinearAttention]]:
        """Run a batch, and keep the states of its inner segments."""
        ids = np.zeros(sum(batch.lengths), np.int64)
        positions = np.zeros_like(ids)
        first = 0
        for k, start, n in zip(batch.segments, batch.starts, batch.lengths, strict=True):
            own = self.segments[k].ids
            ids[first : first + len(own)] = own
            # a table of learned positions may end with the row
            positions[first : first + n] = np.minimum(start + np.arange(n), start + len(own) - 1)
            first += n
        experts = [self.segments[k].experts for k in batch.segments]
        self._decoder.replay.begin(self._decoder.model, experts, batch.lengths)
        parents = [self._states.get(self.segments[k].parent) for k in batch.segments]
        rows = ids.reshape(batch.rows, -1), positions.reshape(batch.rows, -1)
        hidden, linear = self._decoder.run(*rows, batch, parents)
        if batch.writes and linear:
            for row, k in enumerate(batch.segments):
                if self.segments[k].inner:
                    new = [[state[row : row + 1] for state in layer.new] for layer in linear]
                    self._states[k] = [tuple(map(self._at_rest, layer)) for layer in new]
        return hidden, linear

    def _at_rest(self, state: Tensor) -> Tensor:
        """Return a state that does not hold the batch it was a part of, in the CPU's memory if that is asked for."""
        if self._offload and state.is_cuda:
            return torch.empty(state.shape, dtype=state.dtype, pin_memory=True).copy_(state)
        return state.detach().clone()

    def _targets(self, batch: Batch) -> tuple[NDArray[np.int64], tuple[Tensor, Tensor], Tensor]:
        """Return the flat indices of scored tokens, the rows and columns before them, and the tokens, each (E,)."""
        segments = [self.segments[k] for k in batch.segments]
        flat, at, tokens = (np.concatenate([getattr(s, name) for s in segments]) for name in ("flat", "at", "tokens"))
        at = at + np.repeat(np.cumsum([0, *batch.lengths[:-1]]), [len(segment.at) for segment in segments])
        rows, columns = (self._decoder.tensor(x) for x in np.divmod(at, sum(batch.lengths) // batch.rows))
        return flat, (rows, columns), self._decoder.tensor(tokens.astype(np.int64))


class _Passes(torch.autograd.Function):
    """A grove's log-probabilities and entropies. Its backward pass adds to the parameters' `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, grove: Grove, keep: dict[str, bool]) -> tuple[Tensor, Tensor]:
        # `hook` requires a gradient, so that backward is called
        scores, ctx.grove = grove.score(**keep), grove
        ctx.mark_non_differentiable(scores.entropies)
        return scores.logprobs, scores.entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[None, None, None]:
        ctx.grove.backward(gradient)
        return None, None, None
