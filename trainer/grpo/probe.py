"""Finds out whether segments give a model's own scores and gradients.

Models differ in what they keep of earlier tokens, and a cache may cut the gradient without an error. So a trunk of
random tokens and two branches are run as segments and compared with the plain forward pass of that very model.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor

from rolltap.trainer.grpo.rows import Row
from rolltap.trainer.grpo.segments import SegmentScorer

TOKENS_PER_SEGMENT = 128
TRUNK = 150
"""Tokens of the trunk, in two segments. It is longer by the size of a sliding window, up to `LONGEST_WINDOW`."""
LONGEST_WINDOW = 2048
BRANCHES = (37, 23)
"""Tokens of each branch. The shorter one has padding on its right."""
ALONE = 11
"""Tokens of a row that shares nothing. It runs beside the branches, with padding on its left."""

LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Root mean square of the difference of log-probabilities in nats, by the type that the model computes in."""
GRADIENT_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.3}
"""Norm of the difference of the gradients, relative to theirs. A cache that cuts the gradient is off by 1."""


def probe(
    model: Any, autocast: Callable[[], AbstractContextManager[Any]], *, offload_states: bool = False
) -> str | None:
    """Return None if segments agree with the plain forward pass of `model`, or the reason why they must not be used.

    `model` may be wrapped for several processes, and by PEFT. `autocast` makes the context of mixed precision. The
    model, the gradients of its parameters and the random numbers are as before afterwards. Takes two forward and
    backward passes of a few hundred tokens, and of a sliding window. An error of the model is a reason.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    try:
        with _frozen(model), torch.enable_grad():
            return _difference(model, autocast, offload_states)
    except Exception as error:  # a model's own code may raise anything
        return f"{type(error).__name__}: {error}"


def _difference(model: Any, autocast: Callable[[], AbstractContextManager[Any]], offload: bool) -> str | None:
    rows, trunk = _rows(model.config.get_text_config(decoder=True))
    scorer = SegmentScorer(autocast, 1.0, tokens_per_segment=TOKENS_PER_SEGMENT, offload_states=offload)
    embeddings = model.get_input_embeddings()
    with _leaves(embeddings) as found:
        logprobs = scorer(model, rows).logprobs
        logprobs.sum().backward()
    gradient = _gradient(found, trunk)
    with _leaves(embeddings) as found:
        with autocast():
            plain = torch.cat([_plain(model, row, embeddings.weight.device) for row in rows])
        plain.sum().backward()
    wanted = _gradient(found, trunk)

    with autocast():
        mixed = torch.is_autocast_enabled(plain.device.type)
        dtype = torch.get_autocast_dtype(plain.device.type) if mixed else embeddings.weight.dtype
    apart = float((logprobs - plain).detach().square().mean().sqrt())
    if not apart <= LOGPROB_TOLERANCE[dtype]:
        return f"log-probabilities differ by {apart:.2g} from those of the plain forward pass, in {dtype}"
    apart = float((gradient - wanted).norm() / wanted.norm())
    if not apart <= GRADIENT_TOLERANCE[dtype]:
        return f"the gradient through earlier tokens differs by {apart:.0%} from that of the plain pass, in {dtype}"
    return None


def _rows(config: Any) -> tuple[list[Row], Tensor]:
    """Return rows, and the trunk's ids (n,): two rows begin with it, and none has one of its ids elsewhere.

    The trunk's own tokens are not scored. So the gradient of its embeddings comes through the cache alone.
    """
    random = np.random.default_rng(0)
    window = getattr(config, "sliding_window", None) or 0
    half = config.vocab_size // 2
    trunk = random.integers(0, half, TRUNK + min(window, LONGEST_WINDOW)).astype(np.int32)
    rows = []
    for n in BRANCHES:
        ids = np.concatenate([trunk, random.integers(half, config.vocab_size, n).astype(np.int32)])
        rows.append(Row(ids, np.arange(len(trunk) + 1, len(ids))))
    alone = random.integers(half, config.vocab_size, ALONE).astype(np.int32)
    return [*rows, Row(alone, np.arange(1, ALONE))], torch.from_numpy(trunk).long()


def _plain(model: Any, row: Row, device: torch.device) -> Tensor:
    ids, scored = torch.from_numpy(row.ids).long().to(device), torch.from_numpy(row.scored).to(device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1)[scored - 1, ids[scored]]


@contextmanager
def _leaves(embeddings: Any) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Make leaf tensors of all input embeddings. Yields a list of their (ids (B, n), embeddings (B, n, H)), which
    grows."""
    found: list[tuple[Tensor, Tensor]] = []

    def leaf(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
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
def _frozen(model: Any) -> Iterator[None]:
    """Turn off the parameters' gradients, of which only the embeddings' are looked at, and dropout."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    for parameter in trained:
        parameter.requires_grad_(False)
    model.eval()
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()
        for module in training:
            module.training = True
