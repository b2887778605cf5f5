"""Calls for tests: hand-made ones, and random forests with the expected traces computed from the
definitions."""

from collections import Counter
from datetime import timedelta
from typing import get_args

from hypothesis import strategies as st

from rolltap.addons.store.records import CallKind, VersionSpan
from rolltap.trainer.traces import sessions
from tests.factories import START, make_call

STRATEGIES = ["per_request", "prefix_merging", "tree"]
ROLES = ["agent", "subagent", "compaction", "auxiliary"]


def follow(number, parent, new_ids, completion_ids, **fields):
    """Return a call that continues `parent`."""
    return make_call(
        number, parent.prompt_ids + parent.completion_ids + new_ids, completion_ids, **fields
    )


def forget_a_call(monkeypatch):
    """Patch in a bug: traces are built without the first call."""
    whole = sessions.trace_calls
    monkeypatch.setattr(
        sessions, "trace_calls", lambda calls, *args, **kwargs: whole(calls[1:], *args, **kwargs)
    )


# few ids make coincidences likely; 1, 256 and 2 ** 24 have the same bytes at other positions
TOKEN = st.sampled_from([0, 1, 256, 2**24])
TOKENS = st.lists(TOKEN, max_size=3)


@st.composite
def version_spans(draw, length):
    """Draw one to three spans of weight versions that cover a completion."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=2)))
    return [
        VersionSpan(version=str(i), start=start, end=end)
        for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True))
    ]


@st.composite
def forests(draw):
    """Draw the calls of a session: continuations, branches, retries, twins, prompts that diverge
    from earlier ones."""
    calls = []
    for number in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from(calls)) if calls else make_call(0, [], [])
        known = earlier.prompt_ids + earlier.completion_ids
        shape = draw(
            st.sampled_from(["follow", "follow", "follow", "root", "retry", "twin", "rendered"])
        )
        completion_ids = draw(st.lists(TOKEN, max_size=5))
        match shape:
            case "follow":
                prompt_ids = known + draw(TOKENS)
            case "root":
                prompt_ids = [draw(TOKEN), *draw(TOKENS)]
            case "retry":
                prompt_ids = list(earlier.prompt_ids)
            case "twin":
                prompt_ids, completion_ids = list(earlier.prompt_ids), list(earlier.completion_ids)
            case "rendered":
                prompt_ids = known[: draw(st.integers(0, len(known)))] + draw(TOKENS)
        fault = draw(
            st.sampled_from(
                [{}] * 6
                + [
                    {"logprobs": []},
                    {"status": "aborted"},
                    {"status": "failed"},
                    {"violation": "damaged"},
                ]
            )
        )
        calls.append(
            make_call(
                number,
                prompt_ids or [0],
                completion_ids,
                parent_id=draw(
                    st.sampled_from(
                        [None, "unknown", earlier.call_id, *(call.call_id for call in calls)]
                    )
                ),
                role=draw(st.sampled_from(["agent", "agent", *ROLES])),
                kind=draw(st.sampled_from(get_args(CallKind))),
                weight_versions=draw(version_spans(len(completion_ids))),
                # several calls may start in the same instant
                started_at=START + timedelta(seconds=number // 2),
                **fault,
            )
        )
    return calls


def selections():
    """Return a strategy of `roles` and `max_tokens` of `build_traces`."""
    return st.fixed_dictionaries(
        {}, optional={"roles": st.sets(st.sampled_from(ROLES)), "max_tokens": st.integers(1, 16)}
    )


def parents_by_definition(calls):
    """Return a map of call ids to the parents' call ids or None, by comparing every pair."""
    calls = sorted(calls, key=lambda call: (call.started_at, len(call.prompt_ids), call.call_id))
    parents = {}
    for i, call in enumerate(calls):
        sequences = {
            earlier.call_id: earlier.prompt_ids + earlier.completion_ids for earlier in calls[:i]
        }
        fitting = {k: ids for k, ids in sequences.items() if call.prompt_ids[: len(ids)] == ids}
        longest = [k for k, ids in fitting.items() if len(ids) == max(map(len, fitting.values()))]
        parents[call.call_id] = (
            call.parent_id if call.parent_id in longest else next(iter(longest), None)
        )
    return parents


def superseded_by_definition(calls, parents):
    """Return the ids of the calls that no call extends, while a call extends a sibling with the
    same prompt."""
    by_id = {call.call_id: call for call in calls}
    extended = set(parents.values())
    return {
        call_id
        for call_id in by_id
        if call_id not in extended
        and any(
            parents[sibling] == parents[call_id]
            and by_id[sibling].prompt_ids == by_id[call_id].prompt_ids
            for sibling in by_id
            if sibling in extended
        )
    }


def account_by_definition(calls, *, roles=("agent", "subagent", "compaction"), max_tokens=None):
    """Return the (call id, position in its completion) of the trained tokens, and the count left
    out by reason."""
    superseded = superseded_by_definition(calls, parents_by_definition(calls))
    trained, left_out = set(), Counter()
    for call in calls:
        for i in range(len(call.completion_ids)):
            if call.status != "completed":
                left_out[call.status] += 1
            elif not call.logprobs:
                left_out["missing_logprobs"] += 1
            elif call.violation:
                left_out["violation"] += 1
            elif call.role not in roles:
                left_out[call.role] += 1
            elif call.call_id in superseded:
                left_out["superseded"] += 1
            elif max_tokens is not None and len(call.prompt_ids) + i >= max_tokens:
                left_out["over_length"] += 1
            else:
                trained.add((call.call_id, i))
    return trained, dict(left_out)


def trained_tokens(traces, calls):
    """Return a map of trained tokens: (call id, position in its completion) -> (trace id, position
    in the trace).

    Tokens are identified by their log-probabilities. Raises AssertionError when a token is trained
    twice.
    """
    names = {
        logprob: (call.call_id, i) for call in calls for i, logprob in enumerate(call.logprobs)
    }
    found = {}
    for trace in traces:
        for k, (masked, logprob) in enumerate(
            zip(trace.completion_mask, trace.logprobs, strict=True)
        ):
            if masked:
                assert names[logprob] not in found
                found[names[logprob]] = (trace.trace_id, len(trace.prompt_ids) + k)
    return found


def common(a, b):
    """Return the length of the common prefix, by comparing token by token."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
