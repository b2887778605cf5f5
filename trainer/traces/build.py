"""Traces of one session, built from its call tree, and a ledger of its sampled tokens.

A session of five calls, numbered as they started. Each letter is a run of tokens: small ones were
in a prompt, capital ones were sampled. All calls have status `completed` and role `agent`.

    0  p A ─┬─ 1  q B               superseded: call 2 has the same prompt, p A q, and went on
            ├─ 2  q C ─── 3  r D
            └─ 4  s E               a branch: another continuation of call 0

    strategy          trace   prompt_ids    completion_ids   completion_mask
    per_request       0       p             A                1
                      2       p A q         C                1
                      3       p A q C r     D                1
                      4       p A s         E                1
    prefix_merging    0 2 3   p             A q C r D        1 0 1 0 1
                      0 4     p             A s E            0 0 1    A is trained in trace 0 2 3
    tree              as `prefix_merging`; trace 0 4 also names trace 0 2 3 and the length of p A,
                      with which both begin

The ledger is the same for each strategy: sampled A B C D E, trained A C D E, left out B as
`superseded`. `ledger.py` has the account of a token in full.
"""

from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.errors import InputError, LedgerError
from rolltap.addons.store.records import (
    Call,
    CallKind,
    CallRole,
    SessionStatus,
    VersionSpan,
    find_violation,
)
from rolltap.trainer.names import Version
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, LeftOut, SessionAccount, TokenSpan
from rolltap.trainer.traces.routing import Experts, expert_pieces
from rolltap.trainer.traces.tables import Score
from rolltap.trainer.traces.tokens import common_length, to_bytes
from rolltap.trainer.traces.tree import find_ends, link_calls, path_to, start_order

Strategy = Literal["per_request", "prefix_merging", "tree"]
"""Ways from calls to traces. All train the same sampled tokens, each token in exactly one trace.

- `per_request`: one trace per trained call.
- `prefix_merging`: one trace per root-to-leaf path of the call tree. A leaf is a trained call
  without trained descendants.
- `tree`: as `prefix_merging`. Each trace also names the earlier trace with which it shares the
  longest prefix, for a trainer that computes a shared prefix once.
"""

TRAINED_ROLES: tuple[CallRole, ...] = ("agent", "subagent", "compaction")
"""Roles of the calls that are part of solving the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpan:
    """The kind of the call that sampled `completion_ids[start:end]` (`Call.kind`)."""

    kind: CallKind
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Trace:
    """One sequence to train on.

    Attributes:
        trace_id: `SESSION/CALL`: the percent-encoded session id and the last call's id. Unique in a
            run; does not depend on the order of the calls.
        call_ids: The path from the trace's first call to its last one; one call under strategy
            `per_request`.
        prompt_ids: The first call's prompt, shape (P,).
        completion_ids: The tokens after it: those that the path's calls sampled and those between
            them, shape (C,).
        completion_mask: 1 where the policy sampled the token and this trace trains it, else 0;
            shape (C,).
        logprobs: Natural-log probabilities under the sampling policy, 0.0 where the mask is 0;
            shape (C,).
        weight_versions: The weights that sampled the tokens with mask 1; positions are those of
            `completion_ids`.
        continuity: One span for each call that sampled tokens with mask 1; positions are those of
            `completion_ids`. Empty when it is not known.
        role: Role of the last call.
        shared_trace_id: Strategy `tree`: the earlier trace of the session with the longest shared
            prefix; None when no earlier trace begins with the same token.
        shared_tokens: Length of that prefix in tokens of `prompt_ids` + `completion_ids`.
        routing: The experts that the engine chose for each token but the last one, shape
            (P + C - 1, layers, top_k); None if they were not asked for.
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
        # `asdict` of the trace would copy token by token
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        del values["routing"], values["scores"]
        values["logprobs"] = [float(str(each)) for each in np.array(self.logprobs, np.float32)]
        for name in ("weight_versions", "continuity"):
            values[name] = [asdict(span) for span in values[name]]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReward:
    """Reward of a session, and the group of sessions that it is compared with.

    The other labels are for metrics.

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

    A session whose calls were all left out has no trace. Its reward still counts in its group's
    mean.

    Attributes:
        rewards: Session id -> group and reward.
        unrewarded: Session id -> group and reason, for sessions without a reward. They are only
            counted.
        ledger: The account of the sampled tokens of all its sessions; empty when the traces come
            from elsewhere.
        accounts: Session id -> the account of its sampled tokens, of which `ledger` is the sum.
            Empty with the ledger.
        continued: Harness -> the prompts of its sessions' continued (`bridged`) calls, and what of
            them the engine had in its cache. Empty when the engine does not say.
        on_policy: True when it is known that the weights to be trained sampled all sessions.
            Differences of log-probabilities are then numerical, or a fault of the record, and are
            logged as such.
    """

    traces: list[Trace] = field(default_factory=list, repr=False)
    rewards: dict[str, GroupReward] = field(default_factory=dict, repr=False)
    unrewarded: dict[str, Unrewarded] = field(default_factory=dict, repr=False)
    ledger: Ledger = field(default_factory=Ledger)
    accounts: dict[str, SessionAccount] = field(default_factory=dict, repr=False)
    continued: dict[str, CachedPrompts] = field(default_factory=dict)
    on_policy: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """Arguments of `build_traces`.

    Raises `InputError` for an unknown strategy or role, and for `max_tokens` below 1.
    """

    strategy: Strategy = "prefix_merging"
    roles: Collection[CallRole] = TRAINED_ROLES
    max_tokens: int | None = None
    weights: Version | None = None
    max_staleness: int = 0

    def __post_init__(self) -> None:
        strategies = get_args(Strategy)
        if self.strategy not in strategies:
            raise InputError(f"unknown strategy {self.strategy!r}: choose {', '.join(strategies)}")
        require_collection(self.roles)
        known = get_args(CallRole)
        for role in sorted(self.roles):
            if role not in known:
                raise InputError(f"unknown role {role!r}: choose {', '.join(known)}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens={self.max_tokens}: give a number of at least 1, or None")


def require_collection(given: object) -> None:
    """Raise `InputError` for a text and for an iterator.

    `in` would compare parts of a text, and an iterator ends.
    """
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InputError(f"{given!r} is not a collection: give a list")


def build_traces(
    calls: Sequence[Call],
    strategy: Strategy = "prefix_merging",
    *,
    roles: Collection[CallRole] = TRAINED_ROLES,
    max_tokens: int | None = None,
    weights: Version | None = None,
    max_staleness: int = 0,
    routing: Mapping[str, Experts] | None = None,
) -> tuple[list[Trace], Ledger]:
    """Return the traces of one session's calls and the ledger of their sampled tokens.

    `prefix_merging` and `tree` order the traces as a depth-first walk of the call tree reaches
    their leaves. The first trace that contains a sampled token trains it; later ones have it as
    context, with mask 0. A left-out call with trained descendants is context as well. Calls with a
    role not in `roles` are left out. With `weights`, so are the tokens that neither these sampled,
    in whatever attempt, nor ones that are older by at most `max_staleness` steps.

    With `max_tokens`, no trace has more tokens, its prompt included. Tokens sampled beyond them are
    left out as `over_length`. Each trace ends with a token that it trains.

    With `routing`, call id -> experts, each trace has those of its tokens. Calls with a token that
    has none are left out as `missing_routing`.

    The order of `calls` does not matter. They are sorted by `start_order`.

    Raises `InputError` for calls of several sessions, a repeated call id, an unknown strategy or
    role, and `max_tokens` below 1; `LedgerError` when the number of trained tokens in the traces is
    not that of the ledger.
    """
    selection = Selection(strategy, roles, max_tokens, weights, max_staleness)
    traces, account = trace_calls(calls, selection, routing)
    return traces, account.ledger


def trace_calls(
    calls: Sequence[Call],
    selection: Selection,
    routing: Mapping[str, Experts] | None = None,
    scores: Mapping[str, Score] | None = None,
) -> tuple[list[Trace], SessionAccount]:
    """Return the traces of one session's calls and the account of their sampled tokens.

    It is what `build_traces` does. With `scores`, call id -> scores, each trace has those of its
    trained tokens. Calls with a token that has none are left out as `missing_scores`.
    """
    calls = sorted(calls, key=start_order)
    by_id = _by_id(calls)
    missing: dict[str, LeftOut] = {}
    for call in calls:
        if scores is not None:
            given = scores.get(call.call_id)
            if given is None or len(given.logprobs) != len(call.completion_ids):
                missing[call.call_id] = "missing_scores"
        if routing is not None and not expert_pieces(call, by_id, routing):
            # it comes before `missing_scores` in `LeftOut`
            missing[call.call_id] = "missing_routing"
    parents, reasons = classify_calls(calls, selection.roles, missing)

    trained: dict[int, TokenSpan] = {}
    left_out: list[TokenSpan] = []
    for number, call in enumerate(calls):
        for span in _spans(call, reasons[number], selection):
            if span.reason is None:  # at most the middle one
                trained[number] = span
            else:
                left_out.append(span)

    if selection.strategy == "per_request":
        paths = [[number] for number in trained]
    else:
        # lexicographic order of root-to-leaf paths is depth-first order
        paths = sorted(path_to(leaf, parents.__getitem__) for leaf in find_ends(parents, trained))
    traces: list[Trace] = []
    spans: list[TokenSpan] = []
    unowned = dict(trained)
    for path in paths:
        owned = [unowned.pop(number) for number in path if number in unowned]
        spans += owned
        trace = _trace([calls[number] for number in path], trained[path[-1]].end)
        for span in owned:
            _train(trace, by_id[span.call_id], span, scores)
        if routing is not None:
            experts = np.concatenate(expert_pieces(calls[path[-1]], by_id, routing))
            trace.routing = experts[: len(trace.prompt_ids) + len(trace.completion_ids) - 1]
        traces.append(trace)
    if selection.strategy == "tree":
        _name_shared_prefixes(traces)

    account = SessionAccount(spans=(*spans, *unowned.values(), *left_out))
    masked = sum(trace.completion_mask.count(1) for trace in traces)
    counted = account.ledger.trained
    if masked != counted:
        raise LedgerError(f"the traces train {masked} tokens, the ledger says {counted}")
    return traces, account


def _by_id(calls: Sequence[Call]) -> dict[str, Call]:
    by_id: dict[str, Call] = {}
    for call in calls:
        if call.session_id != calls[0].session_id:
            both = sorted([calls[0].session_id, call.session_id])
            what = f"these calls are of {both}"
            raise InputError(f"traces are built for one session at a time, {what}")
        if call.call_id in by_id:
            raise InputError(f"session {call.session_id} has several calls named {call.call_id}")
        by_id[call.call_id] = call
    return by_id


def classify_calls(
    calls: Sequence[Call],
    roles: Collection[CallRole] = TRAINED_ROLES,
    missing: Mapping[str, LeftOut] = MappingProxyType({}),
) -> tuple[list[int | None], list[LeftOut | None]]:
    """Return the call tree of one session's calls, and why each call is left out.

    `calls` are in `start_order`. `missing` is call id -> what a call lacks that is asked for.

    Two lists of the length of `calls`: the index of each call's parent, None for a root; and the
    reasons, None for a call that is trained.
    """
    parents, superseded = link_calls(calls)
    reasons: list[LeftOut | None] = []
    for number, call in enumerate(calls):
        reason = _untrainable(call, missing)
        if reason is None and call.role not in roles:
            reason = call.role
        if reason is None and number in superseded:
            reason = "superseded"
        reasons.append(reason)
    return parents, reasons


def _untrainable(call: Call, missing: Mapping[str, LeftOut]) -> LeftOut | None:
    """Return why no token of the call could be trained, whatever its age, or None.

    A completed call that sampled nothing has no log-probabilities, so it is `missing_logprobs`,
    with 0 tokens.
    """
    if call.status != "completed":
        return call.status
    if not call.logprobs:
        return "missing_logprobs"
    if call.violation:
        return "violation"
    if find_violation(call.completion_ids, call.logprobs, call.weight_versions):
        return "violation"
    if call.under_grammar:
        return "grammar"
    return missing.get(call.call_id)


_REASONS = get_args(LeftOut)
_BEFORE_STALE = _REASONS[: _REASONS.index("stale")]


def _spans(call: Call, reason: LeftOut | None, selection: Selection) -> list[TokenSpan]:
    """Return the sampled tokens of a call that is left out for a `reason`, or trained.

    Stale tokens come first, because new weights follow old ones. A token has the same position in
    every trace of its path, so `max_tokens` cuts it off in all of them or in none.
    """
    sampled = len(call.completion_ids)
    stale = 0
    if selection.weights is not None and reason not in _BEFORE_STALE:
        for version in call.weight_versions:
            age = selection.weights.age(version.version)
            if age is None or not 0 <= age <= selection.max_staleness:
                stale = version.end
    kept = sampled
    if reason is None and selection.max_tokens is not None:
        kept = min(sampled, max(stale, selection.max_tokens - len(call.prompt_ids)))
    spans = [
        TokenSpan(call.call_id, 0, stale, "stale"),
        TokenSpan(call.call_id, stale, kept, reason),
        TokenSpan(call.call_id, kept, sampled, "over_length"),
    ]
    return [span for span in spans if span.start < span.end]


def _trace(path: Sequence[Call], end: int) -> Trace:
    """Return a trace of a path, with the first `end` sampled tokens of its last call.

    None of its tokens is trained yet.
    """
    root = path[0]
    last = path[-1]
    completion_ids = [*last.prompt_ids[len(root.prompt_ids) :], *last.completion_ids[:end]]
    return Trace(
        session_id=last.session_id,
        # percent-encoded: an imported session id may contain a slash
        trace_id=f"{quote(last.session_id, safe='')}/{last.call_id}",
        call_ids=[call.call_id for call in path],
        prompt_ids=list(root.prompt_ids),
        completion_ids=completion_ids,
        completion_mask=[0] * len(completion_ids),
        logprobs=[0.0] * len(completion_ids),
        weight_versions=[],
        role=last.role,
    )


def _train(
    trace: Trace,
    call: Call,
    span: TokenSpan,
    scores: Mapping[str, Score] | None,
) -> None:
    """Have a trace train the tokens of a `span` of one of its calls."""
    offset = len(call.prompt_ids) - len(trace.prompt_ids)
    start = offset + span.start
    end = offset + span.end
    trace.completion_mask[start:end] = [1] * (end - start)
    trace.logprobs[start:end] = call.logprobs[span.start : span.end]
    if scores is not None:
        trace.scores = trace.scores or [0.0] * len(trace.completion_ids)
        trace.scores[start:end] = scores[call.call_id].logprobs[span.start : span.end]
    for each in call.weight_versions:
        first = max(start, offset + each.start)
        last = min(end, offset + each.end)
        if first < last:
            trace.weight_versions.append(VersionSpan(version=each.version, start=first, end=last))
    trace.continuity.append(KindSpan(kind=call.kind, start=start, end=end))


def _name_shared_prefixes(traces: Sequence[Trace]) -> None:
    """Name in each trace the earlier one with the longest shared prefix."""
    earlier: list[tuple[bytes, str]] = []  # packed tokens and id, sorted
    for trace in traces:
        ids = to_bytes(trace.prompt_ids + trace.completion_ids)
        place = bisect(earlier, (ids, ""))
        # of sorted sequences, a neighbour shares the longest prefix
        for other, trace_id in earlier[max(0, place - 1) : place + 1]:
            length = common_length(ids, other)
            if length > trace.shared_tokens:
                trace.shared_tokens = length
                trace.shared_trace_id = trace_id
        earlier.insert(place, (ids, trace.trace_id))
