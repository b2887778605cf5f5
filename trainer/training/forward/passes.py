"""Scorers: from rows to the log-probabilities of their trained tokens, as padded rows or as segments.

Segments are those of the rows' prefix forest: each shared token is computed once, at any length. The forward pass runs
them parents first, and keeps the state of each that others continue: keys and values, or the states of linear
attention. The backward pass runs them again, children first. So a segment's backward pass begins with the gradient of
its state, which its descendants have added up. The activations of one batch of segments are alive at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.trainer.training.forward.caches import LinearAttention, State
from rolltap.trainer.training.forward.decoder import Decoder, idle, most, unwrapped
from rolltap.trainer.training.forward.forest import Row, batches, build_forest, own_tokens
from rolltap.trainer.training.forward.paths import Batch, Paths
from rolltap.trainer.training.forward.routing import Replay


class Scores(NamedTuple):
    """Values of the N scored tokens: row by row, each row's positions in order."""

    logprobs: Tensor
    """Natural-log probabilities at the trainer's temperature, shape (N,), float32. They have a gradient unless the
    scorer was called under `torch.no_grad()`."""
    entropies: Tensor
    """Entropies of the distributions that the tokens were drawn from, in nats, shape (N,), without gradient."""


class Scorer(Protocol):
    """A way to run rows through a model."""

    replay: Replay | None
    """Replays the rows' experts. None: tokens route by themselves."""
    forwarded: int
    """Number of tokens that the last call put through the model, padding included. A token that is computed again in
    the backward pass counts once."""

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """Score `rows`. `model` is the model itself or a `PeftModel` around it, not wrapped for several processes."""


class PaddedScorer:
    """Runs all rows as one batch, padded on the right.

    There is no attention mask: under causal attention nothing on the right of a token changes it. A mask would make
    torch's attention build a matrix of T x T values for each row. TRL's fused head computes logits in chunks, and only
    where a token is scored.
    """

    def __init__(self, autocast: Callable[[], AbstractContextManager[Any]], device: torch.device) -> None:
        """`autocast` makes the context of mixed precision. Rows run on `device`."""
        self._autocast, self._device = autocast, device
        self.replay: Replay | None = None
        self.forwarded = 0

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """See `Scorer.__call__`. `model` has TRL's fused head (`add_fused_lm_head`), which divides by the temperature.

        Raises torch's out-of-memory error for rows that do not fit.
        """
        device = self._device
        rows = [row for row in rows if len(row.scored)]
        if self.replay is not None:
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
        if self.replay is not None:
            self.replay.attach(model)
            self.replay.begin([row.experts for row in rows], [length] * len(rows), device)
        with self._autocast():
            output = model(input_ids=ids.to(device), labels=labels.to(device), fused_lm_head=True)
        # the value of position p is at p - 1
        scored = (labels[:, 1:] != -100).to(device)
        logprobs = output.log_probs[scored].float()
        # a reference model's head has no entropies
        entropies = torch.zeros_like(logprobs) if output.entropy is None else output.entropy[scored].float()
        return Scores(logprobs, entropies.detach())


class SegmentScorer:
    """Runs rows as segments of their prefix forest. See `Scorer`."""

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
        """Without `keep_graph` there are two passes, and the backward pass adds to the parameters' `.grad` itself.

        - `autocast`: makes the context of mixed precision, such as `Accelerator.autocast`.
        - `temperature`: divides the logits.
        - `tokens_per_segment`: bounds a segment and a batch of them, padding included, and so the activations.
        - `keep_graph`: one pass, whose activations are kept until the backward pass, as in any other model call.
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
        self.replay: Replay | None = None
        self.forwarded = 0

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """Return the scores of all rows. `model` may be wrapped for several processes, and by PEFT.

        Raises `InputError` for a model with layers whose states are not known.
        """
        decoder = Decoder(model, self._temperature, self._autocast)
        decoder.replay = self.replay
        if self.replay is not None:
            self.replay.attach(decoder.model)
        decoder.head.chunk = self.logits_tokens or decoder.head.chunk
        parts = [part for part in split_rows(rows, self.tokens_in_memory) if any(len(row.scored) for row in part)]
        parts += [[]] * (most(decoder.body, len(parts)) - len(parts))
        groves = [Grove(decoder, part, self.tokens_per_segment, offload=self._offload) for part in parts]
        self.forwarded = sum(grove.forwarded for grove in groves)
        hook = torch.zeros(0, device=decoder.device, requires_grad=torch.is_grad_enabled())
        found = [Scores(hook.clone(), hook.detach())]
        with decoder.prepared(), decoder.autocast():
            for grove in groves:
                if hook.requires_grad:
                    options = {"graphs": self._keep_graph, "states": len(groves) == 1}
                    scores = _Passes.apply(hook, grove, options)  # type: ignore[no-untyped-call]
                    found.append(Scores(*scores))
                else:
                    found.append(grove.score())
        return Scores(*(torch.cat(values) for values in zip(*found, strict=True)))


def split_rows(rows: Sequence[Row], tokens: int | None) -> list[list[Row]]:
    """Split rows, in their order, into parts of at most `tokens` tokens, or one row.

    Tokens that a row shares with the row before it in its part count once.
    """
    parts: list[list[Row]] = []
    used = 0
    for row, own in zip(rows, own_tokens(rows), strict=True):
        if parts and (tokens is None or used + own <= tokens):
            parts[-1].append(row)
            used += own
        else:
            parts.append([row])
            used = len(row.ids)
    return parts


class _Run(NamedTuple):
    """Results of a batch."""

    hidden: Tensor
    """Hidden states (B, n, H)."""
    linear: list[LinearAttention]


class Grove:
    """Rows whose states are kept together: a forest, and its execution."""

    def __init__(self, decoder: Decoder, rows: Sequence[Row], tokens: int, *, offload: bool) -> None:
        """`tokens` is what a batch may have. With `offload` states rest in the CPU's memory."""
        self._decoder, self._offload = decoder, offload
        self.segments = build_forest(rows, tokens)
        self.paths = Paths(self.segments, offload=offload)
        self._apart = decoder.layers.linear
        self.batches = [self._batch(batch) for batch in batches(self.segments, tokens, apart=self._apart)]
        self._states: dict[int, State] = {}
        self._gradients: dict[int, list[list[Tensor]]] = {}
        self._graphs: list[_Run] = []
        self._kept = False
        # the states that no later batch reads, once a batch has run
        last = {k: i for i, batch in enumerate(self.batches) for k in batch.segments}
        for k in reversed(range(len(self.segments))):
            if (parent := self.segments[k].parent) >= 0:
                last[parent] = max(last[parent], last[k])
        self._done: list[list[int]] = [[] for _ in self.batches]
        for k, i in last.items():
            self._done[i].append(k)

    @property
    def forwarded(self) -> int:
        """Tokens that go through the model, padding included."""
        return sum(sum(batch.lengths) for batch in self.batches)

    def score(self, *, graphs: bool = False, states: bool = False) -> Scores:
        """Run all segments, parents first. Keep the `graphs` of batches, or the `states` of segments, for `backward`.

        The caller enters the context of mixed precision, so that all batches share the casts of the weights.
        """
        self._kept = graphs or states
        nothing = torch.zeros(0, device=self._decoder.device)
        found, places = [(nothing, nothing)], [np.zeros(0, np.int64)]
        list(self._idle(len(self.batches)))
        for batch, done in zip(self.batches, self._done, strict=True):
            with torch.set_grad_enabled(graphs):
                run = self._run(batch)
            if graphs:
                self._graphs.append(run)
            flat, at, tokens = self._targets(batch, run.hidden.detach())
            with torch.no_grad():
                found += [self._decoder.head(at[part], tokens[part]) for part in self._chunks(len(flat))]
            places.append(flat)
            if not self._kept:
                self._free(done)
        order = self._decoder.tensor(np.argsort(np.concatenate(places)))
        logprobs, entropies = (torch.cat(values)[order] for values in zip(*found, strict=True))
        return Scores(logprobs, entropies)

    def backward(self, gradient: Tensor) -> None:
        """Add the gradients of the parameters to their `.grad`. `gradient` is that of the flat scores, shape (N,).

        States that were not kept are computed again.
        """
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
                self._backward(batch, run, gradient)
                self._free(batch.segments)

    def _backward(self, batch: Batch, run: _Run, gradient: Tensor) -> None:
        hidden = torch.zeros_like(run.hidden)
        flat, at, tokens = self._targets(batch, run.hidden.detach())
        own = gradient[self._decoder.tensor(flat)]
        with torch.enable_grad(), self._decoder.autocast():
            grads = [self._decoder.head.backward(at[part], tokens[part], own[part]) for part in self._chunks(len(flat))]
        hidden.index_put_(self._places(batch), torch.cat(grads).to(hidden), accumulate=True)
        # keys and values get theirs on the way, from what is kept with them
        ends = [(run.hidden, hidden)]
        below = [self._gradients.pop(k, None) for k in batch.segments]
        if any(below):
            for i, layer in enumerate(run.linear):
                for j, new in enumerate(layer.new):
                    rows = [torch.zeros_like(new[:1]) if one is None else one[i][j].to(new) for one in below]
                    ends.append((new, torch.cat(rows)))
        ends = [(x, g) for x, g in ends if x.requires_grad]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [g for _, g in ends])
        for row, k in enumerate(batch.segments):
            if (parent := self.segments[k].parent) >= 0 and run.linear:
                self._add(parent, [[g[row : row + 1] for g in _gradients(layer)] for layer in run.linear])

    def _add(self, segment: int, gradients: list[list[Tensor]]) -> None:
        """Add the gradients of a segment's states in float32: in bfloat16, small ones would be lost."""
        if segment not in self._gradients:
            self._gradients[segment] = [[g.float() for g in layer] for layer in gradients]
            return
        for layer, new in zip(self._gradients[segment], gradients, strict=True):
            for total, g in zip(layer, new, strict=True):
                total += g

    def _free(self, segments: Sequence[int]) -> None:
        for k in segments:
            self._states.pop(k, None)
            self.paths.free(k)

    def _idle(self, batches: int) -> Iterator[Tensor]:
        if self._decoder.replay is not None:
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

    def _run(self, batch: Batch) -> _Run:
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
        if self._decoder.replay is not None:
            experts = [self.segments[k].experts for k in batch.segments]
            self._decoder.replay.begin(experts, batch.lengths, self._decoder.device)
        parents = [self._states.get(self.segments[k].parent) for k in batch.segments]
        rows = ids.reshape(batch.rows, -1), positions.reshape(batch.rows, -1)
        run = _Run(*self._decoder.run(*rows, batch, parents))
        if batch.writes and run.linear:
            for row, k in enumerate(batch.segments):
                if self.segments[k].inner:
                    new = [[state[row : row + 1] for state in layer.new] for layer in run.linear]
                    self._states[k] = [tuple(map(self._at_rest, layer)) for layer in new]
        return run

    def _at_rest(self, state: Tensor) -> Tensor:
        """Return a state that does not hold the batch it was a part of, in the CPU's memory if that is asked for."""
        if self._offload and state.is_cuda:
            return torch.empty(state.shape, dtype=state.dtype, pin_memory=True).copy_(state)
        return state.detach().clone()

    def _places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns after which a token is scored, each (E,)."""
        first = np.cumsum([0, *batch.lengths[:-1]])
        flat = np.concatenate([start + self.segments[k].at for k, start in zip(batch.segments, first, strict=True)])
        rows, columns = np.divmod(flat, sum(batch.lengths) // batch.rows)
        return self._decoder.tensor(rows), self._decoder.tensor(columns)

    def _targets(self, batch: Batch, hidden: Tensor) -> tuple[NDArray[np.int64], Tensor, Tensor]:
        """Return flat indices of the scored tokens (E,), the hidden states before them (E, H), and the tokens (E,)."""
        segments = [self.segments[k] for k in batch.segments]
        flat, tokens = (np.concatenate([getattr(segment, name) for segment in segments]) for name in ("flat", "tokens"))
        return flat, hidden[self._places(batch)], self._decoder.tensor(tokens.astype(np.int64))


def _gradients(layer: LinearAttention) -> list[Tensor]:
    """Return the gradients of the states that a layer was given."""
    return [torch.zeros_like(given) if given.grad is None else given.grad for given in layer.given]


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
