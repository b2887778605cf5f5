"""Scorers: from rows to the log-probabilities of their trained tokens."""

from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """Values of the N scored tokens: row by row, each row's positions in order."""

    logprobs: Tensor
    """Natural-log probabilities at the trainer's temperature, shape (N,), float32. They have a gradient unless the
    scorer was called under `torch.no_grad()`."""
    entropies: Tensor
    """Entropies of the distributions that the tokens were drawn from, in nats, shape (N,), without gradient."""
