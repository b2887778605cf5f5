"""Scores any set of rows as segments of their prefix forest: each shared token is computed once, at any length."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rolltap.trainer.grpo.decoder import Decoder
from rolltap.trainer.grpo.forest import own_tokens
from rolltap.trainer.grpo.passes import Grove
from rolltap.trainer.grpo.rows import Row
from rolltap.trainer.grpo.scoring import Scores


class _TwoPasses(torch.autograd.Function):
    """A grove's log-probabilities and entropies. Its backward pass adds to the parameters' `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, grove: Grove, keep: bool) -> tuple[Tensor, Tensor]:
        # `hook` requires a gradient, so that backward is called
        scores, ctx.states = grove.score(keep=keep)
        ctx.grove = grove
        ctx.mark_non_differentiable(scores.entropies)
        return scores.logprobs, scores.entropies

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[None, None, None]:
        with ctx.grove.decoder.prepared():
            ctx.grove.backward(ctx.states or ctx.grove.states(), gradient)
        return None, None, None


class SegmentScorer:
    """Runs rows as segments of their prefix forest. See `rolltap.trainer.grpo.scoring.Scorer`."""

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[Any]],
        temperature: float,
        *,
        tokens_per_segment: int,
        keep_graph: bool = False,
        offload_states: bool = False,
        tokens_in_memory: int | None = None,
    ) -> None:
        """Without `keep_graph` there are two passes, and the backward pass adds to the parameters' `.grad` itself.

        - `autocast`: makes the context of mixed precision, such as `Accelerator.autocast`.
        - `temperature`: divides the logits.
        - `tokens_per_segment`: bounds a segment and a batch of them, padding included, and so the activations.
        - `keep_graph`: one pass, whose activations are kept until the backward pass, as in any other model call.
        - `offload_states`: states rest in pinned memory of the CPU.
        - `tokens_in_memory`: rows with more tokens of their own than this are run in several parts, one after another.
          Only the states of one are kept, and the backward pass computes them again.
        """
        self._autocast, self._temperature = autocast, temperature
        self._keep_graph, self._offload = keep_graph, offload_states
        self.tokens_per_segment = tokens_per_segment
        self.tokens_in_memory = tokens_in_memory
        self.forwarded = 0

    def __call__(self, model: Any, rows: Sequence[Row]) -> Scores:
        """Return the scores of all rows. `model` may be wrapped for several processes, and by PEFT.

        Raises `InputError` for a model with layers whose states are not known.
        """
        decoder = Decoder(model, self._temperature, self._autocast)
        parts = [part for part in split_rows(rows, self.tokens_in_memory) if any(len(row.scored) for row in part)]
        groves = [Grove(decoder, part, self.tokens_per_segment, offload=self._offload) for part in parts]
        self.forwarded = sum(grove.forwarded for grove in groves)
        hook = torch.zeros(0, device=decoder.device, requires_grad=torch.is_grad_enabled())
        found = [Scores(hook.clone(), hook.detach())]
        with decoder.prepared(), decoder.autocast():
            for grove in groves:
                if hook.requires_grad and not self._keep_graph:
                    scores = _TwoPasses.apply(hook, grove, len(groves) == 1)  # type: ignore[no-untyped-call]
                    found.append(Scores(*scores))
                else:
                    found.append(grove.score(keep=False)[0])
        return Scores(*(torch.cat(values) for values in zip(*found, strict=True)))


def split_rows(rows: Sequence[Row], tokens: int | None) -> list[list[Row]]:
    """Split rows, in their order, into parts of at most `tokens` tokens, or one row.

    Tokens that a row shares with the row before it in its part count once.
    """
    parts: list[list[Row]] = []
    used = 0
    for row, own in zip(rows, own_tokens(rows), strict=True):
        if parts and (tokens is None or used + own <= tokens):
            parts[-1].append(row)
            used += own
        else:
            parts.append([row])
            used = len(row.ids)
    return parts
