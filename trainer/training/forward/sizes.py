"""Memory that segments take, measured on the model itself, and the sizes that fit into a budget."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rolltap.trainer.training.forward.decoder import COPIES, Decoder
from rolltap.trainer.training.forward.forest import Segment
from rolltap.trainer.training.forward.paths import POSITIONS, Batch, Paths

SIZES = (8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256)
"""Numbers of tokens that a batch of segments may have, best first."""

MEASURED = 64
"""Tokens of the segments that are measured: a block of linear attention's kernels."""

WORKING = 1.25
"""Memory of a batch over what its graph saves: what the running layer needs besides."""


class Parts(NamedTuple):
    """Bytes that a backward pass takes besides weights, their gradients and the optimizer's state."""

    states: float
    """Keys and values or recurrent states of the tokens in memory, and their gradients."""
    activations: float
    """Tensors that one batch of segments saves for its backward pass, times `WORKING`."""
    logits: float
    """One chunk of logits, and the gradient of the head's weight; or, if they are more, a layer's gradients of keys and
    values that are not added yet: these come when the logits are freed."""


class Sizes(NamedTuple):
    """Settings of a `SegmentScorer`, and the bytes that they are expected to take."""

    tokens_per_segment: int
    tokens_in_memory: int | None
    """None if the states of all rows fit. A branch counts as `Costs.tokens_per_branch` of them."""
    logits_tokens: int
    parts: Parts


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of memory."""

    state_per_token: float
    """Keys and values of a token, in all layers."""
    state_per_segment: float
    """States of linear attention after a segment."""
    gradient_per_token: float
    """Gradients of a token's keys and values, which add up in float32 until the token's own segment runs."""
    gradient_per_segment: float
    """Gradient of a segment's states of linear attention, in float32. Only its children's backward pass needs it."""
    graph_per_token: float
    """Activations of a token in one batch."""
    graph: float
    """A batch whatever its size, such as weights that are cast."""
    gradient_per_position: float
    """Gradients of a position's keys and values in one layer before they are added, with a copy in float32."""
    head_gradient: float
    """Gradient of the head's weight from one chunk of logits."""
    logits_per_token: float
    """Logits of a scored token, and what is computed from them."""
    logits_tokens: int
    """Tokens that a chunk of logits has at least."""

    @property
    def branch(self) -> float:
        """States of linear attention where two rows part, and their gradient."""
        return self.state_per_segment + self.gradient_per_segment

    @property
    def tokens_per_branch(self) -> int:
        """Tokens whose states and gradients take as much as those of a branch."""
        token = self.state_per_token + self.gradient_per_token + self.state_per_segment / SIZES[0]
        return ceil(self.branch / token)

    @property
    def tokens_per_row(self) -> int:
        """Tokens whose activations take as much as a row of a batch besides its own: the states of
        linear attention that it continues, those after it, and the gradients of both."""
        return ceil(4 * self.state_per_segment / max(self.graph_per_token, 1.0))

    def parts(
        self,
        size: int,
        in_memory: int,
        longest: int,
        branches: int = 0,
        *,
        offload_states: bool = False,
        logits_tokens: int = 0,
    ) -> Parts:
        """Return the bytes of batches of `size` tokens, with the states of `in_memory` tokens, in rows of `longest`.

        `branches` is the number of rows that leave another one. Each adds a segment that others continue, and which has
        a gradient: the backward pass begins with the last segments of all rows. So the keys and values of all tokens
        have gradients at once, but of a row that shares nothing only one segment has one of its linear attention.
        """
        segments = -(-in_memory // size) + branches
        rows = -(-in_memory // max(longest, 1)) + branches
        states = (self.state_per_token + self.gradient_per_token) * in_memory
        states += self.state_per_segment * segments + self.gradient_per_segment * rows
        graph = WORKING * (self.graph + self.graph_per_token * size)
        logits = self.head_gradient + self.logits_per_token * min(size, logits_tokens or self.logits_tokens)
        logits = max(logits, self.gradient_per_position * min(longest, POSITIONS))
        return Parts(0.0 if offload_states else states, graph, logits)

    def sizes(
        self,
        memory: float,
        tokens: int,
        longest: int,
        branches: int = 0,
        *,
        offload_states: bool = False,
        among: Sequence[int] = SIZES,
    ) -> Sizes:
        """Return the settings for `memory` bytes, and rows with `tokens` tokens of their own, at most `longest`.

        `branches` are those of `parts`. The result has the largest size `among` these, in descending order, of which
        all states fit, or else those of the longest row. If none does, the one that takes least: more than `memory`.
        What is left is for logits.
        """

        def left(size: int, in_memory: int, branches: int) -> float:
            return memory - sum(self.parts(size, in_memory, longest, branches, offload_states=offload_states))

        together = [(size, tokens, branches) for size in among]
        alone = [(size, longest, 0) for size in among]
        fitting = next((case for case in together + alone if left(*case) >= 0), None)
        case = fitting or max(alone, key=lambda case: left(*case))
        size, in_memory, branches = case
        bound = None
        if case not in together:
            # whole segments, each of which has states of linear attention; one row more may have begun
            rows = self.gradient_per_segment * size / longest
            one = (self.state_per_token + self.gradient_per_token) * size + self.state_per_segment + rows
            more = (left(*case) - self.gradient_per_segment) // one
            in_memory += max(0, int(more)) * size
            bound = in_memory
        logits = self.logits_tokens + max(0.0, left(size, in_memory, branches)) // max(self.logits_per_token, 1.0)
        logits_tokens = max(min(size, int(logits)), self.logits_tokens)
        parts = self.parts(
            size, in_memory, longest, branches, offload_states=offload_states, logits_tokens=logits_tokens
        )
        return Sizes(size, bound, logits_tokens, parts)


def measure(model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> Costs:
    """Return the costs of `model`, from the tensors that autograd saves in two short forward passes.

    The model may be without data, of torch's `FakeTensorMode`. Raises `InputError` for layers of unknown states.
    """
    decoder = Decoder(model, 1.0, autocast)
    with decoder.prepared():
        saved, keys, linear = _saved(decoder, MEASURED)
        twice, *_ = _saved(decoder, 2 * MEASURED)
    largest = max((k.numel() + v.numel() for k, v in zip(keys[::2], keys[1::2], strict=True)), default=0)
    per_token = (twice - saved) / MEASURED
    return Costs(
        state_per_token=sum(tensor.nbytes for tensor in keys) / MEASURED,
        state_per_segment=sum(tensor.nbytes for tensor in linear),
        gradient_per_token=4 * sum(tensor.numel() for tensor in keys) / MEASURED,
        gradient_per_segment=4 * sum(tensor.numel() for tensor in linear),
        graph_per_token=per_token,
        graph=max(0.0, saved - per_token * MEASURED),
        gradient_per_position=8 * largest / MEASURED,
        head_gradient=decoder.head.gradient_bytes,
        logits_per_token=COPIES * 4.0 * decoder.head.vocabulary,
        logits_tokens=decoder.head.chunk,
    )


def _saved(decoder: Decoder, tokens: int) -> tuple[int, list[Tensor], list[Tensor]]:
    """Return the bytes that autograd saves for a segment, without the weights; its keys and values; and its states of
    linear attention."""
    weights = {_storage(tensor) for tensor in [*decoder.body.parameters(), *decoder.body.buffers()]}
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        # with its graph, which holds what this returns, it would be in a cycle
        saved.append(tensor.detach())
        return saved[-1]

    ids = np.zeros(tokens, np.int32)
    paths = Paths([Segment(-1, 0, ids, True, ids[:0].astype(np.int64), ids[:0], ids[:0].astype(np.int64))])
    batch = Batch(paths, [0], [0], [tokens], rows=1)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), decoder.autocast():
        _, linear = decoder.run(ids[None].astype(np.int64), np.arange(tokens)[None], batch, [None])
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    counted = sum(size for storage, size in sizes.items() if storage not in weights)
    return counted, paths.tensors, [new.detach() for layer in linear for new in layer.new]


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, while it lives. Tensors without data have no address to tell it by."""
    return int(tensor.untyped_storage()._cdata)
