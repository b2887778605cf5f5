"""A model's head, computed only where a token is scored, a chunk of tokens at a time."""

from typing import Any

import torch
from torch import Tensor

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
