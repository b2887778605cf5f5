"""Scorers: from rows to the log-probabilities of their trained tokens."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rolltap.trainer.training.forward.forest import Row


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
