"""Finds out whether packed rows give a model's own scores and gradients.

Models differ in how a token sees earlier ones, and layers that are not known mix branches without
an error. So a trunk of random tokens with branches is run as one packed row, and compared with each
row alone, in that very model.

In low precision no two ways to run a model agree. What they may differ by is measured: the rows run
again with their embeddings off by one unit in the last place, and with padding, which changes
kernels and their order of sums.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from rolltap.addons.errors import InputError
from rolltap.trainer.training.step.pack import UNSCORED, Pack, PaddedRows, Row

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


@dataclass(frozen=True)
class Measure:
    """A way to compare two passes."""

    name: str
    tolerance: float
    """By how much they may differ without the noise of low precision."""
    most: float
    """By how much they may differ however large the noise is. A gradient that is cut is off by
    1."""


MEASURES = (
    Measure("log-probabilities differ", 1e-3, np.inf),
    Measure("the gradient through earlier tokens differs", 0.01, 0.5),
    Measure("the gradient of the parameters differs", 0.01, 0.5),
)
"""Log-probabilities: root mean square of a row, in nats. Gradients: norm of the difference,
relative to their own."""

Seen = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""One way to run the rows: in the order of `MEASURES`, log-probabilities of each row, the gradient
of the trunk's embeddings, and gradients of some parameters."""


def probe(model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> str | None:
    """Return None if packed rows agree with plain ones in a prepared `model`, or the reason not to
    use them.

    The model may be wrapped. The model, the gradients of its parameters and the random numbers are
    as before afterwards. Takes a forward and backward pass of a packed row of a few hundred tokens
    and those of a sliding window, and two of each row alone. Collective with sharded weights: each
    process sees the gradients of its part, so a reason of one holds for all. An error of the model
    is a reason. Raises `InputError` if memory is short.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    try:
        with _untouched(model), torch.enable_grad():
            return _Probe(model, autocast).reason()
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"there is not enough memory to check that the model may run packed rows: a row of {TRUNK} to "
            f"{TRUNK + LONGEST_WINDOW} tokens does not fit. Free memory, train an adapter, or set forward to padded"
        ) from error
    except Exception as error:  # a model's own code may raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Probe:
    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model = model
        self._autocast = autocast
        self._dtype = torch.float32
        """In which the model computes."""
        self._embeddings = model.get_input_embeddings()
        self._device = self._embeddings.weight.device
        config = model.config.get_text_config(decoder=True)
        self._ids = min(TRUNK_IDS, config.vocab_size // 2)
        self._rows = _rows(config, self._ids)
        # matrices, which mixed precision casts, in the first and in the last layers
        own = {*self._embeddings.parameters()}
        if model.get_output_embeddings() is not None:
            own |= {*model.get_output_embeddings().parameters()}
        trained = [p for p in model.parameters() if p.requires_grad and p.ndim > 1 and p not in own]
        self._watched = [*trained[:2], *trained[2:][-2:]]

    def reason(self) -> str | None:
        """Return how packed rows differ from plain ones, if they do by more than the noise."""
        packed = self._seen([self._packed])
        plain = self._seen([partial(self._plain, row) for row in self._rows])
        again = self._seen(
            [partial(self._plain, row, padding=PADDING) for row in self._rows],
            nudge=torch.finfo(self._dtype).eps,
        )
        for i, measure in enumerate(MEASURES):
            found = _largest(packed[i], plain[i], mean=i == 0)
            noise = _largest(again[i], plain[i], mean=i == 0)
            # "not": what was found may be not a number
            if not found <= min(measure.tolerance + NOISE * noise, measure.most):
                return f"{measure.name} by {found:.2g} from plain rows, whose noise is {noise:.2g} in {self._dtype}"
        return None

    def _packed(self) -> list[Tensor]:
        pack = Pack([[row] for row in self._rows], self._device)
        with self._autocast():
            output = self._model(**pack.inputs())
        logprobs = pack.unpack(output.log_probs)
        return [own[: len(row.scored)] for own, row in zip(logprobs, self._rows, strict=True)]

    def _plain(self, row: Row, padding: int = 0) -> list[Tensor]:
        inputs = PaddedRows([[row]], self._device).inputs()
        inputs["input_ids"] = pad(inputs["input_ids"], (0, padding), value=int(row.ids[-1]))
        inputs["labels"] = pad(inputs["labels"], (0, padding), value=UNSCORED)
        with self._autocast():
            output = self._model(**inputs)
        return [output.log_probs[0, row.scored - 1]]

    def _seen(self, passes: Sequence[Callable[[], list[Tensor]]], nudge: float = 0.0) -> Seen:
        """Run each pass and its backward pass, with embeddings off by `nudge`."""
        trunk = torch.zeros(self._ids, self._embeddings.weight.shape[-1], device=self._device)
        random = torch.Generator().manual_seed(0)

        def leaf(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            def add(gradient: Tensor) -> None:
                own = arguments[0] < self._ids
                trunk.index_add_(0, arguments[0][own], gradient[own].float())

            kind = output.device.type
            self._dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else output.dtype
            signs = torch.randint(0, 2, output.shape, generator=random).to(output) * 2 - 1
            made = (output + output * signs * nudge).detach().requires_grad_()
            made.register_hook(add)
            return made

        logprobs: list[Tensor] = []
        hook = self._embeddings.register_forward_hook(leaf)
        try:
            for run in passes:
                found = run()
                torch.cat(found).sum().backward()
                logprobs += [own.detach() for own in found]
        finally:
            hook.remove()
        gradients = []
        for parameter in self._watched:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            gradients.append(local.float().cpu())
        self._model.zero_grad(set_to_none=True)
        return logprobs, [trunk], gradients


def _largest(found: list[Tensor], wanted: list[Tensor], *, mean: bool) -> float:
    """Return the largest difference: 0 of none, and not a number if one is none."""
    values = [torch.zeros(())]
    for a, b in zip(found, wanted, strict=True):
        # the gradient of half of a new adapter is zero
        size = len(b) ** 0.5 if mean else b.norm().clamp_min(torch.finfo(torch.float32).tiny)
        values.append(((a - b).norm() / size).cpu())
    return float(torch.stack(values).max())


def _rows(config: Any, ids: int) -> list[Row]:
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
        drawn[drawn == padding] = low + 1 if padding == low else low
        return drawn

    trunk = draw(0, ids, TRUNK + min(window, LONGEST_WINDOW))
    branches = [np.concatenate([trunk, draw(ids, config.vocab_size, number)]) for number in BRANCHES]
    fork = len(trunk) + BRANCHES[0] // 2
    twig = np.concatenate([branches[0][:fork], draw(ids, config.vocab_size, TWIG)])
    alone = draw(ids, config.vocab_size, ALONE)
    rows = [Row(ids, np.arange(len(trunk) + 1, len(ids))) for ids in (*branches, twig)]
    return [*rows, Row(alone, np.arange(1, ALONE))]


@contextmanager
def _untouched(model: Any) -> Iterator[None]:
    """Turn off dropout, and give each parameter its gradient back at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    training = [module for module in model.modules() if module.training]
    model.zero_grad(set_to_none=True)
    for module in training:
        # layers in training mode are computed again for the backward pass
        module.training = isinstance(module, GradientCheckpointingLayer)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module in training:
            module.training = True
