"""Scorers: from rows to the log-probabilities of their trained tokens, as padded rows or as segments.

Segments are those of the rows' prefix forest: each shared token is computed once, at any length. The forward pass runs
them parents first, and keeps the state of each that others continue: keys and values, or the states of linear
attention. The backward pass runs them again, children first, from the states of their ancestors as leaf tensors. So a
segment's backward pass begins with the gradient of its state, which its descendants have added up. The activations of
one batch of segments are alive at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rolltap.trainer.training.forward.caches import State, state_of
from rolltap.trainer.training.forward.decoder import Decoder
from rolltap.trainer.training.forward.forest import Row, batches, build_forest, own_tokens

POSITIONS = 8
"""Positions of a batch (its segments and all their ancestors) for each token that a batch may have. A position costs a
copy of its keys and values, a small part of a token's activations. A batch of one segment may have more."""


class Scores(NamedTuple):
    """Values of the N scored tokens: row by row, each row's positions in order."""

    logprobs: Tensor
    """Natural-log probabilities at the trainer's temperature, shape (N,), float32. They have a gradient unless the
    scorer was called under `torch.no_grad()`."""
    entropies: Tensor
    """Entropies of the distributions that the tokens were drawn from, in nats, shape (N,), without gradient."""


class Scorer(Protocol):
    """A way to run rows through a model."""

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
        self.forwarded = 0

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """See `Scorer.__call__`. `model` has TRL's fused head (`add_fused_lm_head`), which divides by the temperature.

        Raises torch's out-of-memory error for rows that do not fit.
        """
        device = self._device
        rows = [row for row in rows if len(row.scored)]
        if not rows:
            self.forwarded = 0
            nothing = torch.zeros(0, device=device)
            return Scores(nothing.clone().requires_grad_(torch.is_grad_enabled()), nothing)
        length = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full((len(rows), length), -100)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = torch.from_numpy(row.ids)
            labels[i, row.scored] = torch.from_numpy(row.ids[row.scored]).long()
        self.forwarded = ids.numel()
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
        self.forwarded = 0

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """Return the scores of all rows. `model` may be wrapped for several processes, and by PEFT.

        Raises `InputError` for a model with layers whose states are not known.
        """
        decoder = Decoder(model, self._temperature, self._autocast)
        parts = [part for part in split_rows(rows, self.tokens_in_memory) if any(len(row.scored) for row in part)]
        groves = [Grove(decoder, part, self.tokens_per_segment, offload=self._offload) for part in parts]
        self.forwarded = sum(grove.forwarded for grove in groves)
        hook = torch.zeros(0, device=decoder.device, requires_grad=torch.is_grad_enabled())
        found = [Scores(hook.clone(), hook.detach())]
        with decoder.prepared(), decoder.autocast():
            for grove in groves:
                if hook.requires_grad and not self._keep_graph:
                    scores = _TwoPasses.apply(hook, grove, len(groves) == 1)  # type: ignore[no-untyped-call]
                    found.append(Scores(*scores))
                else:
                    found.append(grove.score(keep=False)[0])
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


class Grove:
    """Rows whose states are kept together: a forest, and its execution."""

    def __init__(self, decoder: Decoder, rows: Sequence[Row], tokens: int, *, offload: bool) -> None:
        """`tokens` is what a batch may have. With `offload` states rest in the CPU's memory."""
        self.decoder = decoder
        self.segments = build_forest(rows, tokens)
        positions = max([POSITIONS * tokens, *(segment.end for segment in self.segments)])
        self.batches = batches(self.segments, tokens, positions, same_length=decoder.layers.linear)
        self._offload = offload
        self._ancestors: list[list[int]] = []
        for segment in self.segments:
            above = [] if segment.parent < 0 else [*self._ancestors[segment.parent], segment.parent]
            self._ancestors.append(above)
        # each batch after which states are not read any more
        last = {k: i for i, batch in enumerate(self.batches) for k in batch}
        for k in reversed(range(len(self.segments))):
            if (parent := self.segments[k].parent) >= 0:
                last[parent] = max(last[parent], last[k])
        self._done: list[list[int]] = [[] for _ in self.batches]
        for k, i in last.items():
            self._done[i].append(k)

    @property
    def forwarded(self) -> int:
        """Tokens that go through the model, padding included."""
        return sum(len(batch) * self._width(batch) for batch in self.batches)

    def _width(self, batch: Sequence[int]) -> int:
        """Return the tokens of each row of a batch."""
        width = max(len(self.segments[k].ids) for k in batch)
        # kernels of linear attention have no gradient for one token that continues a state
        return max(width, 2) if self.decoder.layers.linear and not self.segments[batch[0]].inner else width

    def score(self, *, keep: bool) -> tuple[Scores, dict[int, State]]:
        """Run all segments, parents first, with a graph if gradients are enabled.

        The caller enters the context of mixed precision, so that all batches share the casts of the weights. Returns
        the scores, and the states of inner segments if `keep`.
        """
        states: dict[int, State] = {}
        found, places = [], []
        for i, batch in enumerate(self.batches):
            hidden, new = self._run(batch, states)
            flat, at, tokens = self._targets(batch, hidden)
            found += [self._head(at[part], tokens[part]) for part in self._chunks(len(flat))]
            places.append(flat)
            states |= new if torch.is_grad_enabled() else {k: self._at_rest(state) for k, state in new.items()}
            if not keep:
                for k in self._done[i]:
                    states.pop(k, None)
        order = self.decoder.tensor(np.argsort(np.concatenate(places)))
        logprobs, entropies = (torch.cat(values)[order] for values in zip(*found, strict=True))
        return Scores(logprobs, entropies), states

    def states(self) -> dict[int, State]:
        """Run the inner segments alone, without a graph, and return their states."""
        states: dict[int, State] = {}
        with self.decoder.autocast():
            for batch in self.batches:
                if self.segments[batch[0]].inner:
                    _, new = self._run(batch, states)
                    states |= {k: self._at_rest(state) for k, state in new.items()}
        return states

    def backward(self, states: dict[int, State], gradient: Tensor) -> None:
        """Add the gradients of the parameters to their `.grad`, and take the `states` apart as they are done.

        `gradient` is that of the flat scores, shape (N,).
        """
        gradients: dict[int, list[list[Tensor | None]]] = {}
        for k, state in states.items():
            gradients[k] = [[None] * len(layer) for layer in state]
            for layer, own in zip(state, gradients[k], strict=True):
                for i, leaf in enumerate(layer):
                    leaf.requires_grad_().register_post_accumulate_grad_hook(_adder(own, i))
        for batch in reversed(self.batches):
            with torch.enable_grad():
                self._backward_batch(batch, states, gradients, gradient)

    def _backward_batch(
        self,
        batch: Sequence[int],
        states: dict[int, State],
        gradients: dict[int, list[list[Tensor | None]]],
        gradient: Tensor,
    ) -> None:
        with self.decoder.autocast():
            hidden, new = self._run(batch, states)
            flat, at, tokens = self._targets(batch, hidden)
        ends = [(at, self._backward_head(at, tokens, gradient[self.decoder.tensor(flat)]))] if len(flat) else []
        for k, state in new.items():
            del states[k]
            for layer, own in zip(state, gradients.pop(k), strict=True):
                ends += [(x, g.to(x)) for x, g in zip(layer, own, strict=True) if g is not None]
        ends = [(x, g) for x, g in ends if x.requires_grad]
        if ends:
            torch.autograd.backward([x for x, _ in ends], [g for _, g in ends])

    def _backward_head(self, hidden: Tensor, tokens: Tensor, gradient: Tensor) -> Tensor:
        """Add the gradients of the head, and return that of its hidden states (E, H)."""
        leaf = hidden.detach().requires_grad_()
        for part in self._chunks(len(tokens)):
            with self.decoder.autocast():
                logprobs, _ = self.decoder.head(leaf[part], tokens[part])
            logprobs.backward(gradient[part])
        assert leaf.grad is not None
        return leaf.grad

    def _head(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            # not the logits are kept, but the hidden states
            scores: tuple[Tensor, Tensor] = checkpoint(self.decoder.head, hidden, tokens, use_reentrant=False)
            return scores
        return self.decoder.head(hidden, tokens)

    def _chunks(self, tokens: int) -> list[slice]:
        size = self.decoder.head.chunk
        return [slice(i, i + size) for i in range(0, max(tokens, 1), size)]

    def _run(self, batch: Sequence[int], states: dict[int, State]) -> tuple[Tensor, dict[int, State]]:
        """Return the hidden states (B, n, H) of a batch's segments, and the states after the inner ones."""
        segments = [self.segments[k] for k in batch]
        width = self._width(batch)
        ids = np.zeros((len(batch), width), np.int64)
        for row, segment in zip(ids, segments, strict=True):
            row[: len(segment.ids)] = segment.ids
        positions = np.array([segment.start for segment in segments])[:, None] + np.arange(width)
        if len(batch) > 1:
            # a table of learned positions may end with the row. The positions of one segment alone must ascend: those
            # that do not are several rows to flash attention.
            positions = np.minimum(positions, np.array([segment.end - 1 for segment in segments])[:, None])
        ancestors = [[states[a] for a in self._ancestors[k]] for k in batch]
        hidden, cache = self.decoder.run(ids, positions, ancestors, keep=segments[0].inner)
        inner = [(row, k) for row, k in enumerate(batch) if self.segments[k].inner]
        return hidden, {k: state_of(cache, row, len(self.segments[k].ids)) for row, k in inner}

    def _targets(self, batch: Sequence[int], hidden: Tensor) -> tuple[NDArray[np.int64], Tensor, Tensor]:
        """Return flat indices of the scored tokens (E,), the hidden states before them (E, H), and the tokens (E,)."""
        segments = [self.segments[k] for k in batch]
        rows = np.repeat(np.arange(len(batch)), [len(segment.at) for segment in segments])
        flat, at, tokens = (
            np.concatenate([getattr(segment, name) for segment in segments]) for name in ("flat", "at", "tokens")
        )
        return (
            flat,
            hidden[self.decoder.tensor(rows), self.decoder.tensor(at)],
            self.decoder.tensor(tokens.astype(np.int64)),
        )

    def _at_rest(self, state: State) -> State:
        """Return a state that does not hold the batch it was a part of, in the CPU's memory if that is asked for."""
        return [tuple(self._moved(tensor) for tensor in layer) for layer in state]

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._offload and tensor.is_cuda:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        return tensor.detach().clone()


def _adder(sums: list[Tensor | None], i: int) -> Callable[[Tensor], None]:
    """Return a hook that adds a leaf's gradient to `sums[i]` in float32: in bfloat16, small ones would be lost."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        so_far = sums[i]
        sums[i] = leaf.grad.float() if so_far is None else so_far.add_(leaf.grad)
        leaf.grad = None

    return add


class _TwoPasses(torch.autograd.Function):
    """A grove's log-probabilities and entropies. Its backward pass adds to the parameters' `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, grove: Grove, keep: bool) -> tuple[Tensor, Tensor]:
        # `hook` requires a gradient, so that backward is called
        scores, ctx.states = grove.score(keep=keep)
        ctx.grove = grove
        ctx.mark_non_differentiable(scores.entropies)
        return scores.logprobs, scores.entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[None, None, None]:
        with ctx.grove.decoder.prepared():
            ctx.grove.backward(ctx.states or ctx.grove.states(), gradient)
        return None, None, None
