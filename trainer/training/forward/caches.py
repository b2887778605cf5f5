"""Hugging Face caches of a batch of segments: states of linear attention, which pass gradients.

The library's own caches copy new states into fixed tensors, which cuts the gradient. These assign them. Keys and values
are kept elsewhere (`paths`): an attention layer of these caches keeps nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from rolltap.addons.errors import InputError

State = list[tuple[Tensor, ...]]
"""Convolution and recurrent states of each layer after a segment's last token, each (1, ...)."""


class Attention(DynamicLayer):
    """A layer whose attention is `forward.attention`, which gets a batch's own keys and values."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return these keys and values."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0: the caller gives positions."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of a mask, and the position of the first."""
        return query_length, 0


class LinearAttention(LinearAttentionLayer):
    """Convolution and recurrent states after the last token of each batch row's parent."""

    def __init__(self, states: int, parents: Sequence[tuple[Tensor, ...] | None], device: torch.device) -> None:
        super().__init__(number_of_states=states)
        # so that a segment of one token does not take the path of decoding, which changes the states in place
        self.record_past = True
        self.given: list[Tensor] = []
        """The states of all rows' parents, (B, ...). They are leaf tensors if gradients are enabled."""
        known = next((parent for parent in parents if parent is not None), ())
        for i, state in enumerate(known):
            # a row without ancestors begins with zeros
            rows = [torch.zeros_like(state) if parent is None else parent[i] for parent in parents]
            joined = torch.cat([row.to(device, non_blocking=True) for row in rows])
            self.given.append(joined.requires_grad_(torch.is_grad_enabled()))
        for i, conv in enumerate(self.given[:states]):
            self.conv_states[i], self.conv_kernel_size[i] = conv, conv.shape[-1]
            self.has_previous_state[i] = self.is_conv_states_initialized[i] = True
        for i, recurrent in enumerate(self.given[states:]):
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

    @property
    def new(self) -> list[Tensor]:
        """The states after all rows' last tokens, (B, ...)."""
        return [s for s in (*self.conv_states.values(), *self.recurrent_states.values()) if s is not None]


class Layers:
    """The kinds of a model's cache layers. Makes caches of batches."""

    def __init__(self, config: Any) -> None:
        """`config` is a decoder's. Raises `InputError` for a kind of layer whose states are not known here."""
        self._layers = DynamicCache(config=config).layers
        for layer in self._layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer):
                raise InputError(f"the model has cache layers of the kind {type(layer).__name__}")
        self.linear = sum(isinstance(layer, LinearAttentionLayer) for layer in self._layers)
        """Layers of linear attention, whose state must not be taken after padding."""
        self.attention = sum(isinstance(layer, DynamicLayer) for layer in self._layers)
        """Layers that keep keys and values."""

    def cache(self, parents: Sequence[State | None], device: torch.device) -> Cache:
        """Return the cache of a batch: `parents` are the states of each row's parent, which may rest elsewhere."""
        layers: list[Any] = []
        for layer in self._layers:
            if isinstance(layer, LinearAttentionLayer):
                at = len(linear_of(layers))
                own = [None if state is None else state[at] for state in parents]
                layers.append(LinearAttention(layer.number_of_states, own, device))
            else:
                layers.append(DummyLayer() if isinstance(layer, DummyLayer) else Attention())
        return Cache(layers=layers)


def linear_of(layers: Sequence[Any]) -> list[LinearAttention]:
    """Return the layers of linear attention among these."""
    return [layer for layer in layers if isinstance(layer, LinearAttention)]
