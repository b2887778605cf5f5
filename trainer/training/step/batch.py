"""A generation batch on its way to the loss: sessions with a signal, and their micro-batches."""

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import CallKind
from rolltap.trainer.traces.build import Trace, TraceBatch
from rolltap.trainer.traces.tokens import TOKEN_BYTES, common_length
from rolltap.trainer.traces.trained import StepAccount
from rolltap.trainer.training.step.advantages import (
    rewards_by,
    rewards_differ,
    session_advantages,
)
from rolltap.trainer.training.step.config import TraceGRPOConfig
from rolltap.trainer.training.step.pack import TraceRow, trace_row

LEAST_LOGPROB = -40.0
"""Smallest log-probability of the engine that the loss sees: the exponential of a larger difference
is infinite in float32, and its gradient is NaN. No token is sampled with a smaller one."""

MEAN_OF_SESSIONS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses of TRL that are a mean over the rows of a micro-batch. `bnpo` is one over its tokens. The
others divide by the tokens of the whole batch. Source: TRL 1.16, `GRPOTrainer._compute_loss`."""

KINDS: tuple[CallKind, ...] = get_args(CallKind)
"""Kinds of continuity. A token has the number of its kind in this order."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SessionTokens:
    """A session as the loss sees it. Its n trained tokens are those of its traces, in their
    order."""

    rows: list[TraceRow]
    traces: list[int]
    """Index of each row's trace in the batch."""
    tokens: Floats
    """Values of each token, (3, n): the engine's log-probability, at least `LEAST_LOGPROB`; the
    teacher's, likewise, without a meaning if there is none; the index in `KINDS` of its call, -1
    where the trace does not say."""
    advantage: float

    @property
    def length(self) -> int:
        """The number n of its trained tokens."""
        return len(self.tokens[0])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The sessions of a micro-batch on one process."""

    sessions: list[SessionTokens]
    size: int
    """Rows B of its tensors: the most sessions of any process, because TRL gathers values of
    rows."""
    tokens: int
    """Trained tokens of all processes in this micro-batch."""
    batch_tokens: int
    """Trained tokens of all micro-batches, those without a gradient included; at least 1."""
    weight: float
    """Weight of the micro-batch's loss (`loss_weight`)."""

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return inputs of `GRPOTrainer._compute_loss`.

        Tokens are (B, S), where S is the most tokens of a session. The ids have no meaning: the
        log-probabilities come from the rows.
        """
        longest = 1
        for session in self.sessions:
            longest = max(longest, session.length)
        values = torch.zeros(4, self.size, longest)
        advantages = torch.zeros(self.size)
        for i, session in enumerate(self.sessions):
            values[:3, i, : session.length] = torch.from_numpy(session.tokens)
            values[3, i, : session.length] = 1
            advantages[i] = session.advantage
        logprobs, scores, kinds, mask = values.to(device)
        mask = mask.long()
        return {
            "prompt_ids": mask[:, :0],
            "prompt_mask": mask[:, :0],
            "completion_ids": mask,
            "completion_mask": mask,
            "old_per_token_logps": logprobs,
            "sampling_per_token_logps": logprobs,
            "teacher_per_token_logps": scores,
            "advantages": advantages.to(device),
            "kinds": kinds,
        }


def rows_of_step(
    step: int,
    num_rows: int,
    rows_per_step: int,
    *,
    seed: int,
    shuffle: bool = True,
) -> list[int]:
    """Return the indices of the rows of generation step `step`, counted from 0.

    They are all different. The rows are passed over again and again, each time in an order of its
    own; without `shuffle` in theirs. In a step that ends one pass and begins the next, the rows
    that it has already are at the end of the next pass.
    """
    passes = rows_per_step // math.gcd(num_rows, rows_per_step)  # they fill whole steps
    period, place = divmod(step, passes * num_rows // rows_per_step)
    end = (place + 1) * rows_per_step
    taken: list[int] = []
    number = period * passes
    while len(taken) < end:
        order = list(range(num_rows))
        if shuffle:
            random.Random(f"{seed}/{number}").shuffle(order)
        whole = len(taken) // rows_per_step * rows_per_step
        begun = set(taken[whole:])
        taken += sorted(order, key=begun.__contains__)
        number += 1
    return taken[end - rows_per_step : end]


def divide(
    batch: TraceBatch,
    args: TraceGRPOConfig,
    *,
    embeddings: int,
    processes: int,
) -> tuple[StepAccount, list[list[MicroBatch]]]:
    """Return what the steps of a batch learn from, and the micro-batches of each process.

    Raises as `check_batch` and `session_tokens`, and `InputError` for a trace without the scores
    that the teacher's share needs.
    """
    check_batch(batch)
    share = args.teacher_share
    trained = batch
    if not share:
        trained = with_signal(batch)
    elif any(trace.scores is None for trace in batch.traces):
        what = f"teacher_share = {share}, but a trace has no scores"
        raise InputError(f"{what}: read traces(scores=NAME)")
    scale: Any = args.scale_rewards  # TRL has made a name of True and False
    advantages = session_advantages(batch.rewards, scale)
    computed = trained.traces
    if not args.computes_all:
        computed = [trace for trace in computed if advantages[trace.session_id]]
    # the teacher's share takes the place of rewards, not of the reference or the entropies
    scaled = {}
    for session, advantage in advantages.items():
        scaled[session] = (1 - share) * advantage
    routing = args.routing == "recorded"
    sessions = session_tokens(computed, scaled, routing=routing, embeddings=embeddings)
    with_tokens = {trace.session_id for trace in trained.traces if 1 in trace.completion_mask}
    parts = micro_batches(
        sessions,
        accumulation=args.gradient_accumulation_steps,
        processes=processes,
        loss_type=args.loss_type,
        total_sessions=max(1, len(with_tokens)),
        total_tokens=max(1, number_trained(trained.traces)),
    )
    return StepAccount(trained, advantages, computed), parts


def check_batch(batch: TraceBatch) -> None:
    """Raise `InputError` for traces without a reward, or that are not those of the ledger."""
    unrewarded = {trace.session_id for trace in batch.traces} - batch.rewards.keys()
    if unrewarded:
        what = "sessions without a reward must be left out, but these have traces"
        raise InputError(f"{what}: {sorted(unrewarded)}")
    batch.ledger.check()
    given = number_trained(batch.traces)
    if batch.ledger.sampled and batch.ledger.trained != given:
        raise InputError(
            f"{given} sampled tokens in {len(batch.traces)} traces, but the batch's ledger says "
            f"{batch.ledger.trained}: choose sessions with Run.traces(...).batch(session_ids), or "
            "give a ledger that says what was left out"
        )


def with_signal(batch: TraceBatch) -> TraceBatch:
    """Return the batch without the traces of groups whose rewards do not differ (`rewards_differ`).

    They are left out as `no_signal`. All rewards stay.
    """
    groups = rewards_by("group_id", batch.rewards.values())
    silent = set[str]()
    for session, label in batch.rewards.items():
        if not rewards_differ(groups[label.group_id]):
            silent.add(session)
    kept = [trace for trace in batch.traces if trace.session_id not in silent]
    ledger = batch.ledger
    if ledger.sampled:
        dropped = number_trained(batch.traces) - number_trained(kept)
        ledger = ledger.leave_out("no_signal", dropped)
    accounts = dict(batch.accounts)
    for session in accounts.keys() & silent:
        accounts[session] = accounts[session].leave_out("no_signal")
    return replace(batch, traces=kept, ledger=ledger, accounts=accounts)


def why_skipped(batch: TraceBatch, computed: Sequence[Trace]) -> str:
    """Return why no token of a batch has a gradient. `computed` are the traces that could have
    one."""
    if not number_trained(batch.traces):
        return "its sessions have no token to train on"
    if not number_trained(with_signal(batch).traces):
        return "all rewards of each group are equal"
    if not number_trained(computed):
        return "its tokens are of sessions with advantage 0"
    return "the importance correction left no token"


def number_trained(traces: Sequence[Trace]) -> int:
    """Return the number of trained tokens."""
    return sum(trace.completion_mask.count(1) for trace in traces)


def session_tokens(
    traces: Sequence[Trace],
    advantages: Mapping[str, float],
    *,
    routing: bool,
    embeddings: int,
) -> list[SessionTokens]:
    """Return the sessions of traces that train any token, in the order of their first traces.

    `routing` replays the recorded experts. Raises `InputError` for a trace without them, for one
    that is no row (`trace_row`), and for an id that is beyond the `embeddings` of the model: on
    CUDA it would end the process.
    """
    places: dict[str, list[int]] = {}
    for place, trace in enumerate(traces):
        if 1 in trace.completion_mask:
            places.setdefault(trace.session_id, []).append(place)
    sessions = []
    for session, own in places.items():
        rows = []
        values = []
        for place in own:
            row = trace_row(traces[place])
            if not routing:
                row = replace(row, experts=None)
            elif row.experts is None:
                what = 'routing="recorded", but a trace has no routing'
                raise InputError(f"{what}: read traces(routing=True)")
            wrong = row.ids[(row.ids < 0) | (row.ids >= embeddings)]
            if len(wrong):
                raise InputError(
                    f"trace {traces[place].trace_id} has the token id {wrong[0]}, but the model "
                    f"has {embeddings} embeddings: train the model that recorded the traces"
                )
            rows.append(row)
            values.append(_token_values(traces[place]))
        tokens = np.concatenate(values, axis=1)
        sessions.append(SessionTokens(rows, own, tokens, advantages[session]))
    return sessions


def _token_values(trace: Trace) -> Floats:
    """Return the values of a trace's trained tokens, as in `SessionTokens`."""
    values = np.full((3, len(trace.logprobs)), LEAST_LOGPROB, np.float32)
    values[0] = trace.logprobs
    if trace.scores is not None:
        values[1] = trace.scores
    values[:2] = values[:2].clip(min=LEAST_LOGPROB)
    values[2] = -1
    for span in trace.continuity:
        values[2, span.start : span.end] = KINDS.index(span.kind)
    return values[:, np.array(trace.completion_mask, bool)]


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

    `total_sessions` and `total_tokens`, at least 1, are those that the loss is a mean over. They
    are more than those of `sessions` where some have no gradient.
    """
    parts = spread([session.rows for session in sessions], accumulation * processes)
    found: list[list[MicroBatch]] = [[] for _ in range(processes)]
    for first in range(0, len(parts), processes):
        beside = parts[first : first + processes]
        size = max(1, *map(len, beside))
        together = [sessions[i] for part in beside for i in part]
        tokens = sum(session.length for session in together)
        for process, part in enumerate(beside):
            own = [sessions[i] for i in part]
            share = sum(session.length for session in own) / total_tokens
            weight = loss_weight(loss_type, len(parts), size / total_sessions, share)
            found[process].append(MicroBatch(own, size, tokens, total_tokens, weight))
    return found


def loss_weight(
    loss_type: str,
    parts: int,
    sessions: float,
    tokens: float,
) -> float:
    """Return the weight of the loss of one of `parts` micro-batches.

    It has a share of the `sessions`, and of the `tokens`. TRL divides by the sessions or the tokens
    of a micro-batch, and processes and accumulation average over the micro-batches: with this
    weight, that mean is the loss of one micro-batch with all sessions.
    """
    if loss_type in MEAN_OF_SESSIONS:
        return sessions * parts
    if loss_type == "bnpo":
        return tokens * parts
    return 1.0


def spread(sessions: Sequence[Sequence[TraceRow]], parts: int) -> list[list[int]]:
    """Split sessions into `parts` lists of indices, some perhaps empty.

    Shared prefixes stay together: in the order of their first rows' tokens, sessions with a common
    prefix are adjacent. That order is cut into stretches whose largest number of distinct tokens is
    the smallest possible. The largest stretch comes first, so that a batch that does not fit into
    memory fails at once. Takes O(total tokens).
    """
    packed = []
    for rows in sessions:
        packed.append(sorted(row.ids.tobytes() for row in rows))
    order = sorted(range(len(sessions)), key=packed.__getitem__)
    alone = []
    added = []
    before: list[bytes] = []
    for i in order:
        both = _distinct_tokens(before + packed[i])
        added.append(both - _distinct_tokens(before))
        alone.append(_distinct_tokens(packed[i]))
        before = packed[i]

    def fits(most: int) -> bool:
        return len(_stretches(alone, added, most)) <= parts

    smallest = bisect_left(range(sum(added)), True, key=fits)
    stretches = _stretches(alone, added, smallest)
    stretches.sort(reverse=True)
    found = []
    for _, first, end in stretches:
        found.append(order[first:end])
    while len(found) < parts:
        found.append([])
    return found


def _distinct_tokens(rows: Sequence[bytes]) -> int:
    """Return the tokens of the prefix tree of rows of ids."""
    tokens = 0
    before = b""
    for row in sorted(rows):
        tokens += len(row) // TOKEN_BYTES - common_length(before, row)
        before = row
    return tokens


def _stretches(
    alone: Sequence[int],
    added: Sequence[int],
    most: int,
) -> list[tuple[int, int, int]]:
    """Cut a sequence into stretches of at most `most` tokens, if none is `alone` longer.

    Return the tokens, the first place and the end of each. The first of a stretch has the tokens
    that it has `alone`, each other one those that it `added`.
    """
    found = []
    tokens = 0
    first = 0
    for place in range(len(alone)):
        if place == first:
            tokens = alone[place]
        elif tokens + added[place] <= most:
            tokens += added[place]
        else:
            found.append((tokens, first, place))
            tokens = alone[place]
            first = place
    if len(alone):
        found.append((tokens, first, len(alone)))
    return found
