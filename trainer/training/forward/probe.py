"""Finds out whether segments give a model's own scores and gradients.

Models differ in what they keep of earlier tokens, and a cache may cut the gradient without an error. So a trunk of
random tokens and two branches are run as segments and compared with the plain forward pass of that very model.

In low precision no two ways to run a model agree. What they may differ by is measured: the plain pass runs again with
its embeddings off by one unit in the last place, and with padding, which changes kernels and their order of sums.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
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

NOISE = 4.0
"""Differences may be this many times the noise, besides the tolerances. In bfloat16 on a CPU they are a quarter of it
for models of 2 layers, and up to two thirds for 24. Experts that are chosen differently may make them as large."""
LOGPROB_TOLERANCE = 1e-3
"""Root mean square of a row's differences of log-probabilities, in nats, without the noise of low precision."""
GRADIENT_TOLERANCE = 0.01
"""Norm of the difference of a gradient, relative to its own, without the noise of low precision. A gradient that a
cache cuts is off by 1."""
MOST_GRADIENT = 0.5
"""A gradient may not differ by more than this, however large the noise is."""


def probe(
    model: Any,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    keep_graph: bool = False,
    offload_states: bool = False,
) -> str | None:
    """Return None if segments agree with the plain forward pass of `model`, or the reason why they must not be used.

    `model` may be wrapped for several processes, and by PEFT. `autocast` makes the context of mixed precision. With
    `keep_graph` one pass is checked, otherwise two (see `SegmentScorer`). The model, the gradients of its parameters
    and the random numbers are as before afterwards. Takes three forward and backward passes of three rows, one row at
    a time where they are plain. The longest has a few hundred tokens, and those of a sliding window. An error of the
    model is a reason. Raises `InputError` if memory is short.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    try:
        with _untouched(model), torch.enable_grad():
            return _changing_positions(model) or _Probe(model, autocast).reason(keep_graph, offload_states)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"there is not enough memory to check that the model may run as segments: the backward pass of one row of "
            f"{TRUNK} to {TRUNK + LONGEST_WINDOW} tokens does not fit. Free memory on the device, train an adapter, or "
            "set forward to padded, which does not check it"
        ) from error
    except Exception as error:  # a model's own code may raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _changing_positions(model: Any) -> str | None:
    """Return a reason if the rotary factors of a token depend on the longest position of the call that it is in.

    Short rows do not show it, and the factors of a whole row are not those of its first segments.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for one in (rope, *rope.values()):  # some models have a table for each type of layer
        kind = str(one.get("rope_type") or one.get("type")) if isinstance(one, dict) else ""
        if kind == "longrope" or "dynamic" in kind:
            return f"rotary positions of the type {kind} depend on the length of the whole row"
    return None


class _Seen(NamedTuple):
    """One way to run the rows."""

    logprobs: list[Tensor]
    """Of each row."""
    trunk: Tensor
    """Gradient of the trunk's embeddings, (ids, H)."""
    parameters: list[Tensor]
    """Gradients of the parameters that are looked at."""


class _Apart(NamedTuple):
    """The largest differences of two ways."""

    logprobs: float
    trunk: float
    parameters: float


class _Probe:
    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._autocast = model, autocast
        self._decoder = Decoder(model, 1.0, autocast)
        self._embeddings = model.get_input_embeddings()
        self._rows, self._trunk = _rows(model.config.get_text_config(decoder=True))
        # matrices, which mixed precision casts, in the first and in the last layers
        hidden = {id(parameter) for parameter in self._embeddings.parameters()}
        matrices = [
            p for p in self._decoder.body.parameters() if p.requires_grad and p.ndim > 1 and id(p) not in hidden
        ]
        self._watched = [*matrices[:2], *matrices[2:][-2:]]

    def reason(self, keep_graph: bool, offload: bool) -> str | None:
        """Return how segments differ from the plain pass, if they do by more than the noise."""
        with self._autocast():
            device = self._decoder.device.type
            dtype = self._embeddings.weight.dtype
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
        options: dict[str, Any] = {"keep_graph": keep_graph, "offload_states": offload}
        scorer = SegmentScorer(self._autocast, 1.0, tokens_per_segment=TOKENS_PER_SEGMENT, **options)
        segments = self._seen(scorer(self._model, rows).logprobs for rows in [self._rows])
        plain = self._seen(self._plain(row, 0) for row in self._rows)
        again = self._seen((self._plain(row, PADDING) for row in self._rows), nudge=torch.finfo(dtype).eps)
        apart, noise = _apart(segments, plain), _apart(again, plain)
        if not apart.logprobs <= LOGPROB_TOLERANCE + NOISE * noise.logprobs:
            what = f"log-probabilities differ by {apart.logprobs:.2g}"
            return f"{what} from those of the plain forward pass, whose noise is {noise.logprobs:.2g} in {dtype}"
        for name in ("trunk", "parameters"):
            found, usual = getattr(apart, name), getattr(noise, name)
            if not found <= min(GRADIENT_TOLERANCE + NOISE * usual, MOST_GRADIENT):
                what = "the gradient through earlier tokens" if name == "trunk" else "the gradient of the parameters"
                return (
                    f"{what} differs by {found:.0%} from that of the plain pass, whose noise is {usual:.0%} in {dtype}"
                )
        return None

    def _seen(self, parts: Iterable[Tensor], nudge: float = 0.0) -> _Seen:
        """Run each part's backward pass before the next part's forward pass."""
        logprobs = []
        with _leaves(self._embeddings, nudge) as found:
            for part in parts:
                part.sum().backward()
                logprobs.append(part.detach())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._watched]
        self._model.zero_grad(set_to_none=True)
        lengths = [len(row.scored) for row in self._rows]
        return _Seen(
            list(torch.cat(logprobs).split(lengths)),
            _gradient(found, self._trunk),
            [g.float().cpu() for g in gradients],
        )

    def _plain(self, row: Row, padding: int) -> Tensor:
        ids, scored = (self._decoder.tensor(array.astype(np.int64)) for array in (row.ids, row.scored))
        options: dict[str, Any] = {}
        at = scored - 1
        if "logits_to_keep" in inspect.signature(self._decoder.model.forward).parameters:
            options["logits_to_keep"], at = at, torch.arange(len(scored), device=ids.device)
        with self._decoder.autocast():
            output = self._model(input_ids=torch.cat([ids, ids[:padding]])[None], use_cache=False, **options)
        return torch.log_softmax(output.logits[0, at].float(), -1).gather(1, ids[scored][:, None])[:, 0]


def _apart(found: _Seen, wanted: _Seen) -> _Apart:
    rows = zip(found.logprobs, wanted.logprobs, strict=True)
    parameters = zip(found.parameters, wanted.parameters, strict=True)
    return _Apart(
        _largest((a - b).square().mean().sqrt() for a, b in rows),
        _largest([_relative(found.trunk, wanted.trunk)]),
        _largest(_relative(a, b) for a, b in parameters),
    )


def _largest(values: Iterable[Tensor]) -> float:
    """Return the largest value: 0 of none, and not a number if one is none."""
    return float(torch.stack([torch.zeros(()), *(value.cpu() for value in values)]).max())


def _relative(found: Tensor, wanted: Tensor) -> Tensor:
    # the gradient of half of a new adapter is zero
    apart: Tensor = (found - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return apart


def _rows(config: Any) -> tuple[list[Row], Tensor]:
    """Return rows, and the trunk's ids (n,): two rows begin with it, and none has one of its ids elsewhere.

    The trunk's own tokens are not scored. So the gradient of its embeddings comes through the cache alone.
    """
    random = np.random.default_rng(0)
    window = getattr(config, "sliding_window", None) or 0
    half = config.vocab_size // 2
    padding = getattr(config, "pad_token_id", None)

    def draw(low: int, high: int, n: int) -> NDArray[np.int32]:
        ids = random.integers(low, high, n).astype(np.int32)
        # its embedding may be zeros, whose gradient through a norm is larger than all others, and than float16 has
        ids[ids == padding] = low + 1 if padding == low else low
        return ids

    trunk = draw(0, half, TRUNK + min(window, LONGEST_WINDOW))
    rows = []
    for n in BRANCHES:
        ids = np.concatenate([trunk, draw(half, config.vocab_size, n)])
        rows.append(Row(ids, np.arange(len(trunk) + 1, len(ids))))
    alone = draw(half, config.vocab_size, ALONE)
    return [*rows, Row(alone, np.arange(1, ALONE))], torch.from_numpy(trunk).long()


@contextmanager
def _leaves(embeddings: Any, nudge: float) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Make leaf tensors of all input embeddings, each larger or smaller by the part `nudge`.

    Yields a list of their (ids (B, n), embeddings (B, n, H)), which grows.
    """
    found: list[tuple[Tensor, Tensor]] = []
    random = torch.Generator().manual_seed(0)

    def leaf(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if nudge:
            signs = torch.randint(0, 2, output.shape, generator=random).to(output) * 2 - 1
            output = output + output * signs * nudge
        found.append((arguments[0], output.detach().requires_grad_()))
        return found[-1][1]

    hook = embeddings.register_forward_hook(leaf)
    try:
        yield found
    finally:
        hook.remove()


def _gradient(found: list[tuple[Tensor, Tensor]], trunk: Tensor) -> Tensor:
    """Return the gradients of the embeddings of the trunk's ids, (ids, H) float32, however they were run."""
    known = torch.unique(trunk).to(found[0][0].device)
    total = torch.zeros(len(known), found[0][1].shape[-1], device=known.device)
    for ids, leaf in found:
        if leaf.grad is not None:
            own = torch.isin(ids, known)
            total.index_add_(0, torch.searchsorted(known, ids[own]), leaf.grad[own].float())
    return total


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
