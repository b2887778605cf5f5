"""A generation batch on its way to the loss: its rows, which sessions have a signal, their weights, their process."""

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import Trace, TraceBatch
from rolltap.trainer.training.forward.forest import Row, own_tokens, packed, stretches
from rolltap.trainer.training.grpo.advantages import GROUP, rewards_by, rewards_differ
from rolltap.trainer.training.grpo.metrics import KINDS

LEAST_LOGPROB = -40.0
"""Smallest log-probability of the engine that the loss sees: the exponential of a larger difference is infinite in
float32, and its gradient is NaN. No token is sampled with a smaller one."""


def rows_of_step(step: int, num_rows: int, rows_per_step: int, *, seed: int, shuffle: bool = True) -> list[int]:
    """Return the indices of the `rows_per_step` rows of generation step `step`, counted from 0. They are all different.

    The rows are passed over again and again, each time in an order of its own; without `shuffle` in theirs. In a step
    that ends one pass and begins the next, the rows that it has already are at the end of the next pass.
    """
    passes = rows_per_step // math.gcd(num_rows, rows_per_step)  # they fill whole steps
    period, place = divmod(step, passes * num_rows // rows_per_step)
    end = (place + 1) * rows_per_step
    taken: list[int] = []
    for number in range(period * passes, (period + 1) * passes):
        order = list(range(num_rows))
        if shuffle:
            random.Random(f"{seed}/{number}").shuffle(order)
        first = set(taken[len(taken) - len(taken) % rows_per_step :])
        taken += sorted(order, key=lambda row, first=first: row in first)  # type: ignore[misc]
        if len(taken) >= end:
            break
    return taken[end - rows_per_step : end]


def with_signal(batch: TraceBatch, *, teacher: bool = False) -> TraceBatch:
    """Return the batch without the traces of groups without signal (`rewards_differ`), left out as `no_signal`.

    With a `teacher` every group has one. All rewards stay. Raises `InputError` for a trace whose session has no reward.
    """
    if unrewarded := {trace.session_id for trace in batch.traces} - batch.rewards.keys():
        raise InputError(f"sessions without a reward must be left out, but these have traces: {sorted(unrewarded)}")
    groups = rewards_by(GROUP, batch.rewards.values())
    equal = {group for group, rewards in groups.items() if not (teacher or rewards_differ(rewards))}
    silent = {name for name, label in batch.rewards.items() if label.group_id in equal}
    kept = [trace for trace in batch.traces if trace.session_id not in silent]
    dropped = sum(tokens_by_session(batch.traces).values()) - sum(tokens_by_session(kept).values())
    ledger = batch.ledger.leave_out("no_signal", dropped) if batch.ledger.sampled else batch.ledger
    accounts = {name: own.leave_out("no_signal") if name in silent else own for name, own in batch.accounts.items()}
    return replace(batch, traces=kept, ledger=ledger, accounts=accounts)


def why_skipped(batch: TraceBatch, mismatch: str) -> str:
    """Return why no token of a batch has a gradient: the first of the causes that leave none."""
    if not tokens_by_session(batch.traces):
        return "its sessions have no token to train on"
    if not tokens_by_session(with_signal(batch).traces):
        return "all rewards of each group are equal"
    return "mismatch=mask left no token" if mismatch == "mask" else "its tokens are of sessions with advantage 0"


def tokens_by_session(traces: Sequence[Trace]) -> dict[str, int]:
    """Return the number of trained tokens of each session that has any."""
    tokens: Counter[str] = Counter()
    for trace in traces:
        tokens[trace.session_id] += trace.completion_mask.count(1)
    return {session: count for session, count in tokens.items() if count}


def session_weights(tokens: Mapping[str, int], normalise: str, constant: int) -> dict[str, float]:
    """Return the factor of each session's advantages, for a loss that is the mean over all N tokens of S sessions.

    `tokens` are the numbers n of trained tokens of the sessions, each at least 1.

    - `tokens`: 1. Each token counts the same: sum over tokens / N.
    - `sessions`: N / (S * n). Each session counts the same: mean over sessions of the mean over their tokens.
    - `constant`: N / (S * `constant`). The loss is sum over tokens / (S * `constant`), as Dr. GRPO
      (arXiv 2503.20783) divides by a constant length.

    The clipped loss of a token with a positive factor on its advantage is that factor times its clipped loss, so
    weights of sessions are weights of losses.
    """
    total, sessions = sum(tokens.values()), len(tokens)
    if normalise == "tokens":
        return dict.fromkeys(tokens, 1.0)
    if normalise == "sessions":
        return {session: total / (sessions * count) for session, count in tokens.items()}
    return dict.fromkeys(tokens, total / (sessions * constant))


def spread_by_length(rows: Sequence[Row], parts: int) -> list[list[int]]:
    """Split rows into `parts` lists of indices of nearly equal size, from long to short: so the padding is small, and a
    batch that does not fit into memory fails at once."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids), reverse=True)
    bounds = np.linspace(0, len(rows), parts + 1).round().astype(int)
    return [order[start:end] for start, end in pairwise(bounds)]


def spread_by_prefix(rows: Sequence[Row], parts: int) -> list[list[int]]:
    """Split rows into `parts` lists of indices, some perhaps empty, such that shared prefixes stay together.

    In the order of their tokens (`packed`), rows with a common prefix are adjacent. That order is cut
    into stretches whose largest number of distinct tokens is the smallest possible. The largest
    stretch comes first. Takes O(total tokens).
    """
    order = sorted(range(len(rows)), key=[*map(packed, rows)].__getitem__)
    whole = [len(rows[i].ids) for i in order]
    new = own_tokens([rows[i] for i in order])
    least = range(max(whole, default=0), sum(new))
    size = least.start + bisect_left(least, True, key=lambda size: len(stretches(whole, new, size)) <= parts)
    found = stretches(whole, new, size)
    found.sort(key=lambda stretch: -whole[stretch[0]] - sum(new[k] for k in stretch[1:]))
    return [[order[k] for k in stretch] for stretch in found] + [[] for _ in range(parts - len(found))]


def token_kinds(trace: Trace) -> NDArray[np.int8]:
    """Return the index in `KINDS` of each token with mask 1, shape (n,); -1 where the trace does not say."""
    kinds = np.full(len(trace.completion_ids), -1, np.int8)
    for span in trace.continuity:
        kinds[span.start : span.end] = KINDS.index(span.kind)
    trained: NDArray[np.int8] = kinds[np.array(trace.completion_mask, bool)]
    return trained


def flatten(
    traces: Sequence[Trace], advantages: Mapping[str, float], weights: Mapping[str, float] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Return the N trained tokens of traces as one row (1, N), on the CPU: inputs of `GRPOTrainer._compute_loss`.

    Without a token N is 1, and the mask 0. The prompt has no meaning. `old_per_token_logps` are the engine's, at least
    `LEAST_LOGPROB`, and so are those of the teacher, of traces with scores. `weights` are those of sessions, by default
    1. `kinds` is for metrics (`token_kinds`).
    """
    masks = [np.array(trace.completion_mask, bool) for trace in traces]
    columns = [
        (
            *(np.array(each)[m] for each in (t.completion_ids, t.logprobs, t.scores or t.logprobs)),
            *(np.full(n, advantages[t.session_id]), np.full(n, weights.get(t.session_id, 1.0)), token_kinds(t)),
        )
        for t, m in zip(traces, masks, strict=True)
        if (n := m.sum())
    ]
    none = [(*[np.zeros(1)] * 5, np.full(1, -1))]
    ids, logprobs, scores, values, weighed, kinds = (
        torch.from_numpy(np.concatenate(column))[None] for column in zip(*columns or none, strict=True)
    )
    return {
        "prompt_ids": torch.zeros(1, 1, dtype=torch.long),
        "prompt_mask": torch.ones(1, 1, dtype=torch.long),
        "completion_ids": ids.long(),
        "completion_mask": torch.full(ids.shape, int(bool(columns))),
        "old_per_token_logps": logprobs.float().clamp(min=LEAST_LOGPROB),
        "teacher_per_token_logps": scores.float().clamp(min=LEAST_LOGPROB),
        "advantages": values.float(),
        "weights": weighed.float(),
        "kinds": kinds.to(torch.int8),
    }


def limited_weights(weights: Tensor, mismatch: Literal["truncate", "mask"], low: float, high: float) -> Tensor:
    """Return importance weights (trainer / engine) within `low` and `high`: set to the limit, or 0 outside of them."""
    if mismatch == "truncate":
        return weights.clamp(low, high)
    # not a product with 0: a weight may be infinite
    return weights.masked_fill((weights < low) | (weights > high), 0.0)
