"""The JSON that the page shows, made of recorded rows: of the run, of a session, of a call. Pure
functions."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.store.records import CallRole, Session
from rolltap.trainer.runs.views.calls import show_call, tool_names
from rolltap.trainer.runs.views.compare import compare_sessions
from rolltap.trainer.runs.views.inspect import sampling_versions, show_session
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
_OF_CALL = (
    "started_at",
    "first_token_at",
    "finished_at",
    "dialect",
    "model",
    "engine",
    "cached_tokens",
)
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
        "groups": [_group(group_id, rows) for group_id, rows in groups.items()],
    }


def _group(group_id: str, rows: Sequence[JSON]) -> JSON:
    tasks = [row["task_id"] for row in rows if row["task_id"]]
    rewards = [row["reward"] for row in rows]
    return {
        "group_id": group_id,
        "task_id": tasks[0] if tasks else "",
        "sessions": [row["session_id"] for row in rows],
        "rewards": rewards,
        "signal": rewards_differ([reward for reward in rewards if reward is not None]),
    }


def session_rows(overview: Overview) -> list[JSON]:
    """Return a row for each session, in the order in which they started."""
    steps: defaultdict[str, list[TrainedSession]] = defaultdict(list)
    for each in overview.trained:
        steps[each.session_id].append(each)
    rows = [_session_row(entry, steps[entry.session_id]) for entry in overview.entries]
    rows.sort(key=itemgetter("session_id"))
    dated = [row for row in rows if row["started_at"] is not None]
    dated.sort(key=itemgetter("started_at"))
    return dated + [row for row in rows if row["started_at"] is None]


def _session_row(entry: Entry, steps: Sequence[TrainedSession]) -> JSON:
    session = entry.session or Session(session_id=entry.session_id, status="unknown")
    row: JSON = {
        **dict.fromkeys(_COUNTED),
        **_pick(session, _OF_ROW),
        "group_id": session.group_id or entry.session_id,
        "reward": session_reward(entry.session),
        "suspicions": suspected(entry.session),
        "advantage": steps[-1].advantage if steps else None,
        "reason": steps[-1].reason if steps else None,
        "steps": {str(each.step): list(each.ledger.left_out) for each in steps},
        "read": entry.digest is not None,
    }
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
            **_pick(call, _OF_CALL),
            "weight_versions": sampling_versions([call]),
            "messages": call.parsed_messages,
            "reply": call.parsed_reply,
            "tools": tool_names(call),
        }
    rows = {row["session_id"]: row for row in session_rows(overview)}
    group_id = rows[recorded.session_id]["group_id"]
    group = []
    for row in rows.values():
        if row["group_id"] == group_id:
            group.append({name: row[name] for name in _OF_GROUP})
    values["lanes"] = _lanes(values["calls"])
    values["events"] = sorted(loaded.events, key=itemgetter("at"))
    values["group"] = group
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
    run: Path, loaded: LoadedSession, call_id: str, text: TokenText | str, *, whole: bool = True
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
    parents, reasons = loaded.judged
    above = [calls[each] for each in path_to(number, parents.__getitem__)[:-1]]
    sampled = []
    cuts = [0]
    for each in above:
        start = len(each.prompt_ids)
        end = start + len(each.completion_ids)
        sampled.append({"call_id": each.call_id, "start": start, "end": end})
        cuts += [start, end]
    if not whole:
        cuts = cuts[-1:]
    prompt_ids = list(call.prompt_ids)
    cuts.append(len(prompt_ids))
    prompt_pieces: list[Piece] | None = None
    completion_pieces: list[Piece] | None = None
    if isinstance(text, TokenText):
        completion_pieces = text.pieces(call.completion_ids)
        prompt_pieces = []
        for start, end in pairwise(cuts):
            prompt_pieces += text.pieces(prompt_ids[start:end])
    view = show_call(run, calls, number, reasons[number])
    # `to_json` would copy the tokens one by one
    without_tokens = replace(call, prompt_ids=[], completion_ids=[], logprobs=[])
    values = replace(view, call=without_tokens).to_json()
    values["call"] |= {
        "prompt_ids": prompt_ids[cuts[0] :],
        "completion_ids": list(call.completion_ids),
        "logprobs": _short_floats(np.array(call.logprobs, np.float32)),
    }
    differing = ("common", "recorded", "rendered")
    trained: list[JSON] = []
    for step in loaded.trained:
        trained += _trained_spans(step, call_id)
    return {
        **values,
        "parent_id": above[-1].call_id if above else None,
        "prompt_pieces": prompt_pieces,
        "completion_pieces": completion_pieces,
        "sampled": sampled,
        "excluded": _excluded(loaded, number),
        "trained": trained,
        "difference_text": _texts(text, values["difference"], differing),
    }


def _excluded(loaded: LoadedSession, number: int) -> list[JSON]:
    """Return the parts of a call's completion that are not trained: by the newest step, or as a
    training would leave them out."""
    call = loaded.recorded.calls[number]
    if loaded.trained:
        spans = [span for span in loaded.trained[-1].left_out if span.call_id == call.call_id]
        return [_pick(span, ("start", "end", "reason")) for span in spans]
    _, reasons = loaded.judged
    reason = reasons[number] or label_session(loaded.recorded.session, RewardRules()).reason
    if reason is None:
        return []
    return [{"start": 0, "end": len(call.completion_ids), "reason": reason}]


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
            differences = weights = None
            if step.differences is not None:
                differences = _short_floats(step.differences[first:last])
            if step.weights is not None:
                weights = _short_floats(step.weights[first:last])
            yield {
                **_pick(step, ("step", "version", "advantage")),
                **_pick(span, ("start", "end")),
                "differences": differences,
                "weights": weights,
            }
        first = last


def _short_floats(values: NDArray[np.floating[Any]]) -> list[float]:
    """Return the shortest decimals that round to the same values."""
    return [float(text) for text in values.astype(str)]
