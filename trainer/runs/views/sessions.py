"""Sessions in counts: the rows and digests of which the summary of a run is made."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from rolltap.addons.store.index import SessionIndex, TableScan
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, CallKind, Session
from rolltap.addons.store.rewards import make_session
from rolltap.addons.store.tables import batch_rows
from rolltap.trainer.console import IdTable
from rolltap.trainer.runs.suspicions.rules import CALL_COLUMNS, EVENT_COLUMNS, suspicions
from rolltap.trainer.runs.views.tables import MOST_ROWS, add_rows, cut_note, number
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, cached_prompts
from rolltap.trainer.traces.reader import RecordedSession
from rolltap.trainer.traces.sessions import TracedSession, suspected
from rolltap.trainer.traces.trained import TrainedSession

Counts = dict[str, Counter[str]]
"""Name of a count of `Summary`, or `events` -> its values -> how often they occur."""
_COUNTED = ("calls", "kinds", "rendered", "roles", "violations", "events", "refused")
Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SessionRow:
    """Counts of one session. What is of the session's row is None when only its calls were
    recorded.

    Attributes:
        ledger: As the newest optimizer step trained its tokens; as a training would, when no step
            took the session.
        suspicions: Rule -> count.
        step: The newest optimizer step that took the session, by the table `trained`; None when
            there is none.
        advantage, reason: Those of the session in that step.
    """

    session_id: str
    task_id: str | None
    group_id: str | None
    harness: str | None
    status: str | None
    reward: float | None
    calls: int
    bridged: int
    rendered: int
    ledger: Ledger
    suspicions: dict[str, int]
    step: int | None = None
    advantage: float | None = None
    reason: str | None = None


Sort = Literal["started", "reward", "tokens", "calls", "task"]
"""Orders of sessions: by their start, the highest reward, the most tokens or calls first, or by
task."""


def sort_key(row: SessionRow, sort: Sort) -> Any:
    """Return the key of a row in an order. In `started` they are equal: the rows are in it."""
    match sort:
        case "started":
            return 0
        case "reward":
            return row.reward is None, -(row.reward or 0.0)
        case "tokens":
            return -row.ledger.sampled
        case "calls":
            return -row.calls
        case "task":
            return row.task_id or ""


@dataclass(frozen=True, slots=True)
class SessionDigest:
    """One session in counts, without its calls: the summary of a run is made of these.

    Attributes:
        session: The session's row; None when only its calls were recorded.
        cached: Kind of call -> its prompts.
        started_at: Start of the session; of its first call when it has no row.
    """

    row: SessionRow
    session: Session | None = field(repr=False)
    counts: Counts = field(repr=False)
    cached: dict[CallKind, CachedPrompts] = field(repr=False)
    started_at: datetime


def digest_session(
    traced: TracedSession, events: Events, newest: TrainedSession | None = None
) -> SessionDigest:
    """Return the digest of a session and its `session_events`.

    `newest` is the session in its newest step.
    """
    recorded = traced.recorded
    session = recorded.session
    ledger = traced.rewarded().ledger
    if newest is not None:
        ledger = newest.ledger
    counts = count_rows(recorded.calls, events)
    of_session = ("task_id", "group_id", "harness", "status")
    of_step = ("step", "advantage", "reason")
    row = SessionRow(
        session_id=recorded.session_id,
        **{name: getattr(session, name, None) for name in of_session},
        reward=traced.reward,
        calls=len(recorded.calls),
        bridged=counts["kinds"]["bridged"],
        rendered=counts["kinds"]["rendered"],
        ledger=ledger,
        suspicions=session_suspicions(recorded, events),
        **{name: getattr(newest, name, None) for name in of_step},
    )
    first = session or recorded.calls[0]
    return SessionDigest(row, session, counts, cached_prompts(recorded.calls), first.started_at)


def count_rows(calls: Iterable[Call], events: Events) -> Counts:
    """Count calls and events. A call that began and is not among `calls` is `interrupted`."""
    counts = {name: Counter[str]() for name in _COUNTED}
    ended = set()
    for call in calls:
        ended.add(call.call_id)
        counts["calls"][call.status] += 1
        counts["kinds"][call.kind] += 1
        counts["roles"][call.role] += 1
        if call.kind == "rendered":
            counts["rendered"][_without_ids(call.kind_reason or "")] += 1
        if call.violation:
            counts["violations"][call.violation] += 1
    began = set()
    for event in events:
        counts["events"][event["kind"]] += 1
        if event["kind"] == "refused":
            counts["refused"][event["host"]] += 1
        if event["kind"] == "call_started":
            began.add(event["call_id"])
    counts["events"]["interrupted"] = len(began - ended)
    return counts


def _without_ids(reason: str) -> str:
    """Replace hexadecimal ids and numbers by an ellipsis, so that equal reasons count together."""
    return re.sub(r"\b([0-9a-f]{16,}|[0-9]+)\b", "…", reason)


def session_events(index: SessionIndex, session_id: str | None) -> list[dict[str, Any]]:
    """Return the events of a session, with `EVENT_COLUMNS` and `call_id`; with None those without a
    session."""
    return list(index.rows(session_id, (*EVENT_COLUMNS, "call_id")))


def session_suspicions(recorded: RecordedSession, events: Events) -> dict[str, int]:
    """Return the suspicions in the session's row, or of its calls and events so far."""
    if recorded.session is not None:
        return suspected(recorded.session)
    calls = [tuple(getattr(call, name) for name in CALL_COLUMNS) for call in recorded.calls]
    return suspicions(calls, [tuple(event[name] for name in EVENT_COLUMNS) for event in events])


def session_table(rows: Sequence[SessionRow]) -> Table:
    """Return the table of the first sessions. It has a column of suspicions if one has any."""
    columns = ["session", "status", "reward", "calls", "tokens", "harness", "bridged/rendered"]
    suspected = any(row.suspicions for row in rows)
    if suspected:
        columns.append("suspicions")
    table = IdTable(
        *columns,
        title="sessions",
        box=box.SIMPLE,
        padding=0,
        pad_edge=False,
    )
    table.caption = cut_note(rows, "{}; --json has all")
    for row in rows[:MOST_ROWS]:
        cells = [
            row.session_id,
            row.status or "",
            number(row.reward),
            row.calls,
            row.ledger.sampled,
            row.harness or "",
            f"{row.bridged}/{row.rendered}",
        ]
        if suspected:
            cells.append("/".join(row.suspicions))
        add_rows(table, [cells])
    return table


def follow_sessions(
    run: Path,
    task: str | None = None,
    group: str | None = None,
    *,
    wait: Callable[[], object],
) -> Iterator[Session]:
    """Yield the rows of the sessions, then each further one; `wait` is called when there is none.
    It does not end.

    `task` and `group` are whole ids: no session may have them yet. Raises `RunError` when the
    folder cannot be read.
    """
    read_metadata(run)
    scan = TableScan(run, "sessions")
    seen = set[tuple[str, int]]()  # a compacted file is read again
    while True:
        for commits in scan.new():
            for _, batch in commits.batches:
                for session in map(make_session, batch_rows(batch)):
                    key = (session.session_id, session.revision)
                    if key in seen:
                        continue
                    seen.add(key)
                    if task in (None, session.task_id) and group in (None, session.group_id):
                        yield session
        wait()
