"""Hugging Face caches of a batch of segments: they read the states of the ancestors, and pass gradients.

The library's own caches copy new states into fixed tensors, which cuts the gradient. These assign them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from rolltap.addons.errors import InputError

LayerState = tuple[Tensor, ...]
"""State of one layer after a segment. Attention: the segment's own keys and values, each (1, heads, n, size). Linear
attention: convolution and recurrent states after its last token, each (1, ...). Empty for a layer without a cache."""

State = list[LayerState]
"""State of all layers after a segment."""


class Attention(DynamicLayer):
    """Keys and values of each batch row's ancestors, padded on the left to `length` tokens.

    They are joined when the layer runs, so that one layer's copy is alive at a time. A layer with a sliding window
    keeps all of them: its mask hides what is outside the window.
    """

    def __init__(self, ancestors: Sequence[Sequence[LayerState]], length: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._ancestors, self._length = ancestors, length
        self._new: LayerState = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the ancestors' keys and values followed by these, each (B, heads, length + n, size)."""
        self._new = (key_states, value_states)
        return self._joined(key_states, 0), self._joined(value_states, 1)

    def _joined(self, new: Tensor, which: int) -> Tensor:
        if not self._length:
            return new
        rows = []
        for b, ancestors in enumerate(self._ancestors):
            pieces = [layer[which].to(new.device, non_blocking=True) for layer in ancestors]
            padding = self._length - sum(piece.shape[2] for piece in pieces)
            rows.append(torch.cat([new.new_zeros(1, new.shape[1], padding, new.shape[3]), *pieces, new[b : b + 1]], 2))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def get_seq_length(self) -> int:
        """Return the number of tokens before the segments."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of a mask, and the position of the first."""
        return self._length + query_length, 0

    def state(self, row: int, length: int) -> LayerState:
        """Return the new state of a batch row whose segment has `length` tokens."""
        return tuple(new[row : row + 1, :, :length] for new in self._new)


class LinearAttention(LinearAttentionLayer):
    """Convolution and recurrent states after the last token of each batch row's parent."""

    def __init__(self, states: int, ancestors: Sequence[Sequence[LayerState]], device: torch.device) -> None:
        super().__init__(number_of_states=states)
        # so that a segment of one token does not take the path of decoding, which changes the states in place
        self.record_past = True
        known = next((row[-1] for row in ancestors if row), None)
        if known is None:
            return
        joined = []
        for i, state in enumerate(known):
            # a row without ancestors begins with zeros
            parents = [row[-1][i] if row else torch.zeros_like(state) for row in ancestors]
            joined.append(torch.cat([parent.to(device, non_blocking=True) for parent in parents]))
        for i, conv in enumerate(joined[:states]):
            self.conv_states[i], self.conv_kernel_size[i] = conv, conv.shape[-1]
            self.has_previous_state[i] = self.is_conv_states_initialized[i] = True
        for i, recurrent in enumerate(joined[states:]):
            self.recurrent_states[i], self.is_recurrent_states_initialized[i] = recurrent, True

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the earlier inputs of the convolution followed by these, (B, channels, kernel + n)."""
        kernel = int(self.conv_kernel_size[state_idx] or conv_kernel_size or conv_states.shape[-1])
        if self.conv_states[state_idx] is None:
            every = torch.nn.functional.pad(conv_states, (kernel, 0))
        else:
            every = torch.cat([self.conv_states[state_idx], conv_states], -1)
        self.conv_states[state_idx], self.conv_kernel_size[state_idx] = every[..., -kernel:], kernel
        self.has_previous_state[state_idx] = self.is_conv_states_initialized[state_idx] = True
        return every

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the recurrent state after the segments' last tokens, and return it."""
        self.recurrent_states[state_idx], self.is_recurrent_states_initialized[state_idx] = recurrent_states, True
        return recurrent_states

    def state(self, row: int, length: int) -> LayerState:
        """Return the new state of a batch row, whose segment fills it."""
        states = [*self.conv_states.values(), *self.recurrent_states.values()]
        return tuple(state[row : row + 1] for state in states if state is not None)


class Stateless(DummyLayer):
    """A layer without a cache of its own."""

    def state(self, row: int, length: int) -> LayerState:
        """Return no state."""
        return ()


class Layers:
    """The kinds of a model's cache layers. Makes caches of batches."""

    def __init__(self, config: Any) -> None:
        """`config` is a decoder's. Raises `InputError` for a kind of layer whose states are not known here."""
        self._layers = DynamicCache(config=config).layers
        for layer in self._layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer):
                raise InputError(f"the model has cache layers of the kind {type(layer).__name__}")
        self.linear = any(isinstance(layer, LinearAttentionLayer) for layer in self._layers)
        """True if a layer has linear attention, whose state must not be taken after padding."""

    def cache(self, ancestors: Sequence[Sequence[State]], length: int, device: torch.device) -> Cache:
        """Return the cache of a batch: `ancestors` are the states of each row's ancestors, in order of position.

        `length` is the number of tokens of the longest row's ancestors. The states may rest on another device.
        """
        layers: list[Any] = []
        for i, layer in enumerate(self._layers):
            own = [[state[i] for state in row] for row in ancestors]
            if isinstance(layer, LinearAttentionLayer):
                layers.append(LinearAttention(layer.number_of_states, own, device))
            else:
                layers.append(Stateless() if isinstance(layer, DummyLayer) else Attention(own, length))
        return Cache(layers=layers)


def state_of(cache: Cache, row: int, length: int) -> State:
    """Return the state after a batch row's segment of `length` tokens, once the model has run with this cache."""
    return [layer.state(row, length) for layer in cache.layers]
