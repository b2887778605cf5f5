"""Finds out whether segments give a model's own scores and gradients.

Models differ in what they keep of earlier tokens, and a cache may cut the gradient without an error. So a trunk of
random tokens and two branches are run as segments and compared with the plain forward pass of that very model.

In low precision no two ways to run a model agree. What they may differ by is measured: the plain pass runs again with
its embeddings off by one unit in the last place, and with padding, which changes kernels and their order of sums.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.addons.errors import InputError
from rolltap.trainer.training.forward.decoder import Decoder
from rolltap.trainer.training.forward.forest import Row
from rolltap.trainer.training.forward.passes import SegmentScorer

TOKENS_PER_SEGMENT = 128
TRUNK = 150
"""Tokens of the trunk, in two segments. It is longer by the size of a sliding window, up to `LONGEST_WINDOW`."""
LONGEST_WINDOW = 1024
BRANCHES = (37, 23)
"""Tokens of each branch. The shorter one has padding on its right."""
ALONE = 11
"""Tokens of a row that shares nothing. It runs beside the branches, with padding on its left."""
PADDING = 32
"""Tokens on the right of a row when the noise is measured."""
TRUNK_IDS = 1024
"""Ids that the trunk's tokens are of, or half of a smaller vocabulary. No other token has one of them."""

NOISE = 4.0
"""Differences may be this many times the noise, besides the tolerances. In bfloat16 on a CPU they are a quarter of it
for models of 2 layers, and up to two thirds for 24. Experts that are chosen differently may make them as large."""
TOLERANCES = {
    "log-probabilities differ": (1e-3, np.inf),
    "the gradient through earlier tokens differs": (0.01, 0.5),
    "the gradient of the parameters differs": (0.01, 0.5),
}
"""Differences -> by how much it may without the noise of low precision, and however large the noise is.

Log-probabilities: root mean square of a row, in nats. Gradients: norm of the difference, relative to their own. One
that a cache cuts is off by 1."""
_Seen = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""One way to run the rows: in the order of `TOLERANCES`, log-probabilities of each row, the gradient of the trunk's
embeddings, and gradients of some parameters."""


def probe(model: Any, autocast: Callable[[], AbstractContextManager[Any]], **options: Any) -> str | None:
    """Return None if segments agree with the plain forward pass of `model`, or the reason why they must not be used.

    `options` are those of `SegmentScorer`. The model, the gradients of its parameters and the random numbers are as
    before afterwards. Takes three forward and backward passes of three rows, of a few hundred tokens and those of a
    sliding window. An error of the model is a reason. Raises `InputError` if memory is short.
    """
    try:
        with _untouched(model), torch.enable_grad():
            return _Probe(model, autocast).reason(**options)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"there is not enough memory to check that the model may run as segments: one row of {TRUNK} to "
            f"{TRUNK + LONGEST_WINDOW} tokens does not fit. Free memory, train an adapter, or set forward to padded"
        ) from error
    except Exception as error:  # a model's own code may raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Probe:
    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._decoder = model, Decoder(model, 1.0, autocast)
        self._embeddings = model.get_input_embeddings()
        config = model.config.get_text_config(decoder=True)
        self._ids = min(TRUNK_IDS, config.vocab_size // 2)
        self._rows = _rows(config, self._ids)
        # matrices, which mixed precision casts, in the first and in the last layers
        body, own = self._decoder.body.parameters(), {*self._embeddings.parameters()}
        matrices = [p for p in body if p.requires_grad and p.ndim > 1 and p not in own]
        self._watched = [*matrices[:2], *matrices[2:][-2:]]

    def reason(self, **options: Any) -> str | None:
        """Return how segments differ from the plain pass, if they do by more than the noise."""
        with torch.no_grad(), self._decoder.autocast():
            dtype = (self._embeddings.weight[:1] @ self._embeddings.weight[:1].T).dtype
        scorer = SegmentScorer(self._decoder.autocast, 1.0, tokens_per_segment=TOKENS_PER_SEGMENT, **options)
        segments = self._seen(scorer(self._model, rows).logprobs for rows in [self._rows])
        plain = self._seen(self._plain(row, 0) for row in self._rows)
        again = self._seen((self._plain(row, PADDING) for row in self._rows), nudge=torch.finfo(dtype).eps)
        for i, (what, (tolerance, most)) in enumerate(TOLERANCES.items()):
            found, noise = (_largest(way[i], plain[i], mean=not i) for way in (segments, again))
            if not found <= min(tolerance + NOISE * noise, most):
                return f"{what} by {found:.2g} from the plain forward pass, whose noise is {noise:.2g} in {dtype}"
        return None

    def _seen(self, parts: Iterable[Tensor], nudge: float = 0.0) -> _Seen:
        """Run each part's backward pass before the next part's forward pass, with embeddings off by `nudge`."""
        trunk = torch.zeros(self._ids, self._embeddings.weight.shape[-1], device=self._decoder.device)
        random = torch.Generator().manual_seed(0)

        def leaf(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            def add(gradient: Tensor) -> None:
                own = arguments[0] < self._ids
                trunk.index_add_(0, arguments[0][own], gradient[own].float())

            signs = torch.randint(0, 2, output.shape, generator=random).to(output) * 2 - 1
            made = (output + output * signs * nudge).detach().requires_grad_()
            made.register_hook(add)
            return made

        logprobs = []
        hook = self._embeddings.register_forward_hook(leaf)
        try:
            for part in parts:
                part.sum().backward()
                logprobs.append(part.detach())
        finally:
            hook.remove()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._watched]
        self._model.zero_grad(set_to_none=True)
        rows = torch.cat(logprobs).split([len(row.scored) for row in self._rows])
        return [*rows], [trunk], [getattr(g, "to_local", lambda g=g: g)().float().cpu() for g in gradients]

    def _plain(self, row: Row, padding: int) -> Tensor:
        ids, scored = (self._decoder.tensor(array.astype(np.int64)) for array in (row.ids, row.scored))
        options: dict[str, Any] = {}
        at = scored - 1
        if "logits_to_keep" in inspect.signature(self._decoder.model.forward).parameters:
            options["logits_to_keep"], at = at, torch.arange(len(scored), device=ids.device)
        with self._decoder.autocast():
            output = self._model(input_ids=torch.cat([ids, ids[:padding]])[None], use_cache=False, **options)
        return torch.log_softmax(output.logits[0, at].float(), -1).gather(1, ids[scored][:, None])[:, 0]


def _largest(found: list[Tensor], wanted: list[Tensor], *, mean: bool) -> float:
    """Return the largest difference: 0 of none, and not a number if one is none."""
    values = [torch.zeros(())]
    for a, b in zip(found, wanted, strict=True):
        # the gradient of half of a new adapter is zero
        size = len(b) ** 0.5 if mean else b.norm().clamp_min(torch.finfo(torch.float32).tiny)
        values.append(((a - b).norm() / size).cpu())
    return float(torch.stack(values).max())


def _rows(config: Any, ids: int) -> list[Row]:
    """Return rows: two begin with a trunk, whose tokens are below `ids`, and no others are.

    The trunk's own tokens are not scored. So the gradient of its embeddings comes through the cache alone.
    """
    random = np.random.default_rng(0)
    window = getattr(config, "sliding_window", None) or 0
    padding = getattr(config, "pad_token_id", None)

    def draw(low: int, high: int, n: int) -> NDArray[np.int32]:
        drawn = random.integers(low, high, n).astype(np.int32)
        # its embedding may be zeros, whose gradient through a norm is larger than all others
        drawn[drawn == padding] = low + 1 if padding == low else low
        return drawn

    trunk = draw(0, ids, TRUNK + min(window, LONGEST_WINDOW))
    branches = [np.concatenate([trunk, draw(ids, config.vocab_size, n)]) for n in BRANCHES]
    alone = draw(ids, config.vocab_size, ALONE)
    return [*(Row(row, np.arange(len(trunk) + 1, len(row))) for row in branches), Row(alone, np.arange(1, ALONE))]


@contextmanager
def _untouched(model: Any) -> Iterator[None]:
    """Turn off dropout, and give each parameter its gradient back at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    training = [module for module in model.modules() if module.training]
    model.zero_grad(set_to_none=True)
    model.eval()
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module in training:
            module.training = True
