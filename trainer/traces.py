"""The calls of one session -> call tree -> traces, with a ledger of every sampled token.

A call's parent is the longest earlier call whose prompt and completion begin its prompt, token for token. Anything
else is another branch or another root: nothing is repaired. Time and memory are linear in the prompts' tokens.
"""

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from rolltap.addons.calls import Call, CallRole, Session, VersionSpan, find_violation

Strategy = Literal["per_request", "prefix_merging"]
"""`per_request`: one trace per call. `prefix_merging`: one per root-to-leaf path of the call tree. Both train the
same sampled tokens, each in exactly one trace."""

LeftOut = Literal[
    "aborted", "failed", "missing_logprobs", "violation", CallRole, "superseded", "over_length", "no_reward"
]
"""Why the sampled tokens of a call are not trained. A call for which several hold is counted under the first."""

HASH_BASE = np.uint64(0x9E3779B97F4A7C15)


class LedgerError(Exception):
    """Sampled tokens that are neither trained nor left out, or that are counted twice: a bug in rolltap."""


@dataclass(slots=True)
class Ledger:
    """The account of sampled tokens, in tokens. Ledgers add up with `+`."""

    sampled: int = 0
    trained: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Tokens by `LeftOut` reason; a reason that left nothing out is absent."""

    def __add__(self, other: "Ledger") -> "Ledger":
        left_out = Counter(self.left_out) + Counter(other.left_out)
        return Ledger(self.sampled + other.sampled, self.trained + other.trained, dict(left_out))

    def check(self) -> None:
        """Raises `LedgerError` unless sampled = trained + left out."""
        if self.sampled != self.trained + sum(self.left_out.values()):
            raise LedgerError(
                f"the ledger does not add up: {self.sampled} tokens sampled, {self.trained} trained, "
                f"left out: {self.left_out or 'none'}"
            )


@dataclass(slots=True)
class Trace:
    """One sequence to train on; all lists over `completion_ids` have its length C."""

    session_id: str
    trace_id: str
    """The session's and the last call's id: unique in a run, and the same however the calls were ordered."""
    call_ids: list[str]
    """The path from the root call to the last one."""
    prompt_ids: list[int]
    """The root call's prompt, shape (P,)."""
    completion_ids: list[int]
    """Everything after it: what the path's calls sampled and what came between, shape (C,)."""
    completion_mask: list[int]
    """1 where the policy sampled the token and this trace trains it, else 0."""
    logprobs: list[float]
    """Natural-log probabilities under the sampling policy; 0.0 where the mask is 0."""
    weight_versions: list[VersionSpan]
    """Which weights sampled the tokens with mask 1, as positions in `completion_ids`."""
    role: CallRole = "agent"
    """That of the last call."""
    group_id: str = ""
    task_id: str = ""
    harness: str = ""
    reward: float | None = None
    shared_trace_id: str | None = None
    """Strategy `tree`: the earlier trace of the session with which this one shares its longest beginning."""
    shared_tokens: int = 0
    """The length of that beginning, in tokens of `prompt_ids` and `completion_ids`."""


@dataclass(slots=True)
class Batch:
    """What a trainer steps on: traces, and the reward of every session that has one.

    A session whose calls were all left out has no trace; its reward still counts in its group's mean.
    """

    traces: list[Trace]
    rewards: dict[str, tuple[str, float]]
    """Session id -> (group id, reward)."""


TRAINED_ROLES: tuple[CallRole, ...] = ("agent", "subagent", "compaction")


def build_traces(
    calls: Sequence[Call],
    strategy: Strategy,
    *,
    roles: Collection[CallRole] = TRAINED_ROLES,
    max_tokens: int | None = None,
) -> tuple[list[Trace], Ledger]:
    """Traces of one session's calls, in the order in which a depth-first walk of the call tree reaches their leaves.

    A sampled token belongs to the first trace that reaches it and is context, with mask 0, in the later ones. So are
    the tokens of a left-out call with trained descendants. The order of `calls` does not matter: `started_at` does,
    then `call_id`.

    Raises `ValueError` for calls of several sessions, a repeated call id or an unknown strategy, and `LedgerError`
    when the traces do not train exactly the tokens that the ledger says.
    """
    calls = sorted(calls, key=lambda call: (call.started_at, call.call_id))
    _require_one_session(calls)
    parents, left_out = link_calls(calls)
    left_out = [
        reason or (None if call.role in roles else call.role) for call, reason in zip(calls, left_out, strict=True)
    ]
    ledger = Ledger()
    trained = []
    for i, (call, reason) in enumerate(zip(calls, left_out, strict=True)):
        ledger += _account(len(call.completion_ids), reason)
        if reason is None:
            trained.append(i)
    ledger.check()

    if strategy == "per_request":
        paths: Iterable[list[int]] = ([i] for i in trained)
    elif strategy == "prefix_merging":
        paths = _paths(parents, trained)
    else:
        raise ValueError(f"unknown strategy {strategy!r}: choose per_request or prefix_merging")
    traces = []
    unowned = set(trained)
    for path in paths:
        traces.append(_trace([calls[i] for i in path], [calls[i] for i in path if i in unowned]))
        unowned.difference_update(path)
    masked = sum(sum(trace.completion_mask) for trace in traces)
    if unowned or masked != ledger.trained:
        raise LedgerError(f"the traces train {masked} tokens, the ledger says {ledger.trained}")
    return traces, ledger


def link_calls(calls: Sequence[Call]) -> tuple[list[int | None], list[LeftOut | None]]:
    """The call tree of one session's calls, which are in the order in which they started.

    Returns the index of each call's parent, None for a root; and why each call is not trained, None when it is.
    """
    parents, superseded = _link(calls)
    return parents, [_left_out(call) or ("superseded" if i in superseded else None) for i, call in enumerate(calls)]


def label(traces: Iterable[Trace], session: Session) -> None:
    """Give the traces of a session its group and its reward."""
    for trace in traces:
        trace.group_id = session.group_id
        trace.task_id = session.task_id
        trace.harness = session.harness
        trace.reward = session.reward


def leave_out_unrewarded(traces: Sequence[Trace], ledger: Ledger) -> tuple[list[Trace], Ledger]:
    """The traces that have a reward, and the ledger with the tokens of the others under `no_reward`.

    `ledger` is that of `traces`. Traces that were never labelled, because their session has no row, have no reward.
    """
    rewarded = [trace for trace in traces if trace.reward is not None]
    tokens = sum(sum(trace.completion_mask) for trace in traces if trace.reward is None)
    moved = Ledger(trained=-tokens, left_out={"no_reward": tokens})
    ledger = ledger + moved
    ledger.check()
    return rewarded, ledger


def _require_one_session(calls: Sequence[Call]) -> None:
    sessions = {call.session_id for call in calls}
    if len(sessions) > 1:
        raise ValueError(f"traces are built for one session at a time, these calls are of {sorted(sessions)}")
    if repeated := [call_id for call_id, n in Counter(call.call_id for call in calls).items() if n > 1]:
        raise ValueError(f"session {calls[0].session_id} has several calls named {repeated[0]}")


def _left_out(call: Call) -> LeftOut | None:
    """Why the call by itself cannot be trained on, or None; a call that sampled nothing has no log-probabilities."""
    if call.status != "completed":
        return call.status
    if not call.logprobs:
        return "missing_logprobs"
    if call.violation or find_violation(call.completion_ids, call.logprobs, call.weight_versions):
        return "violation"
    if call.role == "auxiliary":
        return "auxiliary"
    return None


def _account(tokens: int, reason: LeftOut | None) -> Ledger:
    return Ledger(tokens, tokens) if reason is None else Ledger(tokens, left_out={reason: tokens})


class _Sequences:
    """Token sequences that are prefixes of the calls' tokens. A hash proposes a match, the tokens decide."""

    def __init__(self, tokens: Sequence[npt.NDArray[np.int32]]) -> None:
        self._tokens = tokens
        self._by_hash: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def find(self, i: int, length: int, hashes: npt.NDArray[np.uint64]) -> int | None:
        """The call that was added with a sequence equal to the first `length` tokens of call `i`."""
        for j in self._by_hash.get((length, int(hashes[length])), ()):
            if np.array_equal(self._tokens[j][:length], self._tokens[i][:length]):
                return j
        return None

    def add(self, i: int, length: int, hashes: npt.NDArray[np.uint64]) -> int:
        """Add the first `length` tokens of call `i`; returns the first call that was added with this sequence."""
        known = self.find(i, length, hashes)
        if known is None:
            self._by_hash[length, int(hashes[length])].append(i)
        return i if known is None else known


def _link(calls: Sequence[Call]) -> tuple[list[int | None], set[int]]:
    """The parent of each call, and the superseded ones; `calls` are in the order in which they started.

    Among earlier calls with the same tokens the recorded parent is the parent, else the first. A call is superseded
    when nothing extends it while something extends a sibling with the same prompt: the harness asked again.
    """
    tokens = [np.array(call.prompt_ids + call.completion_ids, dtype=np.int32) for call in calls]
    powers = np.cumprod(np.full(max(map(len, tokens), default=0), HASH_BASE))
    sequences, prompts = _Sequences(tokens), _Sequences(tokens)
    lengths: list[int] = []
    known_lengths: set[int] = set()
    # call id -> the first call with the same tokens
    twins: dict[str, int] = {}
    parents: list[int | None] = []
    siblings: defaultdict[tuple[int | None, int], list[int]] = defaultdict(list)
    index = {call.call_id: i for i, call in enumerate(calls)}
    for i, call in enumerate(calls):
        # hashes[n] is that of the first n tokens: sum of token[k] * base ** (k + 1) modulo 2 ** 64
        hashes = np.zeros(len(tokens[i]) + 1, dtype=np.uint64)
        np.cumsum(tokens[i].astype(np.uint64) * powers[: len(tokens[i])], out=hashes[1:])
        prompt_length = len(call.prompt_ids)
        candidates = (lengths[k] for k in range(bisect_right(lengths, prompt_length) - 1, -1, -1))
        matches = (sequences.find(i, length, hashes) for length in candidates)
        parent = next((match for match in matches if match is not None), None)
        if parent is not None and call.parent_id is not None and twins.get(call.parent_id) == parent:
            parent = index[call.parent_id]
        parents.append(parent)
        siblings[parent, prompts.add(i, prompt_length, hashes)].append(i)
        twins[call.call_id] = sequences.add(i, len(tokens[i]), hashes)
        if len(tokens[i]) not in known_lengths:
            known_lengths.add(len(tokens[i]))
            insort(lengths, len(tokens[i]))
    extended = set(parents)
    superseded: set[int] = set()
    for same_prompt in siblings.values():
        if not extended.isdisjoint(same_prompt):
            superseded.update(i for i in same_prompt if i not in extended)
    return parents, superseded


def _paths(parents: Sequence[int | None], trained: Sequence[int]) -> Iterator[list[int]]:
    """Root-to-leaf paths, depth first, of the tree without the branches that hold no trained call."""
    needed = set(trained)
    children: defaultdict[int | None, list[int]] = defaultdict(list)
    for i in reversed(range(len(parents))):
        if i in needed:
            children[parents[i]].append(i)
            if (parent := parents[i]) is not None:
                needed.add(parent)
    stack = children[None]
    while stack:
        node = stack.pop()
        if node in children:
            stack.extend(children[node])
            continue
        path = []
        ancestor: int | None = node
        while ancestor is not None:
            path.append(ancestor)
            ancestor = parents[ancestor]
        yield path[::-1]


def _trace(path: Sequence[Call], owned: Sequence[Call]) -> Trace:
    """The tokens of a path, with the completions of the `owned` calls trained."""
    root, last = path[0], path[-1]
    start = len(root.prompt_ids)
    completion_ids = last.prompt_ids[start:] + last.completion_ids
    mask = [0] * len(completion_ids)
    logprobs = [0.0] * len(completion_ids)
    versions = []
    for call in owned:
        begin = len(call.prompt_ids) - start
        end = begin + len(call.completion_ids)
        mask[begin:end] = [1] * (end - begin)
        logprobs[begin:end] = call.logprobs
        versions += [VersionSpan(span.version, begin + span.start, begin + span.end) for span in call.weight_versions]
    return Trace(
        session_id=last.session_id,
        trace_id=f"{last.session_id}/{last.call_id}",
        call_ids=[call.call_id for call in path],
        prompt_ids=root.prompt_ids,
        completion_ids=completion_ids,
        completion_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        role=last.role,
    )
