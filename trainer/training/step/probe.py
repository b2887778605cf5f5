"""Finds out whether packed rows give a model's own scores and gradients.

Models differ in how a token sees earlier ones, and layers that are not known mix branches without
an error. So a trunk of random tokens with branches is run as one packed row, and compared with each
row alone, in that very model.

In low precision no two ways to run a model agree. What they may differ by is measured: the rows run
again with their embeddings off by one unit in the last place, and with padding, which changes
kernels and their order of sums.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.model import run_as_served
from rolltap.trainer.training.step.pack import Pack, PaddedRows, TraceRow

TRUNK = 150
"""Tokens of the trunk. It is longer by the size of a sliding window, up to `LONGEST_WINDOW`."""
LONGEST_WINDOW = 1024
BRANCHES = (37, 23)
"""Tokens of each branch after the trunk. The shorter one is last in the packed row, after the
tokens of the other."""
TWIG = 4
"""Tokens of a row that leaves the first branch in its middle. In so few, what leaks into the first
of them counts."""
ALONE = 11
"""Tokens of a row that shares nothing."""
PADDING = 32
"""Tokens on the right of a row when the noise is measured."""
TRUNK_IDS = 1024
"""Ids that the trunk's tokens are of, or half of a smaller vocabulary. No other token has one of
them."""

NOISE = 4.0
"""Differences may be this many times the noise, besides the tolerances. In bfloat16 on a CPU they
are a quarter of it for models of 2 layers, and up to two thirds for 24. Experts that are chosen
differently may make them as large."""


LIMITS = {
    "log-probabilities differ": (1e-3, np.inf),
    "the gradient through earlier tokens differs": (0.01, 0.5),
    "the gradient of the parameters differs": (0.01, 0.5),
}
"""By how much two passes may differ without the noise of low precision, and however large it is.
Log-probabilities: root mean square of a row, in nats. Gradients: norm of the difference, relative
to their own; one that is cut is off by 1."""


def probe(model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> str | None:
    """Return None if packed rows agree with plain ones in a prepared `model`, or the reason not to
    use them.

    PEFT or FSDP may wrap the model. Afterwards it runs as served and has no gradients; the random
    numbers are as before. Takes a forward and backward pass of a packed row of a few hundred tokens
    and those of a sliding window, and two of each row alone. Collective with sharded weights: each
    process sees the gradients of its part, so a reason of one holds for all. An error of the model
    is a reason. Raises `InputError` if memory is short.
    """
    run_as_served(model)
    model.zero_grad(set_to_none=True)
    try:
        return _Probe(model, autocast).reason()
    except torch.OutOfMemoryError as error:
        raise InputError(
            "there is not enough memory to check that the model may run packed rows: a row of "
            f"{TRUNK} to {TRUNK + LONGEST_WINDOW} tokens does not fit. Free memory, train an "
            "adapter, or set forward to padded"
        ) from error
    except Exception as error:  # a model's own code may raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Seen:
    """Results of one way to run the rows."""

    logprobs: list[Tensor]
    """Of each row."""
    trunk: Tensor
    """Gradient of the embeddings of the trunk's ids."""
    weights: list[Tensor]
    """Gradients of some weights; of sharded ones, this process's parts."""

    def differences(self, wanted: "_Seen") -> list[float]:
        """Return the largest differences, in the order of `LIMITS`; not a number if one is not."""
        logprobs = []
        for own, other in zip(self.logprobs, wanted.logprobs, strict=True):
            logprobs.append((own - other).norm() / len(own) ** 0.5)
        weights = [torch.zeros(())]
        for own, other in zip(self.weights, wanted.weights, strict=True):
            weights.append(_relative(own, other))
        trunk = _relative(self.trunk, wanted.trunk)
        return [float(torch.stack(values).max()) for values in (logprobs, [trunk], weights)]


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    # the gradient of half of a new adapter is zero
    size = wanted.norm() + torch.finfo(torch.float32).tiny
    return torch.div((found - wanted).norm(), size)


class _Probe:
    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model = model
        self._autocast = autocast
        self._embeddings = model.get_input_embeddings()
        self._device = self._embeddings.weight.device
        config = model.config.get_text_config(decoder=True)
        self._ids = min(TRUNK_IDS, config.vocab_size // 2)
        self._rows = _rows(config, self._ids)
        # matrices, which mixed precision casts, in the first and in the last layers
        decoder = model.get_decoder()
        trained = []
        for weight in getattr(decoder, "layers", decoder).parameters():
            if weight.requires_grad and weight.ndim > 1:
                trained.append(weight)
        self._watched = trained[:2] + trained[2:][-2:]

    def reason(self) -> str | None:
        """Return how packed rows differ from plain ones, if they do by more than the noise."""
        dtype = self._embeddings.weight.dtype
        kind = self._device.type
        with self._autocast():
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
        longer = []
        for row in self._rows:
            longer.append(TraceRow(np.pad(row.ids, (0, PADDING), "edge"), row.scored))
        packed = self._seen([Pack([[row] for row in self._rows], self._device)])
        plain = self._seen(self._alone(self._rows))
        again = self._seen(self._alone(longer), nudge=torch.finfo(dtype).eps)
        found = packed.differences(plain)
        noise = again.differences(plain)
        for i, (name, (tolerance, most)) in enumerate(LIMITS.items()):
            # "not": what was found may be not a number
            if not found[i] <= min(tolerance + NOISE * noise[i], most):
                by = f"{found[i]:.2g} from plain rows, whose noise is {noise[i]:.2g}"
                return f"{name} by {by} in {dtype}"
        return None

    def _alone(self, rows: Sequence[TraceRow]) -> list[PaddedRows]:
        return [PaddedRows([[row]], self._device) for row in rows]

    def _seen(self, forests: Sequence[Pack | PaddedRows], nudge: float = 0.0) -> _Seen:
        """Run a forward and a backward pass of each forest, with embeddings off by `nudge`."""
        embedded: list[tuple[Tensor, Tensor]] = []
        random = torch.Generator().manual_seed(0)

        def leaf(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            signs = torch.randint(0, 2, output.shape, generator=random).to(output) * 2 - 1
            made = (output * (1 + signs * nudge)).detach().requires_grad_()
            embedded.append((arguments[0], made))
            return made

        logprobs: list[Tensor] = []
        hook = self._embeddings.register_forward_hook(leaf)
        try:
            for forest in forests:
                with self._autocast():
                    output = self._model(**forest.inputs())
                values = forest.unpack(output.log_probs)
                values.sum().backward()
                for own, mask in zip(values.detach(), forest.mask, strict=True):
                    logprobs.append(own[mask])
        finally:
            hook.remove()
        trunk = torch.zeros(self._ids, self._embeddings.weight.shape[-1], device=self._device)
        for ids, vectors in embedded:
            own = ids < self._ids
            assert vectors.grad is not None
            trunk.index_add_(0, ids[own], vectors.grad[own].float())
        weights = []
        for weight in self._watched:
            gradient = weight.grad
            if gradient is None:
                gradient = torch.zeros_like(weight)
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            weights.append(gradient.float().cpu())
        self._model.zero_grad(set_to_none=True)
        return _Seen(logprobs, trunk, weights)


def _rows(config: Any, ids: int) -> list[TraceRow]:
    """Return rows: three begin with a trunk, whose tokens are below `ids`, and no others are.

    The trunk's own tokens are not scored. So the gradient of its embeddings comes from later tokens
    alone.
    """
    random = np.random.default_rng(0)
    window = getattr(config, "sliding_window", None) or 0
    padding = getattr(config, "pad_token_id", None)

    def draw(low: int, high: int, number: int) -> NDArray[np.int32]:
        drawn = random.integers(low, high, number).astype(np.int32)
        # its embedding may be zeros, whose gradient through a norm is larger than all others
        drawn[drawn == padding] = low + (padding == low)
        return drawn

    def others(number: int) -> NDArray[np.int32]:
        return draw(ids, config.vocab_size, number)

    trunk = draw(0, ids, TRUNK + min(window, LONGEST_WINDOW))
    long, short = (np.append(trunk, others(number)) for number in BRANCHES)
    twig = np.append(long[: len(trunk) + BRANCHES[0] // 2], others(TWIG))
    rows = [TraceRow(others(ALONE), np.arange(1, ALONE))]
    for path in (long, short, twig):
        rows.append(TraceRow(path, np.arange(len(trunk) + 1, len(path))))
    return rows
