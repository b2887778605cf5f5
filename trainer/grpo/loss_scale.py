"""Loss scaling for weights in float16, whose smallest values are 6e-8: gradients of single tokens are less.

Each backward pass begins with gradients of log-probabilities that are scaled so that the largest is about 1. The scale
is a power of two, so scaling loses nothing, and it follows from the pass alone: there is no state to save.
"""

import math
from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter


class LossScale:
    """Scales the backward passes of a step, whose gradients are added up in float32, and takes the scale out again."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        """`parameters` are the model's: those that have gradients are trained."""
        self._parameters = list(parameters)
        self._scale = 1.0

    def watch(self, logprobs: Tensor) -> None:
        """Scale the backward pass that begins at `logprobs`, of any shape."""
        logprobs.register_hook(self._scaled)

    def finish(self) -> None:
        """Take the scale out of the gradients."""
        self._multiply(1 / self._scale)
        self._scale = 1.0

    def _scaled(self, gradient: Tensor) -> Tensor:
        largest = float(gradient.abs().max())
        if not 0 < largest < math.inf:
            return gradient
        scale = 2.0 ** -math.frexp(largest)[1]
        # those of the micro-batches before have another scale
        self._multiply(scale / self._scale)
        self._scale = scale
        return gradient * scale

    def _multiply(self, factor: float) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
