"""Traces of one session, built from its call tree, and a ledger of its sampled tokens.

A session of five calls, numbered as they started. Each letter is a run of tokens: small ones were in a prompt, capital
ones were sampled. All calls have status `completed` and role `agent`.

    0  p A ─┬─ 1  q B               superseded: call 2 has the same prompt, p A q, and was continued
            ├─ 2  q C ─── 3  r D
            └─ 4  s E               a branch: another continuation of call 0

    strategy          trace   prompt_ids    completion_ids   completion_mask
    per_request       0       p             A                1
                      2       p A q         C                1
                      3       p A q C r     D                1
                      4       p A s         E                1
    prefix_merging    0 2 3   p             A q C r D        1 0 1 0 1
                      0 4     p             A s E            0 0 1    A is trained in trace 0 2 3
    tree              as `prefix_merging`; trace 0 4 also names trace 0 2 3 and the length of p A, which both begin with

The ledger is the same for each strategy: sampled A B C D E, trained A C D E, left out B as `superseded`. `ledger.py`
has the account of a token in full.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.errors import InputError, LedgerError
from rolltap.addons.store.records import Call, CallKind, CallRole, SessionStatus, VersionSpan, find_violation
from rolltap.addons.store.scores import Score
from rolltap.trainer.names import Version
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, LeftOut, SessionAccount, TokenSpan
from rolltap.trainer.traces.routing import Experts, calls_with_experts, experts_of
from rolltap.trainer.traces.tokens import shared_prefixes
from rolltap.trainer.traces.tree import find_ends, link_calls, path_to, start_order

Strategy = Literal["per_request", "prefix_merging", "tree"]
"""Ways from calls to traces. All strategies train the same sampled tokens, each token in exactly one trace.

- `per_request`: one trace per trained call.
- `prefix_merging`: one trace per root-to-leaf path of the call tree. A leaf is a trained call without trained
  descendants.
- `tree`: as `prefix_merging`. Each trace also names the earlier trace with which it shares the longest prefix, for a
  trainer that computes a shared prefix once.
"""

TRAINED_ROLES: tuple[CallRole, ...] = ("agent", "subagent", "compaction")
"""Roles of the calls that are part of solving the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpan:
    """The kind of the call that sampled `completion_ids[start:end]`: how its prompt was made (`Call.kind`)."""

    kind: CallKind
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Trace:
    """One sequence to train on. `completion_mask` and `logprobs` have the length C of `completion_ids`.

    Attributes:
        trace_id: `SESSION/CALL`: the percent-encoded session id and the last call's id. Unique in a run; does
            not depend on the order of the calls.
        call_ids: The path from the trace's first call to its last one; one call under strategy `per_request`.
        prompt_ids: The first call's prompt, shape (P,).
        completion_ids: The tokens after it: those that the path's calls sampled and those between them, shape
            (C,).
        completion_mask: 1 where the policy sampled the token and this trace trains it, else 0; shape (C,).
        logprobs: Natural-log probabilities under the sampling policy, 0.0 where the mask is 0; shape (C,).
        weight_versions: The weights that sampled the tokens with mask 1; positions are those of
            `completion_ids`.
        continuity: One span for each call that sampled tokens with mask 1; positions are those of
            `completion_ids`. Empty when it is not known.
        role: Role of the last call.
        shared_trace_id: Strategy `tree`: the earlier trace of the session with the longest shared prefix; None
            when no earlier trace begins with the same token.
        shared_tokens: Length of that prefix in tokens of `prompt_ids` + `completion_ids`.
        routing: The experts that the engine chose for each token but the last one, shape (P + C - 1, layers, top_k);
            None if they were not asked for.
        scores: `logprobs` under another model; None if they were not asked for.
    """

    session_id: str
    trace_id: str
    call_ids: list[str] = field(repr=False)
    prompt_ids: list[int] = field(repr=False)
    completion_ids: list[int] = field(repr=False)
    completion_mask: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    weight_versions: list[VersionSpan] = field(repr=False)
    continuity: list[KindSpan] = field(default_factory=list, repr=False)
    role: CallRole = "agent"
    shared_trace_id: str | None = None
    shared_tokens: int = 0
    task_id: str = ""
    group_id: str = ""
    harness: str = ""
    reward: float | None = None
    routing: NDArray[np.integer[Any]] | None = field(default=None, repr=False, compare=False)
    scores: list[float] | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the trace as JSON values, without its routing and scores.

        A log-probability is the shortest decimal that rounds to its 32 bits.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("routing", "scores")}
        values["logprobs"] = [float(str(logprob)) for logprob in np.array(self.logprobs, np.float32)]
        for name in ("weight_versions", "continuity"):
            values[name] = [asdict(span) for span in values[name]]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReward:
    """Reward of a session, and the group of sessions that it is compared with. The other labels are for metrics.

    Attributes:
        suspicions: Names of the rules that the session matched.
    """

    group_id: str
    reward: float
    task_id: str = ""
    harness: str = ""
    status: SessionStatus = "completed"
    suspicions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrewarded:
    """Why a session has no reward: a reason of `LeftOut`. Its group may have other sessions."""

    group_id: str
    reason: LeftOut
    status: SessionStatus = "unknown"
    suspicions: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class TraceBatch:
    """Traces of one generation batch, and the reward of every session that has one.

    A session whose calls were all left out has no trace. Its reward still counts in its group's mean.

    Attributes:
        rewards: Session id -> group and reward.
        unrewarded: Session id -> group and reason, for sessions without a reward. They are only counted.
        ledger: The account of the sampled tokens of all its sessions; empty when the traces come from
            elsewhere.
        accounts: Session id -> the account of its sampled tokens, of which `ledger` is the sum. Empty with the ledger.
        continued: Harness -> the prompts of its sessions' continued (`bridged`) calls, and what of them the engine had
            in its cache. Empty when the engine does not say.
        on_policy: True when it is known that the weights to be trained sampled all sessions. Differences of
            log-probabilities are then numerical, or a fault of the record, and are logged as such.
    """

    traces: list[Trace] = field(default_factory=list, repr=False)
    rewards: dict[str, GroupReward] = field(default_factory=dict, repr=False)
    unrewarded: dict[str, Unrewarded] = field(default_factory=dict, repr=False)
    ledger: Ledger = field(default_factory=Ledger)
    accounts: dict[str, SessionAccount] = field(default_factory=dict, repr=False)
    continued: dict[str, CachedPrompts] = field(default_factory=dict)
    on_policy: bool = False


def check_arguments(strategy: Strategy, roles: Collection[CallRole], max_tokens: int | None) -> None:
    """Raise `InputError` for an unknown strategy or role, and for `max_tokens` below 1."""
    if strategy not in get_args(Strategy):
        raise InputError(f"unknown strategy {strategy!r}: choose {', '.join(get_args(Strategy))}")
    require_collection(roles)
    if unknown := sorted(set(roles) - set(get_args(CallRole))):
        raise InputError(f"unknown role {unknown[0]!r}: choose {', '.join(get_args(CallRole))}")
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens={max_tokens}: give a number of at least 1, or None")


def require_collection(given: object) -> None:
    """Raise `InputError` for a text, whose `in` would compare parts of it, and for an iterator, which ends."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InputError(f"{given!r} is not a collection: give a list")


def build_traces(
    calls: Sequence[Call],
    strategy: Strategy = "prefix_merging",
    *,
    roles: Collection[CallRole] = TRAINED_ROLES,
    max_tokens: int | None = None,
    weights: Version | None = None,
    ahead: int = 0,
    routing: Mapping[str, Experts] | None = None,
) -> tuple[list[Trace], Ledger]:
    """Return the traces of one session's calls and the ledger of their sampled tokens.

    `prefix_merging` and `tree` order the traces as a depth-first walk of the call tree reaches their leaves. The first
    trace that contains a sampled token trains it; later ones have it as context, with mask 0. A left-out call with
    trained descendants is context as well. Calls with a role not in `roles` are left out. With
    `weights`, so are the tokens that neither these sampled, in whatever attempt, nor ones that are older by at most
    `ahead` steps.

    With `max_tokens`, no trace has more tokens, its prompt included. Tokens sampled beyond them are left out as
    `over_length`. Each trace ends with a token that it trains.

    With `routing`, call id -> experts, each trace has those of its tokens. Calls with a token that has none are left
    out as `missing_routing`.

    The order of `calls` does not matter. They are sorted by `start_order`.

    Raises `InputError` for calls of several sessions, a repeated call id, an unknown strategy or role, and `max_tokens`
    below 1; `LedgerError` when the number of trained tokens in the traces is not that of the ledger.
    """
    traces, account = trace_calls(calls, strategy, roles, max_tokens, weights, ahead, routing)
    return traces, account.ledger


def trace_calls(
    calls: Sequence[Call],
    strategy: Strategy,
    roles: Collection[CallRole],
    max_tokens: int | None,
    weights: Version | None,
    ahead: int,
    routing: Mapping[str, Experts] | None,
    scores: Mapping[str, Score] | None = None,
) -> tuple[list[Trace], SessionAccount]:
    """Return the traces of one session's calls and the account of their sampled tokens. See `build_traces`."""
    check_arguments(strategy, roles, max_tokens)
    calls = sorted(calls, key=start_order)
    sessions = {call.session_id for call in calls}
    if len(sessions) > 1:
        raise InputError(f"traces are built for one session at a time, these calls are of {sorted(sessions)}")
    if repeated := [call_id for call_id, n in Counter(call.call_id for call in calls).items() if n > 1]:
        raise InputError(f"session {calls[0].session_id} has several calls named {repeated[0]}")
    parents, left_out = judge_calls(calls, roles)
    if routing is not None:
        whole = calls_with_experts(calls, routing)
        for i, call in enumerate(calls):
            if left_out[i] not in _BEFORE_STALE and call.call_id not in whole:
                left_out[i] = "missing_routing"
    if scores is not None:
        for i, call in enumerate(calls):
            given = scores[call.call_id].logprobs if call.call_id in scores else []
            if len(given) != len(call.completion_ids) and left_out[i] not in _BEFORE_STALE:
                left_out[i] = "missing_scores"
    left = list[TokenSpan]()
    # call -> its sampled tokens that are trained
    num_trained: dict[int, range] = {}
    for i, (call, reason) in enumerate(zip(calls, left_out, strict=True)):
        sampled = len(call.completion_ids)
        stale = 0 if weights is None or reason in _BEFORE_STALE else _num_stale(call, weights, ahead)
        trained = range(stale, _num_tokens_within(call, max_tokens)) if reason is None else range(0)
        rest = TokenSpan(call.call_id, stale + len(trained), sampled, reason or "over_length")
        left += [span for span in (TokenSpan(call.call_id, 0, stale, "stale"), rest) if span.end > span.start]
        if trained:
            num_trained[i] = trained

    if strategy == "per_request":
        paths = [[i] for i in num_trained]
    else:
        # lexicographic order of root-to-leaf paths is depth-first order
        paths = sorted(path_to(leaf, parents.__getitem__) for leaf in find_ends(parents, num_trained))
    traces, spans = [], list[TokenSpan]()
    unowned = dict(num_trained)
    for path in paths:
        owned = [(calls[i], unowned.pop(i)) for i in path if i in unowned]
        spans += [TokenSpan(call.call_id, trained.start, trained.stop) for call, trained in owned]
        traces.append(trace := _trace([calls[i] for i in path], owned, num_trained[path[-1]].stop))
        if scores is not None:
            scored = [(replace(call, logprobs=scores[call.call_id].logprobs), trained) for call, trained in owned]
            trace.scores = _trace([calls[i] for i in path], scored, num_trained[path[-1]].stop).logprobs
        if routing is not None:
            experts = experts_of(calls[path[-1]], calls, routing)
            trace.routing = experts[: len(trace.prompt_ids) + len(trace.completion_ids) - 1]
    masked = sum(trace.completion_mask.count(1) for trace in traces)
    account = SessionAccount(spans=(*spans, *left))
    if masked != (counted := sum(map(len, num_trained.values()))) or account.ledger.trained != counted:
        raise LedgerError(f"the traces train {masked} tokens, the ledger says {counted}")
    if strategy == "tree":
        found = shared_prefixes([trace.prompt_ids + trace.completion_ids for trace in traces])
        for trace, shared in zip(traces, found, strict=True):
            if shared is not None:
                trace.shared_trace_id, trace.shared_tokens = traces[shared.index].trace_id, shared.length
    return traces, account


def judge_calls(
    calls: Sequence[Call], roles: Collection[CallRole] = TRAINED_ROLES
) -> tuple[list[int | None], list[LeftOut | None]]:
    """Return the call tree of one session's calls, and why each call is left out. `calls` are in `start_order`.

    Two lists of the length of `calls`: the index of each call's parent, None for a root; and the reasons, None for a
    call that is trained.
    """
    parents, superseded = link_calls(calls)
    reasons = [_fault(call, roles) for call in calls]
    return parents, [reason or ("superseded" if i in superseded else None) for i, reason in enumerate(reasons)]


def _fault(call: Call, roles: Collection[CallRole]) -> LeftOut | None:
    """Return why the call is left out, judged without its relatives, or None.

    A completed call that sampled nothing has no log-probabilities, so it is `missing_logprobs`, with 0 tokens.
    """
    if call.status != "completed":
        return call.status
    if not call.logprobs:
        return "missing_logprobs"
    if call.violation or find_violation(call.completion_ids, call.logprobs, call.weight_versions):
        return "violation"
    if call.under_grammar:
        return "grammar"
    return None if call.role in roles else call.role


_BEFORE_STALE: frozenset[LeftOut | None] = frozenset(
    {"aborted", "failed", "missing_logprobs", "violation", "grammar", "missing_routing", "missing_scores"}
)
"""Reasons that count before `stale`."""


def _num_stale(call: Call, weights: Version, ahead: int) -> int:
    """Return how many of a call's first sampled tokens are stale: those up to the last one of weights of another age.

    The tokens of new weights come after those of old ones.
    """
    ages = [(span.end, weights.age(span.version)) for span in call.weight_versions]
    return max((end for end, age in ages if age is None or not 0 <= age <= ahead), default=0)


def _num_tokens_within(call: Call, max_tokens: int | None) -> int:
    """Return how many of a call's sampled tokens are among the first `max_tokens` of its prompt and completion.

    A token has the same position in every trace of its path. So it is cut off in all of them or in none.
    """
    if max_tokens is None:
        return len(call.completion_ids)
    return min(len(call.completion_ids), max(0, max_tokens - len(call.prompt_ids)))


def _trace(path: Sequence[Call], owned: Iterable[tuple[Call, range]], end: int) -> Trace:
    """Return the trace of a path, with the first `end` sampled tokens of its last call.

    `owned` are the calls that this trace trains, each with those of its sampled tokens.
    """
    root, last = path[0], path[-1]
    start = len(root.prompt_ids)
    completion_ids = [*last.prompt_ids[start:], *last.completion_ids[:end]]
    mask = [0] * len(completion_ids)
    logprobs = [0.0] * len(completion_ids)
    versions, continuity = [], []
    for call, trained in owned:
        begin = len(call.prompt_ids) - start
        first, last_one = begin + trained.start, begin + trained.stop
        mask[first:last_one] = [1] * len(trained)
        logprobs[first:last_one] = call.logprobs[trained.start : trained.stop]
        versions += [
            VersionSpan(version=span.version, start=max(first, begin + span.start), end=min(last_one, begin + span.end))
            for span in call.weight_versions
            if span.start < trained.stop and span.end > trained.start
        ]
        continuity.append(KindSpan(kind=call.kind, start=first, end=last_one))
    return Trace(
        session_id=last.session_id,
        # percent-encoded: an imported session id may contain a slash
        trace_id=f"{quote(last.session_id, safe='')}/{last.call_id}",
        call_ids=[call.call_id for call in path],
        prompt_ids=list(root.prompt_ids),
        completion_ids=completion_ids,
        completion_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        continuity=continuity,
        role=last.role,
    )
