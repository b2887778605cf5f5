"""A generation batch on its way to the loss: which sessions have a signal, and the micro-batch and process of each."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.addons.errors import InputError, LedgerError
from rolltap.trainer.traces.build import Trace, TraceBatch
from rolltap.trainer.traces.tokens import TOKEN_BYTES, common_length
from rolltap.trainer.training.step.advantages import GROUP, rewards_by, rewards_differ
from rolltap.trainer.training.step.metrics import KINDS
from rolltap.trainer.training.step.pack import Row, trace_row

LEAST_LOGPROB = -40.0
"""Smallest log-probability of the engine that the loss sees: the exponential of a larger difference is infinite in
float32, and its gradient is NaN. No token is sampled with a smaller one."""

MEAN_OF_SESSIONS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses of TRL that are a mean over the rows of a micro-batch. `bnpo` is one over its tokens. The others divide by the
tokens of the whole batch. Source: TRL 1.16, `GRPOTrainer._compute_loss`."""


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """A session as the loss sees it. Its n trained tokens are those of its traces, one after another."""

    rows: list[Row]
    traces: list[int]
    """Index of each row's trace in the batch."""
    logprobs: NDArray[np.float32]
    """The engine's log-probabilities, at least `LEAST_LOGPROB`, shape (n,)."""
    scores: NDArray[np.float32] | None
    """The teacher's, likewise; None without one."""
    kinds: NDArray[np.int8]
    """Index in `KINDS` of each token's call, shape (n,); -1 where the trace does not say. For metrics."""
    advantage: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The sessions of a micro-batch on one process."""

    sessions: list[SessionTokens]
    size: int
    """Rows B of its tensors: the most sessions of any process, because TRL gathers values of rows."""
    tokens: int
    """Trained tokens of all processes in this micro-batch."""
    weight: float
    """Weight of the micro-batch's loss (`loss_weight`)."""

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return inputs of `GRPOTrainer._compute_loss`. Tokens are (B, S), where S is the most tokens of a session.

        The ids have no meaning: the log-probabilities come from the rows.
        """
        lengths = [len(session.logprobs) for session in self.sessions]
        shape = (self.size, max([1, *lengths]))
        logprobs = torch.zeros(shape)
        scores = torch.zeros(shape)
        mask = torch.zeros(shape, dtype=torch.long)
        kinds = torch.full(shape, -1, dtype=torch.int8)
        advantages = torch.zeros(self.size)
        for i, session in enumerate(self.sessions):
            mask[i, : lengths[i]] = 1
            logprobs[i, : lengths[i]] = torch.from_numpy(session.logprobs)
            kinds[i, : lengths[i]] = torch.from_numpy(session.kinds)
            advantages[i] = session.advantage
            if session.scores is not None:
                scores[i, : lengths[i]] = torch.from_numpy(session.scores)
        values = {
            "prompt_ids": torch.zeros(self.size, 1, dtype=torch.long),
            "prompt_mask": torch.ones(self.size, 1, dtype=torch.long),
            "completion_ids": torch.zeros(shape, dtype=torch.long),
            "completion_mask": mask,
            "old_per_token_logps": logprobs,
            "sampling_per_token_logps": logprobs,
            "teacher_per_token_logps": scores,
            "advantages": advantages,
            "kinds": kinds,
        }
        return {name: value.to(device) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class ProcessBatch:
    """A process's part of a generation batch."""

    micro_batches: list[MicroBatch]
    tokens: int
    """Trained tokens of all processes, those without a gradient included; at least 1."""
    trains: bool
    """True if any token of any process has a gradient."""
    on_policy: bool


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
        taken += [row for row in order if row not in first]
        taken += [row for row in order if row in first]
        if len(taken) >= end:
            break
    return taken[end - rows_per_step : end]


def with_signal(batch: TraceBatch, *, every: bool = False) -> TraceBatch:
    """Return the batch without the traces of groups without signal (`rewards_differ`), left out as `no_signal`.

    With `every`, each group has one, as with a teacher. All rewards stay. Raises `InputError` for a trace whose session
    has no reward.
    """
    if unrewarded := {trace.session_id for trace in batch.traces} - batch.rewards.keys():
        raise InputError(f"sessions without a reward must be left out, but these have traces: {sorted(unrewarded)}")
    equal = set[str]()
    for group, rewards in rewards_by(GROUP, batch.rewards.values()).items():
        if not every and not rewards_differ(rewards):
            equal.add(group)
    silent = {name for name, label in batch.rewards.items() if label.group_id in equal}
    kept = [trace for trace in batch.traces if trace.session_id not in silent]
    dropped = sum(tokens_by_session(batch.traces).values()) - sum(tokens_by_session(kept).values())
    ledger = batch.ledger
    if ledger.sampled:
        ledger = ledger.leave_out("no_signal", dropped)
    accounts = dict(batch.accounts)
    for name in accounts.keys() & silent:
        accounts[name] = accounts[name].leave_out("no_signal")
    return replace(batch, traces=kept, ledger=ledger, accounts=accounts)


def why_skipped(batch: TraceBatch) -> str:
    """Return why no token of a batch has a gradient: the first of the causes that leave none."""
    if not tokens_by_session(batch.traces):
        return "its sessions have no token to train on"
    if not tokens_by_session(with_signal(batch).traces):
        return "all rewards of each group are equal"
    return "its tokens are of sessions with advantage 0"


def tokens_by_session(traces: Sequence[Trace]) -> dict[str, int]:
    """Return the number of trained tokens of each session that has any."""
    tokens: Counter[str] = Counter()
    for trace in traces:
        tokens[trace.session_id] += trace.completion_mask.count(1)
    return {session: count for session, count in tokens.items() if count}


def session_tokens(
    traces: Sequence[Trace], advantages: Mapping[str, float], *, routing: bool, embeddings: int
) -> list[SessionTokens]:
    """Return the sessions of traces that train any token, in the order of their first traces.

    `routing` replays the recorded experts. Raises `InputError` for a trace without them, for one that is no row
    (`trace_row`), and for an id that is beyond the `embeddings` of the model: on CUDA it would end the process.
    """
    places: dict[str, list[int]] = {}
    for place, trace in enumerate(traces):
        if 1 in trace.completion_mask:
            places.setdefault(trace.session_id, []).append(place)
    return [
        _session(place, [traces[i] for i in place], advantages[session], routing, embeddings)
        for session, place in places.items()
    ]


def _session(
    places: list[int], traces: Sequence[Trace], advantage: float, routing: bool, embeddings: int
) -> SessionTokens:
    rows = []
    logprobs = []
    scores = []
    kinds = []
    for trace in traces:
        row = trace_row(trace)
        wrong = row.ids[(row.ids < 0) | (row.ids >= embeddings)]
        if len(wrong):
            what = f"trace {trace.trace_id} has the token id {wrong[0]}, but the model has {embeddings} embeddings"
            raise InputError(f"{what}: train the model that the traces were recorded with")
        if routing and row.experts is None:
            raise InputError('routing="recorded", but a trace has no routing: read traces(routing=True)')
        rows.append(row if routing else replace(row, experts=None))
        trained = np.array(trace.completion_mask, bool)
        logprobs.append(np.array(trace.logprobs)[trained])
        kinds.append(token_kinds(trace)[trained])
        if trace.scores is not None:
            scores.append(np.array(trace.scores)[trained])
    return SessionTokens(
        rows,
        places,
        _floored(logprobs),
        _floored(scores) if len(scores) == len(traces) else None,
        np.concatenate(kinds),
        advantage,
    )


def _floored(logprobs: list[NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate(logprobs).astype(np.float32).clip(min=LEAST_LOGPROB)


def token_kinds(trace: Trace) -> NDArray[np.int8]:
    """Return the index in `KINDS` of each token of the completion, shape (C,); -1 where the trace does not say."""
    kinds = np.full(len(trace.completion_ids), -1, np.int8)
    for span in trace.continuity:
        kinds[span.start : span.end] = KINDS.index(span.kind)
    return kinds


def micro_batches(
    sessions: Sequence[SessionTokens],
    *,
    accumulation: int,
    processes: int,
    loss_type: str,
    total_sessions: int,
    total_tokens: int,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each process, as many as gradients are accumulated.

    `total_sessions` and `total_tokens`, at least 1, are those that the loss is a mean over. They are more than those of
    `sessions` where some have no gradient. Raises `LedgerError` if a token would be in no micro-batch, or in two.
    """
    parts = spread([session.rows for session in sessions], accumulation * processes)
    found: list[list[MicroBatch]] = [[] for _ in range(processes)]
    placed = 0
    for first in range(0, len(parts), processes):
        beside = [[sessions[i] for i in part] for part in parts[first : first + processes]]
        lengths = [sum(len(session.logprobs) for session in own) for own in beside]
        size = max(1, *map(len, beside))
        placed += sum(lengths)
        for process, own in enumerate(beside):
            weight = loss_weight(loss_type, len(parts), size / total_sessions, lengths[process] / total_tokens)
            found[process].append(MicroBatch(own, size, sum(lengths), weight))
    expected = sum(len(session.logprobs) for session in sessions)
    if placed != expected:
        raise LedgerError(
            f"{expected} tokens are to be trained, but the loss would see {placed}: this batch was not trained on; "
            "please report it as a bug of rolltap"
        )
    return found


def loss_weight(loss_type: str, parts: int, sessions: float, tokens: float) -> float:
    """Return the weight of the loss of one of so many micro-batches, which has shares of the `sessions` and `tokens`.

    TRL divides by the sessions or the tokens of a micro-batch, and processes and accumulation average over the
    micro-batches: with this weight, that mean is the loss of one micro-batch with all sessions.
    """
    if loss_type in MEAN_OF_SESSIONS:
        return sessions * parts
    if loss_type == "bnpo":
        return tokens * parts
    return 1.0


def spread(sessions: Sequence[Sequence[Row]], parts: int) -> list[list[int]]:
    """Split sessions into `parts` lists of indices, some perhaps empty, such that shared prefixes stay together.

    In the order of their first rows' tokens, sessions with a common prefix are adjacent. That order is cut into
    stretches whose largest number of distinct tokens is the smallest possible. The largest stretch comes first, so that
    a batch that does not fit into memory fails at once. Takes O(total tokens).
    """
    packed = [[row.ids.tobytes() for row in rows] for rows in sessions]
    order = sorted(range(len(sessions)), key=lambda i: min(packed[i], default=b""))
    own = [_distinct_tokens(packed[i]) for i in order]
    new = list(own)
    for k in range(1, len(order)):
        before = packed[order[k - 1]]
        first = min(packed[order[k]], default=b"")
        shared = max((common_length(first, row) for row in before), default=0)
        new[k] = own[k] - min(own[k], shared)
    low = max(own, default=0)
    high = sum(new) + low
    while low < high:
        size = (low + high) // 2
        if len(_stretches(own, new, size)) <= parts:
            high = size
        else:
            low = size + 1
    found = _stretches(own, new, low)
    found.sort(key=lambda stretch: -own[stretch[0]] - sum(new[k] for k in stretch[1:]))
    indices = [[order[k] for k in stretch] for stretch in found]
    return indices + [[] for _ in range(parts - len(found))]


def _distinct_tokens(rows: Sequence[bytes]) -> int:
    """Return the tokens of the prefix tree of packed rows."""
    tokens = 0
    before = b""
    for row in sorted(rows):
        tokens += len(row) // TOKEN_BYTES - common_length(before, row)
        before = row
    return tokens


def _stretches(own: Sequence[int], new: Sequence[int], size: int) -> list[list[int]]:
    """Cut a sequence into stretches of at most `size` tokens: `own` of the first of each, `new` of the others."""
    found: list[list[int]] = []
    room = 0
    for k in range(len(own)):
        if found and new[k] <= room:
            found[-1].append(k)
            room -= new[k]
        else:
            found.append([k])
            room = size - own[k]
    return found
