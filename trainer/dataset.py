"""Opens a run folder: its calls with full prompts, and its sessions."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltap.addons.calls import CALL_SCHEMA, SESSION_SCHEMA, Call, Session, VersionSpan
from rolltap.addons.store import RunError, read_rows

Row = dict[str, Any]


@dataclass(slots=True)
class RecordedSession:
    """A session as it stands in the run folder."""

    session_id: str
    session: Session | None
    """None when only its calls were recorded, by a recorder that somebody else started."""
    calls: list[Call]
    """In the order in which they started, each with its full prompt."""


def iter_sessions(run: Path, sessions: Collection[str] | None = None) -> Iterator[RecordedSession]:
    """Every session of a run, one at a time, in the order in which they were first recorded.

    With `sessions`, only those of these session ids. Marks and raises as `load_calls`.
    """
    known = load_sessions(run)
    calls = load_calls(run, sessions)
    for session_id in dict.fromkeys([*calls, *known]):
        if sessions is None or session_id in sessions:
            yield RecordedSession(session_id, known.get(session_id), calls.get(session_id, []))


def load_calls(run: Path, sessions: Collection[str] | None = None) -> dict[str, list[Call]]:
    """Session id -> its calls in the order in which they started, each with its full prompt.

    With `sessions`, only those of these session ids.

    A call whose prompt cannot be rebuilt, because its parent is missing or the lengths disagree, has `violation` set
    and only the tail that was stored as its prompt. Raises `RunError` when the folder cannot be read and when a call
    is recorded twice.
    """
    rows: defaultdict[str, dict[str, Row]] = defaultdict(dict)
    for row in read_rows(run, "calls", sessions):
        session = rows[row["session_id"]]
        if row["call_id"] in session:
            raise RunError(
                f"{run} holds call {row['call_id']} of session {row['session_id']} twice: "
                "remove the calls-*.arrow file that is a copy of another"
            )
        session[row["call_id"]] = row
    return {session_id: _rebuild(session) for session_id, session in rows.items()}


def load_sessions(run: Path) -> dict[str, Session]:
    """Session id -> session; the row that was written last wins. Raises `RunError` when the folder cannot be read."""
    rows = read_rows(run, "sessions")
    return {row["session_id"]: Session(**{name: row[name] for name in SESSION_SCHEMA.names}) for row in rows}


def _rebuild(rows: dict[str, Row]) -> list[Call]:
    """The calls of one session, parents before children, whatever the order of their rows."""
    children: defaultdict[str | None, list[str]] = defaultdict(list)
    for call_id, row in rows.items():
        parent_id = row["parent_id"]
        children[parent_id if parent_id in rows else None].append(call_id)
    calls: dict[str, Call] = {}
    ready = children[None]
    while ready:
        call_id = ready.pop()
        row = rows[call_id]
        calls[call_id] = _call(row, calls.get(row["parent_id"]))
        ready += children[call_id]
    for call_id in rows.keys() - calls.keys():
        # its ancestors form a circle, so that none of them has a beginning
        calls[call_id] = _call(rows[call_id], None)
    return sorted(calls.values(), key=lambda call: (call.started_at, call.call_id))


def _call(row: Row, parent: Call | None) -> Call:
    tail: list[int] = row["prompt_tail_ids"]
    prefix_length = row["prompt_length"] - len(tail)
    prefix = parent.prompt_ids + parent.completion_ids if parent and prefix_length else []
    violation = None
    if row["parent_id"] is not None and parent is None:
        violation = f"parent {row['parent_id']} is not in the run"
    elif len(prefix) != prefix_length:
        violation = f"the prompt has {row['prompt_length']} tokens, but {len(prefix) + len(tail)} can be rebuilt"
    fields = {name: row[name] for name in CALL_SCHEMA.names if name not in ("prompt_length", "prompt_tail_ids")}
    fields |= {
        "prompt_ids": tail if violation else prefix + tail,
        "prefix_length": 0 if violation else prefix_length,
        "logprobs": row["logprobs"] or [],
        "weight_versions": [VersionSpan(**span) for span in row["weight_versions"] or []],
        "violation": row["violation"] or violation,
    }
    return Call(**fields)
