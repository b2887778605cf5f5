"""Memory that segments take, measured on the model itself, and the sizes that fit into a budget."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rolltap.trainer.training.forward.caches import State, state_of
from rolltap.trainer.training.forward.decoder import COPIES, Decoder
from rolltap.trainer.training.forward.forest import Row, own_tokens
from rolltap.trainer.training.forward.passes import POSITIONS

SIZES = (8192, 4096, 2048, 1024, 512, 256)
"""Numbers of tokens that a batch of segments may have, best first."""

MEASURED = 64
"""Tokens of the segments that are measured: a block of linear attention's kernels."""

WORKING = 1.25
"""Memory of a batch over what its graph saves: what the running layer needs besides."""


class Sizes(NamedTuple):
    """Settings of a `SegmentScorer`, and the bytes that they are expected to take."""

    tokens_per_segment: int
    tokens_in_memory: int | None
    """None if the states of all rows fit."""
    expected_bytes: int
    """Peak memory besides weights, their gradients and the optimizer's state."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of memory. A position is a token of a batch, or of the ancestors of one of its segments."""

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
    graph_per_position: float
    """Copies of a position's keys and values."""
    heads_per_key: int
    """Copies of them in a batch of several segments: heads that share keys."""
    graph_per_pair: float
    """Attention of a token to a position: a mask, or the weights where the model's attention keeps them."""
    graph: float
    """A batch whatever its size, such as weights that are cast."""
    head_gradient: float
    """Gradient of the head's weight from one chunk of logits."""
    logits_per_token: float
    """Logits of a scored token, and what is computed from them."""
    logits_tokens: int
    """Tokens of a chunk of logits."""

    def of_batch(self, tokens: int, longest: int) -> float:
        """Return the bytes of one batch in the backward pass. `longest` is the number of tokens of the longest row."""
        graph = self.graph + self.graph_per_token * tokens + self.graph_per_pair * tokens * longest
        graph += self.graph_per_position * max(POSITIONS * tokens * self.heads_per_key, longest)
        head = self.head_gradient + self.logits_per_token * min(tokens, self.logits_tokens)
        return WORKING * graph + head

    def of_states(self, tokens: int, tokens_per_segment: int, longest: int) -> float:
        """Return the bytes of the states of `tokens` tokens, in rows of `longest`, and of their gradients.

        The backward pass begins with the last segments of all rows. So the keys and values of all tokens have gradients
        at once, but only one segment of a row has one of its linear attention.
        """
        segments, rows = -(-tokens // tokens_per_segment), -(-tokens // max(longest, 1))
        per_token = self.state_per_token + self.gradient_per_token
        return per_token * tokens + self.state_per_segment * segments + self.gradient_per_segment * rows

    def sizes(
        self, memory: float, rows: Sequence[Row], *, offload_states: bool = False, among: Sequence[int] = SIZES
    ) -> Sizes:
        """Return the settings for these rows and `memory` bytes, with a size `among` these, in descending order.

        The largest size of which all states fit, or else the largest of which those of the longest row do. If none
        does, the smallest: `expected_bytes` is then more than `memory`.
        """
        longest = max((len(row.ids) for row in rows), default=0)
        tokens = sum(own_tokens(rows))
        return self.sizes_of(memory, tokens, longest, offload_states=offload_states, among=among)

    def sizes_of(
        self, memory: float, tokens: int, longest: int, *, offload_states: bool = False, among: Sequence[int] = SIZES
    ) -> Sizes:
        """Return the settings for rows of `tokens` tokens of their own, of which the longest row has `longest`."""
        for at_once in (tokens, longest):
            for size in among:
                batch = self.of_batch(size, longest)
                states = 0.0 if offload_states else self.of_states(at_once, size, longest)
                if batch + states <= memory:
                    return self._with_room(size, batch, states, memory, tokens, longest, at_once)
        return self._with_room(size, batch, states, memory, tokens, longest, longest)

    def _with_room(
        self, size: int, batch: float, states: float, memory: float, tokens: int, longest: int, at_once: int
    ) -> Sizes:
        if at_once >= tokens:
            return Sizes(size, None, int(batch + states))
        # whole segments, each of which has states of linear attention; one row more may have begun
        one = self.of_states(size, size, longest) + self.gradient_per_segment * (size / longest - 1)
        segments = int((memory - batch - self.gradient_per_segment) / one)
        at_once = max(at_once, segments * size)
        return Sizes(size, at_once, int(batch + self.of_states(at_once, size, longest)))


def measure(model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> Costs:
    """Return the costs of `model`, from the tensors that autograd saves in four short forward passes.

    The parameters and their gradients are as before afterwards. The model may be without data, of torch's
    `FakeTensorMode`. Raises `InputError` for a model with layers whose states are not known.
    """
    decoder = Decoder(model, 1.0, autocast)
    n, config = MEASURED, decoder.body.config
    with decoder.prepared():
        pasts = {past: _state(decoder, past) for past in (n, 2 * n)}
        saved = {(new, past): _saved(decoder, new, past, pasts[past]) for new in pasts for past in pasts}
    states = {past: sum(tensor.nbytes for layer in state for tensor in layer) for past, state in pasts.items()}
    values = {past: sum(tensor.numel() for layer in state for tensor in layer) for past, state in pasts.items()}

    # saved = graph + per_token * new + per_position * (past + new) + per_pair * new * (past + new)
    per_pair = (saved[2 * n, 2 * n] - saved[n, 2 * n] - saved[2 * n, n] + saved[n, n]) / n**2
    per_position = (saved[n, 2 * n] - saved[n, n]) / n - per_pair * n
    per_token = (saved[2 * n, n] - saved[n, n]) / n - per_position - 4 * per_pair * n
    per_state_token = (states[2 * n] - states[n]) / n
    per_gradient_token = 4 * (values[2 * n] - values[n]) / n
    return Costs(
        state_per_token=per_state_token,
        state_per_segment=states[n] - per_state_token * n,
        gradient_per_token=per_gradient_token,
        gradient_per_segment=4 * values[n] - per_gradient_token * n,
        graph_per_token=per_token,
        graph_per_position=per_position,
        heads_per_key=getattr(config, "num_attention_heads", 1) // (getattr(config, "num_key_value_heads", None) or 1),
        graph_per_pair=per_pair,
        graph=max(0.0, saved[n, n] - per_token * n - 2 * per_position * n - 2 * per_pair * n**2),
        head_gradient=decoder.head.gradient_bytes,
        logits_per_token=COPIES * 4.0 * decoder.head.vocabulary,
        logits_tokens=decoder.head.chunk,
    )


def _state(decoder: Decoder, tokens: int) -> State:
    with torch.no_grad(), decoder.autocast():
        _, cache = decoder.run(np.zeros((1, tokens), np.int64), np.arange(tokens)[None], [[]], keep=True)
    return [tuple(tensor.clone() for tensor in layer) for layer in state_of(cache, 0, tokens)]


def _saved(decoder: Decoder, new: int, past: int, state: State) -> int:
    """Return the bytes that autograd saves for `new` tokens after the `past` ones of `state`, without the weights."""
    weights = {_storage(tensor) for tensor in [*decoder.body.parameters(), *decoder.body.buffers()]}
    leaves = [tuple(tensor.detach().requires_grad_() for tensor in layer) for layer in state]
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        # with its graph, which holds what this returns, it would be in a cycle
        saved.append(tensor.detach())
        return saved[-1]

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), hooks, decoder.autocast():
        decoder.run(np.zeros((1, new), np.int64), np.arange(past, past + new)[None], [[leaves]], keep=True)
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(size for storage, size in sizes.items() if storage not in weights)


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, while it lives. Tensors without data have no address to tell it by."""
    return int(tensor.untyped_storage()._cdata)
