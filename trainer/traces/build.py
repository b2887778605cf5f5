"""The call tree of one session -> traces, with a ledger of every sampled token."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from rolltap.addons.errors import InputError, LedgerError
from rolltap.addons.store.records import Call, CallRole, VersionSpan, find_violation
from rolltap.trainer.traces.ledger import Ledger, LeftOut
from rolltap.trainer.traces.shared_prefixes import shared_prefixes
from rolltap.trainer.traces.tree import find_ends, link_calls, path_to, start_order

Strategy = Literal["per_request", "prefix_merging", "tree"]
"""`per_request`: one trace per call. `prefix_merging`: one per root-to-leaf path of the call tree. `tree`: the same,
and each names the trace before it with which it shares most, for a trainer that computes a shared beginning once. All
train the same sampled tokens, each in exactly one trace."""

TRAINED_ROLES: tuple[CallRole, ...] = ("agent", "subagent", "compaction")
"""The roles whose answers are part of solving the task."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """One sequence to train on; all lists over `completion_ids` have its length C."""

    session_id: str
    trace_id: str
    """The session's id, percent-encoded, and the last call's: unique in a run, and the same however the calls were
    ordered."""
    call_ids: list[str]
    """The path from the root call to the last one."""
    prompt_ids: list[int]
    """The root call's prompt, shape (P,)."""
    completion_ids: list[int]
    """All that follows: what the path's calls sampled and what came between, shape (C,)."""
    completion_mask: list[int]
    """1 where the policy sampled the token and this trace trains it, else 0."""
    logprobs: list[float]
    """Natural-log probabilities under the sampling policy; 0.0 where the mask is 0."""
    weight_versions: list[VersionSpan]
    """Which weights sampled the tokens with mask 1, as positions in `completion_ids`."""
    role: CallRole = "agent"
    """The last call's."""
    shared_trace_id: str | None = None
    """Strategy `tree`: the trace of the session, before this one, with which it shares the longest beginning; None
    where there is none."""
    shared_tokens: int = 0
    """Length of that beginning in tokens of `prompt_ids` and `completion_ids`."""
    task_id: str = ""
    group_id: str = ""
    harness: str = ""
    reward: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the trace as JSON values. A log-probability is the shortest decimal that rounds to its 32 bits."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["logprobs"] = [float(str(logprob)) for logprob in np.array(self.logprobs, np.float32)]
        values["weight_versions"] = [asdict(span) for span in self.weight_versions]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReward:
    """The reward of a session, and the group of sessions that it is compared with."""

    group_id: str
    reward: float


@dataclass(slots=True, kw_only=True)
class TraceBatch:
    """Traces to step on, and the reward of every session that has one.

    A session whose calls were all left out has no trace; its reward still counts in its group's mean.
    """

    traces: list[Trace] = field(default_factory=list)
    rewards: dict[str, GroupReward] = field(default_factory=dict)
    """Session id -> its group and its reward."""
    ledger: Ledger = field(default_factory=Ledger)
    """The account of the sampled tokens of all its sessions; empty when the traces come from elsewhere."""


def build_traces(
    calls: Sequence[Call],
    strategy: Strategy,
    *,
    roles: Collection[CallRole] = TRAINED_ROLES,
    max_tokens: int | None = None,
) -> tuple[list[Trace], Ledger]:
    """Traces of one session's calls, in the order in which a depth-first walk of the call tree reaches their leaves.

    A sampled token belongs to the first trace that reaches it and is context, with mask 0, in the later ones. So are
    the tokens of a left-out call with trained descendants. Calls of other `roles` are left out. No trace has more than
    `max_tokens` tokens: what was sampled beyond that many is left out, and a trace ends with a token that is trained.
    The order of `calls` does not matter: `started_at` does, then the prompt's length, then `call_id`.

    Raises `InputError` for calls of several sessions, a repeated call id or an unknown strategy, and `LedgerError`
    when the traces do not train exactly the tokens that the ledger says.
    """
    calls = sorted(calls, key=start_order)
    _require_one_session(calls)
    parents, left_out = judge_calls(calls, roles)
    ledger = Ledger()
    # call -> how many of its sampled tokens are trained, from the first on
    trained: dict[int, int] = {}
    for i, (call, reason) in enumerate(zip(calls, left_out, strict=True)):
        sampled = len(call.completion_ids)
        tokens = _tokens_within(call, max_tokens) if reason is None else 0
        ledger += Ledger(sampled=sampled, trained=tokens, left_out={reason or "over_length": sampled - tokens})
        if tokens:
            trained[i] = tokens
    ledger.check()

    if strategy == "per_request":
        paths = [[i] for i in trained]
    elif strategy in ("prefix_merging", "tree"):
        # their order is that of a depth-first walk
        paths = sorted(path_to(end, parents.__getitem__) for end in find_ends(parents, trained))
    else:
        raise InputError(f"unknown strategy {strategy!r}: choose per_request, prefix_merging or tree")
    traces = []
    unowned = dict(trained)
    for path in paths:
        owned = [(calls[i], unowned.pop(i)) for i in path if i in unowned]
        traces.append(_trace([calls[i] for i in path], owned, trained[path[-1]]))
    masked = sum(trace.completion_mask.count(1) for trace in traces)
    if unowned or masked != ledger.trained:
        raise LedgerError(f"the traces train {masked} tokens, the ledger says {ledger.trained}")
    if strategy == "tree":
        _name_shared_prefixes(traces)
    return traces, ledger


def judge_calls(
    calls: Sequence[Call], roles: Collection[CallRole] = TRAINED_ROLES
) -> tuple[list[int | None], list[LeftOut | None]]:
    """The call tree of one session's calls, which are in `start_order`, and why each of them is not trained.

    Returns the index of each call's parent, None for a root; and the reasons, None for a call that is trained.
    """
    parents, superseded = link_calls(calls)
    reasons = [_fault(call, roles) for call in calls]
    return parents, [reason or ("superseded" if i in superseded else None) for i, reason in enumerate(reasons)]


def _require_one_session(calls: Sequence[Call]) -> None:
    sessions = {call.session_id for call in calls}
    if len(sessions) > 1:
        raise InputError(f"traces are built for one session at a time, these calls are of {sorted(sessions)}")
    if repeated := [call_id for call_id, n in Counter(call.call_id for call in calls).items() if n > 1]:
        raise InputError(f"session {calls[0].session_id} has several calls named {repeated[0]}")


def _fault(call: Call, roles: Collection[CallRole]) -> LeftOut | None:
    """Why the call by itself is not trained; one that sampled nothing has no log-probabilities."""
    if call.status != "completed":
        return call.status
    if not call.logprobs:
        return "missing_logprobs"
    if call.violation or find_violation(call.completion_ids, call.logprobs, call.weight_versions):
        return "violation"
    return None if call.role in roles else call.role


def _tokens_within(call: Call, max_tokens: int | None) -> int:
    """How many of the tokens that a call sampled are within the first `max_tokens` of prompt and completion. A token's
    position is the same in every trace, so that it is cut off in all or in none."""
    if max_tokens is None:
        return len(call.completion_ids)
    return min(len(call.completion_ids), max(0, max_tokens - len(call.prompt_ids)))


def _trace(path: Sequence[Call], owned: Iterable[tuple[Call, int]], end: int) -> Trace:
    """The tokens of a path up to the first `end` that its last call sampled.

    `owned` are the calls that this trace trains, each with the number of its sampled tokens that are trained.
    """
    root, last = path[0], path[-1]
    start = len(root.prompt_ids)
    completion_ids = [*last.prompt_ids[start:], *last.completion_ids[:end]]
    mask = [0] * len(completion_ids)
    logprobs = [0.0] * len(completion_ids)
    versions = []
    for call, tokens in owned:
        begin = len(call.prompt_ids) - start
        mask[begin : begin + tokens] = [1] * tokens
        logprobs[begin : begin + tokens] = call.logprobs[:tokens]
        versions += [
            VersionSpan(version=span.version, start=begin + span.start, end=begin + min(span.end, tokens))
            for span in call.weight_versions
            if span.start < tokens
        ]
    return Trace(
        session_id=last.session_id,
        # encoded, as an imported id may have a slash of its own
        trace_id=f"{quote(last.session_id, safe='')}/{last.call_id}",
        call_ids=[call.call_id for call in path],
        prompt_ids=list(root.prompt_ids),
        completion_ids=completion_ids,
        completion_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        role=last.role,
    )


def _name_shared_prefixes(traces: Sequence[Trace]) -> None:
    found = shared_prefixes([trace.prompt_ids + trace.completion_ids for trace in traces])
    for trace, shared in zip(traces, found, strict=True):
        if shared is not None:
            trace.shared_trace_id = traces[shared.index].trace_id
            trace.shared_tokens = shared.length
