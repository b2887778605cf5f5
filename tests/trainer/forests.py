"""Calls for tests: by hand, and random forests of them with what the traces must hold by definition."""

from collections import Counter
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from rolltap.addons.store.records import Call, VersionSpan
from rolltap.trainer.traces import sessions

START = datetime(2026, 1, 1, tzinfo=UTC)
STRATEGIES = ["per_request", "prefix_merging", "tree"]
ROLES = ["agent", "subagent", "compaction", "auxiliary"]


def make_call(number, prompt_ids, completion_ids, **fields):
    """The `number`-th call to start; every sampled token of a session has its own log-probability."""
    fields.setdefault("logprobs", [-(number + 1) - i / 64 for i in range(len(completion_ids))])
    fields.setdefault("weight_versions", [VersionSpan(version="1", start=0, end=len(completion_ids))])
    fields.setdefault("started_at", START + timedelta(seconds=number))
    return Call(session_id="s", call_id=str(number), prompt_ids=prompt_ids, completion_ids=completion_ids, **fields)


def follow(number, parent, new_ids, completion_ids, **fields):
    """A call that continues `parent`."""
    return make_call(number, parent.prompt_ids + parent.completion_ids + new_ids, completion_ids, **fields)


def forget_a_call(monkeypatch):
    """A bug: traces are built without the first call."""
    whole = sessions.build_traces
    monkeypatch.setattr(sessions, "build_traces", lambda calls, *args, **kwargs: whole(calls[1:], *args, **kwargs))


# few ids, so that much coincides; 1, 256 and 2 ** 24 are the same bytes in another place
TOKEN = st.sampled_from([0, 1, 256, 2**24])
TOKENS = st.lists(TOKEN, max_size=3)


@st.composite
def version_spans(draw, length):
    """Spans of one to three weights that cover a completion."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=2)))
    return [
        VersionSpan(version=str(i), start=start, end=end)
        for i, (start, end) in enumerate(zip([0, *cuts], [*cuts, length], strict=True))
    ]


@st.composite
def forests(draw):
    """Calls of one session: continuations, branches, retries, twins, prompts that leave an earlier call's tokens."""
    calls = []
    for number in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from(calls)) if calls else make_call(0, [], [])
        known = earlier.prompt_ids + earlier.completion_ids
        shape = draw(st.sampled_from(["follow", "follow", "follow", "root", "retry", "twin", "rendered"]))
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
                [{}] * 6 + [{"logprobs": []}, {"status": "aborted"}, {"status": "failed"}, {"violation": "damaged"}]
            )
        )
        calls.append(
            make_call(
                number,
                prompt_ids or [0],
                completion_ids,
                parent_id=draw(st.sampled_from([None, "unknown", earlier.call_id, *(call.call_id for call in calls)])),
                role=draw(st.sampled_from(["agent", "agent", *ROLES])),
                weight_versions=draw(version_spans(len(completion_ids))),
                # several calls may start in the same instant
                started_at=START + timedelta(seconds=number // 2),
                **fault,
            )
        )
    return calls


def selections():
    """`roles` and `max_tokens` of `build_traces`."""
    return st.fixed_dictionaries(
        {}, optional={"roles": st.sets(st.sampled_from(ROLES)), "max_tokens": st.integers(1, 16)}
    )


def parents_by_definition(calls):
    """Call id -> parent's call id or None, by comparing every pair."""
    calls = sorted(calls, key=lambda call: (call.started_at, len(call.prompt_ids), call.call_id))
    parents = {}
    for i, call in enumerate(calls):
        sequences = {earlier.call_id: earlier.prompt_ids + earlier.completion_ids for earlier in calls[:i]}
        fitting = {k: ids for k, ids in sequences.items() if call.prompt_ids[: len(ids)] == ids}
        longest = [k for k, ids in fitting.items() if len(ids) == max(map(len, fitting.values()))]
        parents[call.call_id] = call.parent_id if call.parent_id in longest else next(iter(longest), None)
    return parents


def superseded_by_definition(calls, parents):
    """Ids of the calls that nothing extends while something extends a sibling with the same prompt."""
    by_id = {call.call_id: call for call in calls}
    extended = set(parents.values())
    return {
        call_id
        for call_id in by_id
        if call_id not in extended
        and any(
            parents[sibling] == parents[call_id] and by_id[sibling].prompt_ids == by_id[call_id].prompt_ids
            for sibling in by_id
            if sibling in extended
        )
    }


def account_by_definition(calls, *, roles=("agent", "subagent", "compaction"), max_tokens=None):
    """(call id, position in its completion) of the trained tokens; and how many are left out, by reason."""
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
    """Where each trained token stands: (call id, position in its completion) -> (trace id, position in the trace).

    Fails when a token is trained twice. A log-probability names its token.
    """
    names = {logprob: (call.call_id, i) for call in calls for i, logprob in enumerate(call.logprobs)}
    found = {}
    for trace in traces:
        for k, (masked, logprob) in enumerate(zip(trace.completion_mask, trace.logprobs, strict=True)):
            if masked:
                assert names[logprob] not in found
                found[names[logprob]] = (trace.trace_id, len(trace.prompt_ids) + k)
    return found


def common(a, b):
    """Length of the common beginning, token by token."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
