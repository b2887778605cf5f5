"""The JSON that the page shows, made of recorded rows: of the run, of a session, of a call. Pure
functions."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.store.records import CallRole, Session
from rolltap.trainer.runs.views.calls import show_call
from rolltap.trainer.runs.views.compare import compare_sessions
from rolltap.trainer.runs.views.inspect import show_session
from rolltap.trainer.runs.views.report import summarize_digests
from rolltap.trainer.runs.views.text import Piece, TokenText
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import RewardRules, label_session, session_reward, suspected
from rolltap.trainer.traces.trained import TrainedSession
from rolltap.trainer.traces.tree import path_to
from rolltap.trainer.training.step.advantages import rewards_differ
from rolltap.trainer.viewer.reader import Entry, LoadedSession, Overview, UnknownError

JSON = dict[str, Any]
_LANES: dict[CallRole, str] = {
    "agent": "main",
    "compaction": "compaction",
    "auxiliary": "side questions",
}
_OF_ROW = (
    "session_id",
    "task_id",
    "harness",
    "status",
    "error",
    "policy_version",
    "started_at",
    "finished_at",
)
_OF_GROUP = ("session_id", "reward", "status", "advantage")
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


def _pick(record: object, names: Sequence[str]) -> JSON:
    return {name: getattr(record, name) for name in names}


def run_json(overview: Overview) -> JSON:
    """Return the summary and the groups of a run. Sessions that were not read count with their rows
    alone."""
    digests = []
    for entry in overview.entries:
        if entry.digest is not None:
            digests.append(entry.digest)
        elif entry.session is not None:
            recorded = RecordedSession(
                session_id=entry.session_id,
                session=entry.session,
                calls=[],
            )
            digests.append(LoadedSession(recorded, [], []).digest())
    summary = summarize_digests(digests, overview.further, overview.trained)
    values = replace(summary, session_rows=[]).to_json()
    del values["session_rows"]
    groups: defaultdict[str, list[JSON]] = defaultdict(list)
    for row in session_rows(overview):
        groups[row["group_id"]].append(row)
    return {
        "read": overview.progress,
        "faults": overview.faults,
        "summary": values,
        "groups": [_group(rows) for rows in groups.values()],
    }


def _group(rows: Sequence[JSON]) -> JSON:
    task_id = ""
    sessions = []
    rewards = []
    given = []
    for row in rows:
        task_id = task_id or row["task_id"]
        sessions.append(row["session_id"])
        rewards.append(row["reward"])
        if row["reward"] is not None:
            given.append(row["reward"])
    return {
        "group_id": rows[0]["group_id"],
        "task_id": task_id,
        "sessions": sessions,
        "rewards": rewards,
        "signal": rewards_differ(given),
    }


def session_rows(overview: Overview) -> list[JSON]:
    """Return a row for each session, in the order in which they started."""
    steps: defaultdict[str, list[TrainedSession]] = defaultdict(list)
    for each in overview.trained:
        steps[each.session_id].append(each)
    started = []
    others = []
    for entry in sorted(overview.entries, key=attrgetter("session_id")):
        row = _session_row(entry, steps[entry.session_id])
        if row["started_at"] is None:
            others.append(row)
        else:
            started.append(row)
    started.sort(key=itemgetter("started_at"))
    return started + others


def _session_row(entry: Entry, steps: Sequence[TrainedSession]) -> JSON:
    session = entry.session or Session(session_id=entry.session_id, status="unknown")
    row: JSON = {
        **dict.fromkeys(_COUNTED),
        **_pick(session, _OF_ROW),
        "group_id": session.group_id or entry.session_id,
        "reward": session_reward(entry.session),
        "suspicions": suspected(entry.session),
        "advantage": None,
        "steps": {},
        "read": entry.digest is not None,
    }
    for step in steps:
        row["steps"][str(step.step)] = list(step.ledger.left_out)
        row["advantage"] = step.advantage
    if entry.digest is not None:
        counts = entry.digest.counts
        events = counts["events"]
        row |= {
            "started_at": entry.digest.started_at,
            "suspicions": entry.digest.row.suspicions,
            "calls": entry.digest.row.calls,
            **asdict(entry.digest.row.ledger),
            "kinds": counts["kinds"],
            "rendered": counts["rendered"],
            "roles": counts["roles"],
            "faults": events["fault"],
            "retries": events["joined"] + events["replayed"],
        }
    elif entry.session is None:
        row["started_at"] = None
    return row


def session_json(run: Path, loaded: LoadedSession, overview: Overview) -> JSON:
    """Return a session with its calls, their new messages and its events."""
    recorded = loaded.recorded
    values = show_session(run, recorded, loaded.events, loaded.trained).to_json()
    for node, call in zip(values["calls"], recorded.calls, strict=True):
        node |= {
            "started_at": call.started_at,
            "first_token_at": call.first_token_at,
            "finished_at": call.finished_at,
            "messages": call.parsed_messages,
            "reply": call.parsed_reply,
        }
    values["lanes"] = _lanes(values["calls"])
    values["events"] = sorted(loaded.events, key=itemgetter("at"))
    groups: defaultdict[str, list[JSON]] = defaultdict(list)
    for row in session_rows(overview):
        members = groups[row["group_id"]]
        members.append({name: row[name] for name in _OF_GROUP})
        if row["session_id"] == recorded.session_id:
            values["group"] = members
    return values


def _lanes(nodes: Sequence[Mapping[str, Any]]) -> list[JSON]:
    """Return the calls of a session by conversation, in the order in which these began.

    The calls of one role are one conversation; of helper agents, those that continue each other. A
    helper whose first call continues the prompt of a call of another role is one of its own.
    """
    lanes: dict[tuple[CallRole, str], JSON] = {}
    began_with: dict[str, str] = {}  # call of a helper -> the first call of its conversation
    for node in nodes:
        call_id = node["call_id"]
        role: CallRole = node["role"]
        first_call = ""
        if role == "subagent":
            first_call = began_with.get(node["parent_id"], call_id)
            began_with[call_id] = first_call
        if (role, first_call) not in lanes:
            helper = f"sub-agent {len(set(began_with.values()))}"
            lanes[role, first_call] = {"name": _LANES.get(role, helper), "role": role, "calls": []}
        lanes[role, first_call]["calls"].append(call_id)
    return list(lanes.values())


def call_json(
    run: Path,
    loaded: LoadedSession,
    call_id: str,
    text: TokenText | str,
    *,
    whole: bool = True,
) -> JSON:
    """Return a call with its tokens and their text. Pieces of the prompt end where an earlier
    call's tokens do.

    Without `whole` it has only the prompt's tokens after the parent's. Raises `UnknownError`.
    """
    calls = loaded.recorded.calls
    ids = [call.call_id for call in calls]
    if call_id not in ids:
        raise UnknownError(f"the session has no call {call_id[:200]!r}: go back to the session")
    number = ids.index(call_id)
    call = calls[number]
    parents, reasons = loaded.classified
    parent_id = None
    sampled = []
    cuts = [0]
    for each in path_to(number, parents.__getitem__)[:-1]:
        parent_id = calls[each].call_id
        start = len(calls[each].prompt_ids)
        end = start + len(calls[each].completion_ids)
        sampled.append({"call_id": parent_id, "start": start, "end": end})
        cuts += [start, end]
    if not whole:
        cuts = cuts[-1:]
    cuts.append(len(call.prompt_ids))
    view = show_call(run, calls, number, reasons[number])
    # `to_json` would copy the tokens one by one
    without_tokens = replace(call, prompt_ids=[], completion_ids=[], logprobs=[])
    values = replace(view, call=without_tokens).to_json()
    values["call"] |= {
        "prompt_ids": list(call.prompt_ids[cuts[0] :]),
        "completion_ids": list(call.completion_ids),
        "logprobs": _short_floats(np.array(call.logprobs, np.float32)),
    }
    trained: list[JSON] = []
    for step in loaded.trained:
        trained += _trained_spans(step, call_id)
    differing = ("common", "recorded", "rendered")
    return {
        **values,
        "parent_id": parent_id,
        "prompt_pieces": _pieces(text, call.prompt_ids, cuts),
        "completion_pieces": _pieces(text, call.completion_ids, [0, len(call.completion_ids)]),
        "sampled": sampled,
        "excluded": _excluded(loaded, number),
        "trained": trained,
        "difference_text": _texts(text, values["difference"], differing),
    }


def _pieces(text: TokenText | str, ids: Sequence[int], cuts: Sequence[int]) -> list[Piece] | None:
    if isinstance(text, str):
        return None
    pieces = []
    for start, end in pairwise(cuts):
        pieces += text.pieces(ids[start:end])
    return pieces


def _excluded(loaded: LoadedSession, number: int) -> list[JSON]:
    """Return the parts of a call's completion that are not trained: by the newest step, or as a
    training would leave them out."""
    call = loaded.recorded.calls[number]
    excluded = []
    if loaded.trained:
        for span in loaded.trained[-1].left_out:
            if span.call_id == call.call_id:
                excluded.append(_pick(span, ("start", "end", "reason")))
        return excluded
    _, reasons = loaded.classified
    reason = reasons[number] or label_session(loaded.recorded.session, RewardRules()).reason
    if reason is not None:
        end = len(call.completion_ids)
        excluded.append({"start": 0, "end": end, "reason": reason})
    return excluded


def _texts(text: TokenText | str, tokens: JSON | None, names: Sequence[str]) -> JSON | None:
    if tokens is None or isinstance(text, str):
        return None
    return {name: text.text(tokens[name]) for name in names}


def compare_json(a: LoadedSession, b: LoadedSession, text: TokenText | str) -> JSON:
    """Return the first difference of two sessions."""
    values = compare_sessions(a.recorded, b.recorded).to_json()
    tokens = values["tokens"]
    if tokens is not None:
        tokens["text"] = _texts(text, tokens, ("common", "a", "b"))
    return values


def _trained_spans(step: TrainedSession, call_id: str) -> Iterator[JSON]:
    """Yield the parts of a completion that a step trained, with the trainer's values of their
    tokens."""
    first = 0
    for span in step.spans:
        last = first + span.end - span.start
        if span.call_id == call_id:
            values: JSON = {
                **_pick(step, ("step", "version", "advantage")),
                **_pick(span, ("start", "end")),
                "differences": None,
                "weights": None,
            }
            if step.differences is not None:
                values["differences"] = _short_floats(step.differences[first:last])
            if step.weights is not None:
                values["weights"] = _short_floats(step.weights[first:last])
            yield values
        first = last


def _short_floats(values: NDArray[np.floating[Any]]) -> list[float]:
    """Return the shortest decimals that round to the same values."""
    return [float(text) for text in values.astype(str)]
