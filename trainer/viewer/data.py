"""The JSON that the page shows, made of recorded rows: of the run, of a session, of a call. Pure
functions."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.store.records import CallRole, Session
from rolltap.trainer.runs.views.compare import compare_sessions
from rolltap.trainer.runs.views.inspect import show_call, show_session, tool_names
from rolltap.trainer.runs.views.report import SessionDigest, digest_session, summarize_digests
from rolltap.trainer.runs.views.text import TokenText
from rolltap.trainer.traces.ledger import TokenSpan
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import (
    RewardRules,
    TraceOptions,
    label_session,
    session_reward,
    suspected,
    trace_session,
)
from rolltap.trainer.traces.trained import TrainedSession
from rolltap.trainer.traces.tree import path_to
from rolltap.trainer.training.step.advantages import rewards_differ
from rolltap.trainer.viewer.reader import Entry, Found, Overview

JSON = dict[str, Any]
_LANES: dict[CallRole, str] = {
    "agent": "main",
    "compaction": "compaction",
    "auxiliary": "side questions",
}
_OF_ROW = ("task_id", "harness", "error", "policy_version", "started_at", "finished_at")
_OF_GROUP = ("session_id", "reward", "status", "advantage")
_OF_CALL = (
    "started_at",
    "first_token_at",
    "finished_at",
    "dialect",
    "model",
    "engine",
    "cached_tokens",
)
_OF_SPAN = ("start", "end", "reason")
_COUNTED = (
    "calls",
    "sampled",
    "trained",
    "left_out",
    "kinds",
    "rendered",
    "roles",
    "faults",
    "retries",
)


def run_json(overview: Overview) -> JSON:
    """Return the summary and the groups of a run. Sessions that were not read count with their rows
    alone."""
    digests = [entry.digest or _unread(entry.session) for entry in overview.entries]
    summary = summarize_digests(filter(None, digests), overview.further, overview.trained)
    values = replace(summary, session_rows=[]).to_json()
    del values["session_rows"]
    groups: defaultdict[str, list[JSON]] = defaultdict(list)
    for row in session_rows(overview):
        groups[row["group_id"]].append(row)
    rows = [
        {
            "group_id": group_id,
            "task_id": next(filter(None, (row["task_id"] for row in members)), ""),
            "sessions": [row["session_id"] for row in members],
            "rewards": [row["reward"] for row in members],
            "signal": rewards_differ(
                [row["reward"] for row in members if row["reward"] is not None]
            ),
        }
        for group_id, members in groups.items()
    ]
    return {"read": overview.progress, "faults": overview.faults, "summary": values, "groups": rows}


def _unread(session: Session | None) -> SessionDigest | None:
    if session is None:
        return None
    recorded = RecordedSession(session_id=session.session_id, session=session, calls=[])
    return digest_session(trace_session(recorded, TraceOptions()), [])


def session_rows(overview: Overview) -> list[JSON]:
    """Return a row for each session, in the order in which they started."""
    steps: defaultdict[str, list[TrainedSession]] = defaultdict(list)
    for each in overview.trained:
        steps[each.session_id].append(each)
    rows = [_session_row(entry, steps[entry.session_id]) for entry in overview.entries]
    return sorted(
        rows, key=lambda row: (row["started_at"] is None, row["started_at"], row["session_id"])
    )


def _session_row(entry: Entry, steps: Sequence[TrainedSession]) -> JSON:
    row: JSON = {
        **dict.fromkeys(_COUNTED),
        **{name: getattr(entry.session, name, None) for name in _OF_ROW},
        "session_id": entry.session_id,
        "group_id": getattr(entry.session, "group_id", "") or entry.session_id,
        "status": getattr(entry.session, "status", "unknown"),
        "reward": session_reward(entry.session),
        "suspicions": suspected(entry.session),
        "advantage": steps[-1].advantage if steps else None,
        "reason": steps[-1].reason if steps else None,
        "steps": {str(each.step): [*each.ledger.left_out] for each in steps},
        "read": entry.digest is not None,
    }
    if entry.digest is not None:
        counts, counted = entry.digest.counts, entry.digest.row
        events = counts["events"]
        row |= {
            "started_at": entry.digest.started_at,
            "suspicions": counted.suspicions,
            "calls": counted.calls,
            **asdict(counted.ledger),
            **{name: counts[name] for name in ("kinds", "rendered", "roles")},
            "faults": events["fault"],
            "retries": events["joined"] + events["replayed"],
        }
    return row


def session_json(run: Path, found: Found, overview: Overview) -> JSON:
    """Return a session with its calls, their new messages and its events."""
    recorded = found.recorded
    values = show_session(run, recorded, found.events, found.trained).to_json()
    for node, call in zip(values["calls"], recorded.calls, strict=True):
        versions = (span.version for span in call.weight_versions if span.end > span.start)
        node |= {
            **{name: getattr(call, name) for name in _OF_CALL},
            "weight_versions": list(dict.fromkeys(versions)),
            "messages": call.parsed_messages,
            "reply": call.parsed_reply,
            "tools": tool_names(call),
        }
    rows = {row["session_id"]: row for row in session_rows(overview)}
    group_id = rows[recorded.session_id]["group_id"]
    group = [
        {name: row[name] for name in _OF_GROUP}
        for row in rows.values()
        if row["group_id"] == group_id
    ]
    events = sorted(found.events, key=itemgetter("at"))
    return {**values, "lanes": lanes(values["calls"]), "events": events, "group": group}


def lanes(nodes: Sequence[Mapping[str, Any]]) -> list[JSON]:
    """Return the calls of a session by conversation, in the order in which these began.

    The calls of one role are one conversation; of helper agents, those that continue each other.
    """
    roles = {node["call_id"]: node["role"] for node in nodes}
    found: dict[str, JSON] = {}
    lane_of: dict[str, JSON] = {}
    helpers = 0
    for node in nodes:
        call_id, role, parent = node["call_id"], node["role"], node["parent_id"]
        # a helper may continue the prompt of a call of another role: it is a conversation of its
        # own
        lane = (
            found.get(role)
            if role != "subagent"
            else lane_of[parent]
            if roles.get(parent) == role
            else None
        )
        if lane is None:
            helpers += role == "subagent"
            lane = {"name": _LANES.get(role, f"sub-agent {helpers}"), "role": role, "calls": []}
            found[role if role != "subagent" else call_id] = lane
        lane_of[call_id] = lane
        lane["calls"].append(call_id)
    return list(found.values())


def call_json(
    run: Path, found: Found, call_id: str, text: TokenText | str, *, whole: bool = True
) -> JSON:
    """Return a call with its tokens and their text. Pieces of the prompt end where an earlier
    call's tokens do.

    Without `whole` it has only the prompt's tokens after the parent's.
    """
    calls = found.recorded.calls
    parents, reasons = found.judged
    place = next(i for i, call in enumerate(calls) if call.call_id == call_id)
    call, reason = (
        calls[place],
        reasons[place] or label_session(found.recorded.session, RewardRules()).reason,
    )
    untrained = (
        [TokenSpan(call_id=call_id, start=0, end=len(call.completion_ids), reason=reason)]
        if reason
        else []
    )
    left_out = found.trained[-1].left_out if found.trained else untrained
    above = [calls[i] for i in path_to(place, parents.__getitem__)[:-1]]
    ends = [
        (len(each.prompt_ids), len(each.prompt_ids) + len(each.completion_ids)) for each in above
    ]
    sampled = [
        {"call_id": each.call_id, "start": a, "end": b}
        for each, (a, b) in zip(above, ends, strict=True)
    ]
    cuts = sorted({0, len(call.prompt_ids), *chain(*ends)})
    start = 0 if whole else max(cuts[:-1], default=0)
    ids = list(call.prompt_ids[start:])
    view = show_call(run, calls, place, reasons[place])
    # token by token `to_json` copies
    values = replace(
        view, call=replace(call, prompt_ids=[], completion_ids=[], logprobs=[])
    ).to_json()
    tokens = {"completion_ids": list(call.completion_ids), "logprobs": short_floats(call.logprobs)}
    values["call"] |= {"prompt_ids": ids, **tokens}
    parts = list(pairwise(cut - start for cut in cuts if cut >= start))
    pieces = text.pieces if isinstance(text, TokenText) else None
    return {
        **values,
        "parent_id": above[-1].call_id if above else None,
        "prompt_pieces": pieces and [piece for a, b in parts for piece in pieces(ids[a:b])],
        "completion_pieces": pieces and pieces(call.completion_ids),
        "sampled": sampled,
        "excluded": [
            {name: getattr(span, name) for name in _OF_SPAN}
            for span in left_out
            if span.call_id == call_id
        ],
        "trained": [part for step in found.trained for part in trained_spans(step, call_id)],
        "difference_text": _texts(text, values["difference"], ("common", "recorded", "rendered")),
    }


def _texts(text: TokenText | str, tokens: JSON | None, names: Sequence[str]) -> JSON | None:
    return (
        {name: text.text(tokens[name]) for name in names}
        if tokens and isinstance(text, TokenText)
        else None
    )


def compare_json(a: Found, b: Found, text: TokenText | str) -> JSON:
    """Return the first difference of two sessions."""
    values = compare_sessions(a.recorded, b.recorded).to_json()
    if tokens := values["tokens"]:
        tokens["text"] = _texts(text, tokens, ("common", "a", "b"))
    return values


def trained_spans(step: TrainedSession, call_id: str) -> Iterator[JSON]:
    """Yield the parts of a completion that a step trained, with the trainer's values of their
    tokens."""
    first = 0
    for span in step.spans:
        last = first + span.end - span.start
        if span.call_id == call_id:
            yield {
                **{name: getattr(step, name) for name in ("step", "version", "advantage")},
                "start": span.start,
                "end": span.end,
                "differences": None
                if step.differences is None
                else short_floats(step.differences[first:last]),
                "weights": None if step.weights is None else short_floats(step.weights[first:last]),
            }
        first = last


def short_floats(values: Sequence[float] | NDArray[np.floating[Any]]) -> list[float]:
    """Return the shortest decimals that round to the same values, which have 32 bits unless they
    are an array."""
    array = values if isinstance(values, np.ndarray) else np.array(values, np.float32)
    return [float(text) for text in array.astype(str)]
