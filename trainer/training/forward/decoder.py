"""A causal language model without its wrappers: its decoder on batches of segments, and its head.

The head is computed only where a token is scored, a chunk of tokens at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from rolltap.trainer.training.forward.attention import segment_attention
from rolltap.trainer.training.forward.caches import Layers, State

LOGITS = 2**26
"""Logits of a chunk: its tokens times the vocabulary. `COPIES` tensors of this many float32 values are alive."""
COPIES = 4


class Head:
    """Log-probabilities of tokens from hidden states."""

    def __init__(self, model: Any, temperature: float) -> None:
        """`model` is a Hugging Face causal language model."""
        config = model.config.get_text_config(decoder=True)
        self._project = model.get_output_embeddings()
        self._scale = _logit_scale(config)
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._temperature = temperature
        weight = self._project.weight
        self.vocabulary = int(weight.shape[0])
        self.chunk = max(1, LOGITS // self.vocabulary)
        """Tokens of a chunk."""
        self.gradient_bytes = _gradient_bytes(weight)
        """Size of the weight's gradient, which each chunk computes before it is added."""

    def __call__(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return values of the `tokens` (E,) that follow the hidden states (E, H), both (E,) float32.

        They are natural-log probabilities, and the entropies of their distributions in nats, without gradient.
        """
        logits = self._project(hidden).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        if self._temperature != 1.0:
            logits = logits / self._temperature
        logprobs = torch.log_softmax(logits, -1)
        with torch.no_grad():
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, tokens[:, None])[:, 0], entropies


def _gradient_bytes(weight: Tensor) -> int:
    """Return the bytes of one gradient before it is added: in the weight's type, and cast to that of the sum."""
    if not weight.requires_grad:
        return 0
    sum_dtype = weight.grad_dtype or weight.dtype
    return weight.nbytes + (weight.numel() * sum_dtype.itemsize if sum_dtype != weight.dtype else 0)


def _logit_scale(config: Any) -> float:
    """Return the factor of a model's logits. Models name it differently, and some divide by it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)


class Decoder:
    """A causal language model's decoder and head, without wrappers."""

    def __init__(self, model: Any, temperature: float, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        """Raises `InputError` for a model with layers whose states are not known."""
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        if hasattr(model, "get_base_model"):
            # an adapter is in the modules of the model that it wraps
            model = model.get_base_model()
        self.model = model
        self.head = Head(model, temperature)
        self.body = model.get_decoder()
        self.layers = Layers(self.body.config)
        self.device = model.get_input_embeddings().weight.device
        self._autocast = autocast

    def run(
        self, ids: NDArray[np.int64], positions: NDArray[np.int64], ancestors: Sequence[Sequence[State]], *, keep: bool
    ) -> tuple[Tensor, Cache | None]:
        """Run a batch of segments, each after its ancestors.

        `ids` are their tokens, padded on the right, (B, n), and `positions` those of the tokens, (B, n). A segment's
        first is the number of tokens of its `ancestors`, whose states are given in order of position. Returns the
        hidden states (B, n, H) and, if `keep` or if there are ancestors, the cache with the new states.
        """
        starts = positions[:, 0]
        past = int(starts.max())
        options: dict[str, Any] = {"use_cache": False}
        cache = None
        if keep or past:
            cache = self.layers.cache(ancestors, past, self.device)
            options = {"use_cache": True, "past_key_values": cache, "position_ids": self.tensor(positions)}
            if starts.min() < past:
                # what is on the right of a segment needs no mask: it is later
                options["attention_mask"] = self.tensor(np.arange(past + ids.shape[1]) >= past - starts[:, None])
        hidden: Tensor = self.body(input_ids=self.tensor(ids), **options).last_hidden_state
        return hidden, cache

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """Return the array's values on the model's device."""
        return torch.from_numpy(array).to(self.device)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run in mixed precision. Weights are cast once, and the casts are freed at the end.

        Those of before are not used: older versions of torch reuse casts that were made without a gradient.
        """
        torch.clear_autocast_cache()
        with self._autocast():
            yield
        torch.clear_autocast_cache()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Let the layers share masks, and turn their gradient checkpointing off, under which they drop their cache."""
        on = [module for module in self.body.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in on:
            module.gradient_checkpointing = False
        try:
            with segment_attention(self.body.config):
                yield
        finally:
            for module in on:
                module.gradient_checkpointing = True
