"""A causal language model without its wrappers: its decoder on batches of segments, its head on chunks of tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rolltap.trainer.training.forward.attention import segment_attention
from rolltap.trainer.training.forward.caches import Layers, LinearAttention, State, linear_of
from rolltap.trainer.training.forward.paths import Batch
from rolltap.trainer.training.forward.routing import Replay

LOGITS = 2**26
"""Logits of a chunk: its tokens times the vocabulary. `COPIES` tensors of this many float32 values are alive."""
COPIES = 4


class Head:
    """Log-probabilities of tokens from the hidden states of a Hugging Face causal language model."""

    def __init__(self, model: Any, temperature: float) -> None:
        config = model.config.get_text_config(decoder=True)
        self._project = model.get_output_embeddings()
        self._scale = _logit_scale(config)
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._temperature = temperature
        weight = self._project.weight
        self.vocabulary = int(weight.shape[0])
        self.chunk = max(1, LOGITS // self.vocabulary)
        summed = weight.grad_dtype or weight.dtype
        cast = 0 if summed == weight.dtype else weight.numel() * summed.itemsize
        self.gradient_bytes = weight.nbytes + cast if weight.requires_grad else 0
        """Size of the weight's gradient, which each chunk computes before it is added, and of it in the sum's type."""

    def __call__(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return values of the `tokens` (E,) that follow the hidden states (E, H), both (E,) float32.

        They are natural-log probabilities, and the entropies of their distributions in nats, without gradient.
        """
        every = self._logprobs(hidden)
        with torch.no_grad():
            entropies = -(every.exp() * every).sum(-1)
        return every.gather(-1, tokens[:, None])[:, 0], entropies

    def backward(self, hidden: Tensor, tokens: Tensor, gradient: Tensor) -> Tensor:
        """Add the gradients of the head from those of the log-probabilities (E,). Return that of `hidden` (E, H)."""
        leaf = hidden.detach().requires_grad_()
        self._logprobs(leaf).gather(-1, tokens[:, None])[:, 0].backward(gradient)
        assert leaf.grad is not None
        return leaf.grad

    def _logprobs(self, hidden: Tensor) -> Tensor:
        logits = self._project(hidden).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        if self._temperature != 1.0:
            logits = logits / self._temperature
        return torch.log_softmax(logits, -1)


def unwrapped(model: Any) -> Any:
    """Return the model in PEFT's wrapper: an adapter is in the modules of the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _logit_scale(config: Any) -> float:
    """Return the factor of a model's logits. Models name it differently, and some divide by it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None) or 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)


def most(body: Any, number: int) -> int:
    """Return the largest `number` of any process, if the layers of the decoder are sharded. Collective then."""
    if FSDPModule not in type(body).__mro__:
        return number
    largest = torch.tensor(number, device=body.get_input_embeddings().weight.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def idle(body: Any, batches: int) -> Iterator[Tensor]:
    """Run a decoder as often as another process has more `batches`, if its layers are sharded. Collective then.

    They gather each layer together. Call it before the batches. Yields hidden states of two tokens, with a backward
    pass where the batches have one.
    """
    for _ in range(most(body, batches) - batches):
        ids = torch.zeros(1, 2, dtype=torch.long, device=body.get_input_embeddings().weight.device)
        yield body(input_ids=ids, use_cache=False).last_hidden_state


class Decoder:
    """A causal language model's decoder and head, without wrappers."""

    def __init__(self, model: Any, temperature: float, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Raises `InputError` for a model with layers whose states are not known."""
        self.model = model = unwrapped(model)
        self.head = Head(model, temperature)
        self.body = model.get_decoder()
        self.layers = Layers(self.body.config)
        self.device = model.get_input_embeddings().weight.device
        self.replay = Replay()
        self._autocast = autocast

    def run(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], batch: Batch, parents: Sequence[State | None] = ()
    ) -> tuple[Tensor, list[LinearAttention]]:
        """Run a batch of segments, each after its ancestors.

        `ids` are their tokens (B, n), padded on the right, at `positions` (B, n). With linear attention each segment is
        a row, and continues the states of `parents`. Returns the hidden states (B, n, H), and the layers of linear
        attention with the states after each row.
        """
        cache = self.layers.cache(parents, self.device)
        options = {"use_cache": True, "past_key_values": cache, "position_ids": self.tensor(positions)}
        with segment_attention(self.body.config, batch):
            hidden: Tensor = self.body(input_ids=self.tensor(ids), **options).last_hidden_state
        return hidden, linear_of(cache.layers)

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return the array's values on the model's device."""
        return torch.from_numpy(array).to(self.device)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run in mixed precision. Weights are cast once, and the casts are freed at the end."""
        torch.clear_autocast_cache()  # older versions of torch reuse casts that were made without a gradient
        with self._autocast():
            yield
        torch.clear_autocast_cache()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Turn the gradient checkpointing of the layers off, under which they drop their cache."""
        on = [module for module in self.body.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in on:
            module.gradient_checkpointing = False
        try:
            yield
        finally:
            for module in on:
                module.gradient_checkpointing = True
