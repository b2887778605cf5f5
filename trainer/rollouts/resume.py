"""Resuming a rollout that was stopped or killed. The run folder is all that is known of it.

A session with a row is used again, unless its outcome says nothing of the policy: then it is
started again under the id of the next attempt (`outcomes` says which). One that was begun and has
no row was interrupted: it gets a row `cancelled`.

| id | form |
| --- | --- |
| group | `<task>-<key>.<round>`; the key is 8 hexadecimal characters: see `group_key` |
| session | `<group>-<index>`; of another attempt `<group>-<index>~<number>`: see `SessionName` |
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any

from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.records import Session, SessionStatus
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.names import SessionName, counted
from rolltap.trainer.rollouts.recorder import STARTED_FIELDS
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions

NOT_RUN: frozenset[SessionStatus] = frozenset({"infrastructure", "cancelled"})
"""Outcomes of sessions that did not run to their end."""
STARTED_AGAIN: frozenset[SessionStatus] = NOT_RUN | {"unjudged"}
"""Outcomes that say nothing of the policy. An unjudged session is started again too: its judge may
be fixed by then."""
_ROUND = re.compile(r"(.+)\.(0|[1-9][0-9]*)")
"""A group's id: task and key, and the round."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions to run of one task. A group may have others that were run before."""

    task: Task
    group_id: str
    session_ids: Sequence[str]
    key: Mapping[str, str] = field(default_factory=dict)
    """Part of the group's key -> its digest, as `key_parts`; empty in a training."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters in place of the recorder's, key by key."""
    fork: RecordedFrom | None = None
    """The recorded session that its sessions fork, in place of the recorder's."""
    evaluates: bool = False
    """True for sessions of an evaluation, which are recorded apart from those that train."""


def group_keys(run: Path) -> dict[str, Mapping[str, str]]:
    """Return task id -> the digests of the key of its newest session. Raises `RunError` of the
    folder."""
    keys: dict[str, Mapping[str, str]] = {}
    for row in _started(run):
        detail = json.loads(row["detail"])
        if "key" in detail:
            keys[detail["task_id"]] = detail["key"]
    return keys


def interrupted_sessions(run: Path) -> list[Session]:
    """Return a row `cancelled` for each session of a run that was begun and has none, in the order
    of their starts.

    Call it while nothing else runs sessions in the folder: those that run would be taken for
    interrupted ones. Raises `RunError` when the folder cannot be read.
    """
    ended = load_sessions(run).keys()
    sessions = []
    for row in _started(run):
        if row["session_id"] not in ended:
            sessions.append(_interrupted(row))
    return sessions


def _started(run: Path) -> list[dict[str, Any]]:
    """Return the events of the starts of sessions, in their order."""
    started = [row for row in read_rows(run, "events") if row["kind"] == "session_started"]
    return sorted(started, key=itemgetter("at"))


def _interrupted(row: Mapping[str, Any]) -> Session:
    """Return a row `cancelled` of the session that began with a row `session_started`."""
    session = Session(
        session_id=row["session_id"],
        status="cancelled",
        error="it was running when the rollout was killed",
        started_at=row["at"],
    )
    for name, value in json.loads(row["detail"]).items():
        if name in STARTED_FIELDS:
            setattr(session, name, value)
    return session


def key_parts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the digest of each part of a group's key: 8 hexadecimal characters. The values are of
    JSON."""
    return {name: _digest(value) for name, value in values.items()}


def group_key(parts: Mapping[str, str]) -> str:
    """Return the fingerprint of everything that may change the distribution of a group's sessions,
    by its parts."""
    return _digest(dict(parts))


def _digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


class Recorded:
    """The sessions that a run has: which of a group are used again, and under which ids the others
    are run."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._places: defaultdict[str, list[Session]] = defaultdict(list)
        self._rounds: defaultdict[str, set[int]] = defaultdict(set)
        for session in sessions:
            name = SessionName.parse(session.session_id)
            self._places[name.place].append(session)
            if name.seat is None:
                continue
            found = _ROUND.fullmatch(name.seat.group_id)
            if found is not None:
                self._rounds[found[1]].add(int(found[2]))

    def group(
        self,
        task: Task,
        key: Mapping[str, str],
        sessions: int,
        *,
        further: bool,
    ) -> Group:
        """Return the group to resume: the newest of the task and the key, or with `further` one
        after it.

        A newest one with sessions that did not run to their end is resumed in any case: so the same
        call with `further`, which was stopped, resumes. `key` is of `key_parts`. The session ids
        are those of first attempts.
        """
        base = f"{task.id}-{group_key(key)}"
        newest = max(self._rounds[base], default=-1)
        group = _round(task, base, max(newest, 0), sessions, key)
        if newest < 0 or not further or self._waiting(group, NOT_RUN):
            return group
        return _round(task, base, newest + 1, sessions, key)

    def has(self, group: Group) -> bool:
        """Return True when a session of the group is recorded, whatever its outcome."""
        return any(self._places.get(place) for place in group.session_ids)

    def attempts(self, group: Group) -> list[Session]:
        """Return all recorded sessions at the places of a group, in the order of the places and
        attempts."""
        attempts: list[Session] = []
        for place in group.session_ids:
            attempts += self._attempts(place)
        return attempts

    def missing(self, group: Group) -> Group:
        """Return the group with the ids of the sessions that are still to be run: new places, and
        further attempts."""
        return replace(group, session_ids=self._waiting(group, STARTED_AGAIN))

    def _waiting(self, group: Group, again: Collection[SessionStatus]) -> list[str]:
        ids = []
        for place in group.session_ids:
            attempts = self._attempts(place)
            if not attempts:
                ids.append(place)
            elif all(session.status in again for session in attempts):
                last = SessionName.parse(attempts[-1].session_id)
                ids.append(str(last.next))
        return ids

    def _attempts(self, place: str) -> list[Session]:
        return sorted(self._places[place], key=_attempt)


def _attempt(session: Session) -> int:
    return SessionName.parse(session.session_id).attempt


def resume_lines(
    run: Path,
    recorded: Recorded,
    groups: Sequence[Group],
    missing: Sequence[Group],
    *,
    further: bool,
) -> list[str]:
    """Return the lines in which a rollout of these groups says before it begins what it resumes.

    `missing` are the groups with the ids that are still to be run. Raises `RunError` when the run
    cannot be read.
    """
    lines = []
    used = 0
    for group, rest in zip(groups, missing, strict=True):
        used += len(group.session_ids) - len(rest.session_ids)
    if used:
        ended = counted(used, "session")
        lines.append(f"the rollout in {run} goes on with {ended} that ended before")
    begun = [group for group in groups if recorded.has(group)]
    if further and begun:
        lines.append(
            f"sessions are missing from {counted(len(begun), 'group')}: they are run first; run the"
            " same command again for further groups"
        )
    keys = group_keys(run)
    new = 0
    changed: set[str] = set()
    for group in groups:
        parts = []
        if group.task.id in keys and not recorded.has(group):
            parts = changed_parts(keys[group.task.id], group.key)
        new += bool(parts)
        changed.update(parts)
    if new:
        names = ", ".join(sorted(changed))
        tasks = counted(new, "task")
        lines.append(f"new groups begin for {tasks}, because these changed: {names}")
    return lines


def _round(
    task: Task,
    base: str,
    number: int,
    sessions: int,
    key: Mapping[str, str],
) -> Group:
    group_id = f"{base}.{number}"
    return Group(task, group_id, [f"{group_id}-{index}" for index in range(sessions)], key)


def changed_parts(known: Mapping[str, str], key: Mapping[str, str]) -> list[str]:
    """Return the names of the parts in which two keys differ, sorted."""
    return sorted(name for name in known.keys() | key.keys() if known.get(name) != key.get(name))
