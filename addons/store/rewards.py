"""Rewards that a user gives: a new row of a session with the reward. The earlier rows stay."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import (
    DIGEST,
    SESSION_JSON,
    SESSION_SCHEMA,
    Session,
    SessionStatus,
)
from rolltap.addons.store.rows import FIRST_VERSION_COLUMNS, first_version
from rolltap.addons.store.staging import locked
from rolltap.addons.store.tables import RunWriter, read_rows
from rolltap.addons.store.untrusted import LARGEST_NUMBER

_NAME = 200
"""Maximum number of characters of the names of tasks, groups and parts."""
_ENDED: tuple[SessionStatus, ...] = ("completed", "failed", "timeout", "budget")
"""Outcomes that a session has by itself, whatever its judge says."""
_CLOSED: frozenset[SessionStatus] = frozenset({"infrastructure", "diverged", "cancelled"})
"""Outcomes that a reward does not change: the agent did not do the task."""


@dataclass(slots=True, kw_only=True)
class GivenReward:
    """A reward that somebody gave. Raises `InputError` for values that are no rewards.

    Attributes:
        value: A finite number.
        parts: Name -> finite number.
        task: Task of the session; empty to leave it as it is.
        group: Group of the session; empty to leave it as it is. A session in a group of its own
            joins that of `task`.
        source: Who gave it, for the evidence.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    task: str = ""
    group: str = ""
    source: str

    def __post_init__(self) -> None:
        self.value = finite(self.value, "the reward")
        if not isinstance(self.parts, Mapping):
            raise InputError(f"parts={self.parts!r}: give an object of names and numbers")
        for name in (*self.parts, self.task, self.group):
            if not isinstance(name, str) or len(name) > _NAME or not name.isprintable():
                fix = f"give printable text of at most {_NAME} characters"
                raise InputError(f"{str(name)[:_NAME]!r} is no name: {fix}")
        self.parts = {name: finite(each, f"the part {name!r}") for name, each in self.parts.items()}

    @classmethod
    def parse(cls, text: bytes | str, source: str) -> "GivenReward":
        """Return the reward in a JSON object with the keys `reward`, `parts`, `task` and `group`.

        Only `reward` is required. Raises `InputError` for anything else.
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the reward is not JSON: {error}") from error
        known = {"reward", "parts", "task", "group"}
        if not isinstance(given, dict) or "reward" not in given or given.keys() - known:
            keys = "the key reward, and no others than parts, task and group"
            raise InputError(f"give a JSON object with {keys}")
        return cls(value=given.pop("reward"), source=source, **given)


def session_rows(run: Path, session_id: str) -> list[Session]:
    """Return the rows of a session, the one that counts last.

    Raises `RunError` when the folder cannot be read.
    """
    rows = [make_session(row) for row in read_rows(run, "sessions", [session_id])]
    return sorted(rows, key=lambda session: session.revision)


def make_session(row: Mapping[str, Any]) -> Session:
    """Return the session in a row of `SESSION_SCHEMA`.

    A JSON column that no writer wrote stays text: see `verify`.
    """
    fields = {name: row[name] for name in SESSION_SCHEMA.names if name != DIGEST}
    for name in SESSION_JSON:
        with suppress(TypeError, ValueError):
            fields[name] = json.loads(row[name])
    return Session(**fields)


def give_reward(
    writer: RunWriter,
    session_id: str,
    given: GivenReward,
    *,
    change: bool = False,
) -> Session:
    """Add a row of the session with the reward to the run of `writer`, and return it.

    Raises `InputError` as `rewarded`, when the run has no such session, and when a rollout has not
    ended it; `RunError` and `OSError` when the folder cannot be read or written.
    """
    with locked(writer.run, wait=True):
        rows = session_rows(writer.run, session_id)
        calls = list(read_rows(writer.run, "calls", [session_id]))
        if not rows and not calls:
            raise InputError(f"{writer.run} has no session {session_id!r}")
        if not rows:
            for event in read_rows(writer.run, "events", [session_id]):
                if event["kind"] == "session_started":
                    why = "the rollout that started it has not ended it"
                    raise InputError(f"session {session_id}: {why}")
        session = rewarded(session_id, rows, calls, given, change=change)
        writer.add_session(session)
    return session


def rewarded(
    session_id: str,
    rows: Sequence[Session],
    calls: Sequence[Mapping[str, Any]],
    given: GivenReward,
    *,
    change: bool,
) -> Session:
    """Return the row of a session with the reward.

    `rows` are its earlier ones, `calls` those of its calls. Raises `InputError` without a completed
    call, for a session of which the agent could not do the task, and, unless `change`, when it has
    a reward.
    """
    session = f"session {session_id}"
    if not any(call["status"] == "completed" for call in calls):
        why = "a reward would say nothing about the policy"
        raise InputError(f"{session} has no completed call: {why}")
    before = rows[-1] if rows else _unknown(session_id, calls)
    if before.status in _CLOSED:
        raise InputError(f"{session} has the status {before.status}, and no reward: {before.error}")
    if before.reward is not None and not change:
        fix = "replace it on purpose, with --change (from Python: change=True)"
        raise InputError(f"{session} has the reward {before.reward:g} already: {fix}")
    group = given.group
    if not group and before.group_id in ("", session_id):
        group = given.task
    return replace(
        before,
        status=judged_status(before),
        error=None if before.status == "unjudged" else before.error,
        reward=given.value,
        parts=dict(given.parts),
        evidence={**before.evidence, "reward_from": given.source},
        task_id=given.task or before.task_id,
        group_id=group or before.group_id,
        revision=before.revision + 1,
    )


def _unknown(session_id: str, calls: Sequence[Mapping[str, Any]]) -> Session:
    """Return the row before the first of a session of which only calls were recorded."""
    ends = [call["finished_at"] for call in calls if call["finished_at"]]
    return Session(
        session_id=session_id,
        status="unknown",
        revision=-1,
        policy_version=first_version(map(itemgetter(*FIRST_VERSION_COLUMNS), calls)),
        started_at=min(call["started_at"] for call in calls),
        finished_at=max(ends, default=None),
    )


def judged_status(session: Session) -> SessionStatus:
    """Return the outcome of a session that has a reward now.

    That of an unjudged one is in its evidence (`ended`). A program that rolltap did not stop has
    only an exit status.
    """
    if session.status == "unknown":
        return "completed"
    if session.status != "unjudged":
        return session.status
    for status in _ENDED:
        if status == session.evidence.get("ended"):
            return status
    if session.exit_status is None:
        return "timeout"
    return "failed" if session.exit_status else "completed"


def finite(value: object, what: str) -> float:
    """Return a number of at most `LARGEST_NUMBER` as a float.

    Raises `InputError`, which names `what`, for other values.
    """
    number = math.inf
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if abs(number) <= LARGEST_NUMBER:
        return float(number)
    fix = f"give a finite number, of at most {LARGEST_NUMBER:g}"
    raise InputError(f"{what} is {str(value)[:_NAME]}: {fix}")
