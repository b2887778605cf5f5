"""The suspicions of a recorded session, whether it runs or has ended."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rolltap.trainer.runs.suspicions.rules import Asked, Seen, find_suspicions
from rolltap.trainer.runs.suspicions.shell import read_acts
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows

CALL_COLUMNS = ("started_at", "finished_at", "status", "reply")
EVENT_COLUMNS = ("kind", "host", "at")
_NOT_SERVED = ("refused", "uncaptured", "unauthorised")


def suspicions(
    rows: SessionRows, session_id: str, task: Task | None = None, evidence: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Return rule -> how often the session has matched it so far.

    `evidence` is the judge's (`Judged.evidence`), None before it has judged. Raises `RunError` and `OSError` when the
    folder cannot be read.
    """
    calls = rows.of("calls", session_id, CALL_COLUMNS)
    return recorded_suspicions(calls, rows.of("events", session_id, EVENT_COLUMNS), task, evidence)


def recorded_suspicions(
    calls: Iterable[tuple[Any, ...]],
    events: Sequence[tuple[Any, ...]],
    task: Task | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Return the suspicions of rows: values of `CALL_COLUMNS` and `EVENT_COLUMNS`, in any order.

    Only completed calls count: the harness got no tool call of another one.
    """
    whole = [(start, end, json.loads(reply)) for start, end, status, reply in calls if _is_whole(status, reply)]
    replies = sorted(whole, key=lambda call: call[0])
    acting = [end or start for start, end, reply in replies if reply.get("tool_calls")]
    first: datetime | None = min(acting, default=None)
    requests = [
        Asked(kind, host or "", at)
        for kind, host, at in events
        if kind in _NOT_SERVED and first is not None and at >= first
    ]
    acts = read_acts(reply for _, _, reply in replies)
    return find_suspicions(Seen(requests=requests, acts=acts, evidence=evidence or {}, task=task))


def _is_whole(status: str, reply: str | None) -> bool:
    return status == "completed" and reply is not None
