"""Rewards that a user gives: a new row of a session with the reward. The earlier rows stay."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.addons.store.door import LARGEST_NUMBER
from rolltap.addons.store.records import DIGEST, SESSION_JSON, SESSION_SCHEMA, Session, SessionStatus
from rolltap.addons.store.rows import FIRST_VERSION_COLUMNS, first_version
from rolltap.addons.store.staging import locked
from rolltap.addons.store.tables import RunWriter, read_rows

_NAME = 200
"""Maximum number of characters of the names of tasks, groups and parts."""
_ENDED: tuple[SessionStatus, ...] = ("completed", "failed", "timeout", "budget")
"""Outcomes that a session has by itself, whatever its judge says."""
_CLOSED: frozenset[SessionStatus] = frozenset({"infrastructure", "diverged", "cancelled"})
"""Outcomes that a reward does not change: the agent did not do the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenReward:
    """A reward that somebody gave. Raises `InputError` for values that are no rewards.

    Attributes:
        value: A finite number.
        parts: Name -> finite number.
        task: Task of the session; empty to leave it as it is.
        group: Group of the session; empty to leave it as it is. A session in a group of its own joins that of `task`.
        source: Who gave it, for the evidence.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    task: str = ""
    group: str = ""
    source: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", finite(self.value, "the reward"))
        if not isinstance(self.parts, Mapping):
            raise InputError(f"parts={self.parts!r}: give an object of names and numbers")
        for name in (*self.parts, self.task, self.group):
            if not isinstance(name, str) or len(name) > _NAME or not name.isprintable():
                raise InputError(f"{str(name)[:_NAME]!r} is no name: give printable text of at most {_NAME} characters")
        parts = {name: finite(value, f"the part {name!r}") for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)

    @classmethod
    def parse(cls, text: bytes | str, source: str) -> "GivenReward":
        """Return the reward in a JSON object with the keys `reward`, `parts`, `task` and `group`.

        Only `reward` is required. Raises `InputError` for anything else.
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the reward is not JSON: {error}") from error
        if not isinstance(given, dict) or "reward" not in given or given.keys() - {"reward", "parts", "task", "group"}:
            raise InputError("give a JSON object with the key reward, and no others than parts, task and group")
        return cls(value=given.pop("reward"), source=source, **given)


def session_rows(run: Path, session_id: str) -> list[Session]:
    """Return the rows of a session, the one that counts last. Raises `RunError` when the folder cannot be read."""
    rows = [make_session(row) for row in read_rows(run, "sessions", [session_id])]
    return sorted(rows, key=lambda session: session.revision)


def make_session(row: Mapping[str, Any]) -> Session:
    """Return the session in a row of `SESSION_SCHEMA`. A JSON column that no writer wrote stays text: see `verify`."""
    fields = {name: row[name] for name in SESSION_SCHEMA.names if name != DIGEST}
    for name in SESSION_JSON:
        with suppress(TypeError, ValueError):
            fields[name] = json.loads(row[name])
    return Session(**fields)


def give_reward(writer: RunWriter, session_id: str, given: GivenReward, *, change: bool = False) -> Session:
    """Add a row of the session with the reward to the run of `writer`, and return it.

    Raises `InputError` as `rewarded`, when the run has no such session, and when a rollout has not ended it; `RunError`
    and `OSError` when the folder cannot be read or written.
    """
    with locked(writer.run, wait=True):
        rows = session_rows(writer.run, session_id)
        calls = list(read_rows(writer.run, "calls", [session_id]))
        if not rows and not calls:
            raise InputError(f"{writer.run} has no session {session_id!r}")
        if not rows:
            events = read_rows(writer.run, "events", [session_id])
            if any(event["kind"] == "session_started" for event in events):
                raise InputError(f"session {session_id}: the rollout that started it has not ended it")
        session = rewarded(session_id, rows, calls, given, change=change)
        writer.add_session(session)
    return session


def rewarded(
    session_id: str, rows: Sequence[Session], calls: Sequence[Mapping[str, Any]], given: GivenReward, *, change: bool
) -> Session:
    """Return the row of a session with the reward. `rows` are its earlier ones, `calls` those of its calls.

    Raises `InputError` without a completed call, for a session of which the agent could not do the task, and, unless
    `change`, when it has a reward.
    """
    if not any(call["status"] == "completed" for call in calls):
        raise InputError(f"session {session_id} has no completed call: a reward would say nothing about the policy")
    if rows:
        before = rows[-1]
    else:
        before = Session(
            session_id=session_id,
            status="unknown",
            revision=-1,
            policy_version=first_version(tuple(call[name] for name in FIRST_VERSION_COLUMNS) for call in calls),
            started_at=min(call["started_at"] for call in calls),
            finished_at=max((call["finished_at"] for call in calls if call["finished_at"]), default=None),
        )
    if before.status in _CLOSED:
        raise InputError(f"session {session_id} has the status {before.status}, and no reward: {before.error}")
    if before.reward is not None and not change:
        raise InputError(
            f"session {session_id} has the reward {before.reward:g} already: replace it on purpose, with --change "
            "(from Python: change=True)"
        )
    own_group = before.group_id in ("", session_id)
    return replace(
        before,
        status=judged_status(before),
        error=None if before.status == "unjudged" else before.error,
        reward=given.value,
        parts=dict(given.parts),
        evidence={**before.evidence, "reward_from": given.source},
        task_id=given.task or before.task_id,
        group_id=given.group or (given.task if own_group else "") or before.group_id,
        revision=before.revision + 1,
    )


def judged_status(session: Session) -> SessionStatus:
    """Return the outcome of a session that has a reward now.

    That of an unjudged one is in its evidence (`ended`). A program that rolltap did not stop has only an exit status.
    """
    if session.status != "unjudged":
        return "completed" if session.status == "unknown" else session.status
    ended = session.evidence.get("ended")
    by_exit: SessionStatus = (
        "timeout" if session.exit_status is None else "failed" if session.exit_status else "completed"
    )
    return next((status for status in _ENDED if status == ended), by_exit)


def finite(value: object, what: str) -> float:
    """Return a number as a float. Raises `InputError`, which names `what`, unless it is at most `LARGEST_NUMBER`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= LARGEST_NUMBER:
            return number
    raise InputError(f"{what} is {str(value)[:_NAME]}: give a finite number, of at most {LARGEST_NUMBER:g}")
