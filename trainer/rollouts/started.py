"""The event `session_started`: a session that has one and no row was interrupted."""

import json
from collections.abc import Mapping
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from rolltap.addons.store.records import Event, Session
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.traces.reader import load_sessions

_FIELDS = (
    *("task_id", "group_id", "harness", "policy_version", "harness_version"),
    *("program_digest", "preset_digest", "task_digest", "runtime", "image_digest"),
)
"""Fields of a session's row that are known before it runs."""


def started_event(session: Session, key: Mapping[str, str] | None = None) -> Event:
    """Return the event of a session's start. `key` has the digests of the parts of its group's key."""
    detail: dict[str, object] = {name: value for name in _FIELDS if (value := getattr(session, name))}
    if key:
        detail["key"] = dict(key)
    return Event(
        kind="session_started", session_id=session.session_id, at=session.started_at, detail=json.dumps(detail)
    )


def group_keys(run: Path) -> dict[str, Mapping[str, str]]:
    """Return task id -> the digests of the parts of the key that its newest session was started with.

    Raises `RunError` when the folder cannot be read.
    """
    begun = [row for row in read_rows(run, "events") if row["kind"] == "session_started"]
    details = [json.loads(row["detail"]) for row in sorted(begun, key=itemgetter("at"))]
    return {detail["task_id"]: detail["key"] for detail in details if "key" in detail}


def interrupted_sessions(run: Path) -> list[Session]:
    """Return a row `cancelled` for each session of a run that was begun and has none, in the order of their starts.

    Call it while nothing else runs sessions in the folder: those that run would be taken for interrupted ones. Raises
    `RunError` when the folder cannot be read.
    """
    ended = load_sessions(run).keys()
    begun = [row for row in read_rows(run, "events") if row["kind"] == "session_started"]
    return [
        _interrupted(row["session_id"], row["at"], row["detail"])
        for row in sorted(begun, key=itemgetter("at"))
        if row["session_id"] not in ended
    ]


def _interrupted(session_id: str, at: datetime, detail: str) -> Session:
    fields = json.loads(detail)
    known = {name: fields[name] for name in _FIELDS if name in fields}
    error = "it was running when the rollout was killed"
    return Session(session_id=session_id, status="cancelled", error=error, started_at=at, **known)
