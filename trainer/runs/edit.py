"""Split and filter of a run by session.

Rows are copied unchanged, with their digests. Output folders are created atomically. Memory: the
tokens of one session, and the rows of all sessions.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.errors import InputError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.metadata import read_metadata, write_metadata
from rolltap.addons.store.records import CallRole, Session, SessionStatus
from rolltap.addons.store.rewards import finite
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.console import Advance
from rolltap.trainer.names import file_name, some
from rolltap.trainer.runs.suspicions.rules import NAMES
from rolltap.trainer.runs.walk import index_tables
from rolltap.trainer.traces.build import require_collection
from rolltap.trainer.traces.reader import load_sessions, session_ids
from rolltap.trainer.traces.sessions import suspected
from rolltap.trainer.traces.tables import TABLES

SplitBy = Literal["harness", "task_id", "group_id", "policy_version", "status"]
"""Field of the session's row to split by: one part per value, named after it."""

Tables = Mapping[str, SessionIndex]
"""Table -> its rows by session."""
Sessions = Mapping[str, Session | None]
"""Session id -> the row that counts; None when there is none."""

UNNAMED = "_none"
"""Name of the part of sessions without a row or with an empty value."""


class Filter(TypedDict, total=False):
    """Criteria of the sessions and calls to keep. A session must fit every criterion that is
    set."""

    min_reward: float | None
    max_reward: float | None
    harnesses: Collection[str]
    policy_versions: Collection[str]
    """Values of the session's `policy_version`: the weights that sampled its first token."""
    statuses: Collection[SessionStatus]
    session_ids: Collection[str]
    roles: Collection[CallRole]
    """Roles of the calls to keep. Their ancestors are kept too, whatever their role. A session
    without a call of these roles is left out."""
    tasks: Collection[str]
    runtimes: Collection[str]
    suspicious: bool | None
    """Whether the session's row has suspicions."""
    suspicions: Collection[str]
    """Names of rules: the session matched one of them."""


_ACCEPTED = {
    "harnesses": "harness",
    "policy_versions": "policy_version",
    "statuses": "status",
    "session_ids": "session_id",
    "tasks": "task_id",
    "runtimes": "runtime",
}
"""Criterion that lists values -> the field of the session whose value is one of them."""


def _require_valid(criteria: Mapping[str, Any]) -> None:
    """Raise `TypeError` for a criterion that there is not, and `InputError` for a wrong value."""
    known = Filter.__annotations__
    unknown = criteria.keys() - known
    if unknown:
        raise TypeError(f"unknown criterion {min(unknown)!r}: choose {', '.join(known)}")
    for name in criteria.keys() & {*_ACCEPTED, "roles", "suspicions"}:
        require_collection(criteria[name])
    for name in ("min_reward", "max_reward"):
        if criteria.get(name) is not None:
            finite(criteria[name], name)
    for rule in sorted(criteria.get("suspicions", ())):
        if rule not in NAMES:
            raise InputError(
                f"no rule of suspicion is named {rule!r}: choose {', '.join(NAMES)}",
            )


def _fits(criteria: Mapping[str, Any], session: Session) -> bool:
    """Return True when a session fits, `roles` aside.

    A session without a reward fits no criterion on it.
    """
    for name, field in _ACCEPTED.items():
        accepted = criteria.get(name)
        if accepted and getattr(session, field) not in accepted:
            return False
    reward = session.reward
    least = criteria.get("min_reward")
    if least is not None and (reward is None or reward < least):
        return False
    most = criteria.get("max_reward")
    if most is not None and (reward is None or reward > most):
        return False
    matched = suspected(session).keys()
    suspicious = criteria.get("suspicious")
    if suspicious is not None and suspicious != bool(matched):
        return False
    rules = criteria.get("suspicions")
    return not rules or not matched.isdisjoint(rules)


def filter_run(
    run: Path,
    out: Path,
    criteria: Filter,
    advance: Advance,
) -> int:
    """Write the sessions that fit to the new folder `out`. Return their number.

    A session without a row has the status `unknown`, no harness, no policy version, no suspicions
    and no reward. Events without a session are left out.

    Raises `TypeError` for an unknown criterion, `InputError` for a wrong value, when no session
    fits and when one of `session_ids` is not in the run, and `RunError` when the run cannot be
    read.
    """
    _require_valid(criteria)
    roles = criteria.get("roles", ())
    with index_tables(run, TABLES) as tables:
        rows = load_sessions(run)
        known = _all_ids(tables)
        unknown = set(criteria.get("session_ids", ())).difference(known)
        if unknown:
            raise InputError(f"{run} has no session {some(sorted(unknown))}")
        fitting: list[str] = []
        for session_id in known:
            row = rows.get(session_id) or Session(session_id=session_id, status="unknown")
            if _fits(criteria, row):
                fitting.append(session_id)
        kept = 0
        with new_folder(out) as staged:
            write_metadata(staged, read_metadata(run))
            with RunWriter(staged, "never") as writer:
                for done, session_id in enumerate(fitting, start=1):
                    calls = None
                    if roles:
                        calls = _with_ancestors(tables["calls"], session_id, roles)
                    if calls is None or calls:
                        _copy(tables, session_id, writer, calls)
                        kept += 1
                    advance("sessions copied", done, len(fitting))
            if not kept:
                raise InputError(f"no session of {run} fits: {out} was not written")
    return kept


def split_run(
    run: Path,
    out: Path,
    advance: Advance,
    *,
    by: SplitBy | None = None,
    parts: int | None = None,
) -> dict[str, int]:
    """Split a run into folders in the new folder `out`. Return part name -> number of sessions.

    There is a part for each value of the field `by` of the session's row, or there are `parts`
    parts of about equal size, in which the sessions of one group stay together. Events without a
    session go to the first part.

    Raises `InputError` unless either `by` or `parts` is given, for another field, a number below 1,
    no session and fewer groups than parts; and `RunError` when the run cannot be read.
    """
    if (by is None) == (parts is None):
        raise InputError("give either by= or parts=")
    if by is not None and by not in get_args(SplitBy):
        raise InputError(f"by={by!r}: choose {', '.join(get_args(SplitBy))}")
    if parts is not None and parts < 1:
        raise InputError(f"parts={parts}: give at least 1")
    with index_tables(run, TABLES) as tables:
        rows = load_sessions(run)
        sessions = {session_id: rows.get(session_id) for session_id in _all_ids(tables)}
        if not sessions:
            raise InputError(f"{run} has no sessions")
        if by is not None:
            split = _parts_by(sessions, by)
        elif parts is not None:
            split = _even_parts(run, sessions, parts)
        done = 0
        with new_folder(out) as staged:
            for number, (name, members) in enumerate(split.items()):
                write_metadata(staged / name, read_metadata(run))
                with RunWriter(staged / name, "never") as writer:
                    if number == 0:
                        _copy(tables, None, writer)
                    for session_id in members:
                        _copy(tables, session_id, writer)
                        done += 1
                        advance("sessions copied", done, len(sessions))
    return {name: len(members) for name, members in split.items()}


def _all_ids(tables: Tables) -> list[str]:
    """Return the ids of the sessions: those with calls first, in the order of their first call."""
    return session_ids(tables["calls"], tables["sessions"], tables["events"])


def _parts_by(sessions: Sessions, field: SplitBy) -> dict[str, list[str]]:
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for session_id, row in sessions.items():
        value = getattr(row, field, None)
        name = UNNAMED
        if value:
            name = file_name(value)
        parts[name].append(session_id)
    return parts


def _even_parts(run: Path, sessions: Sessions, number: int) -> dict[str, list[str]]:
    """Assign each group, in the order of its first session, to the part with the fewest sessions so
    far. Raises `InputError` for more parts than groups."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for session_id, row in sessions.items():
        group = ("session", session_id)
        if row is not None and row.group_id:
            group = ("group", row.group_id)
        groups[group].append(session_id)
    if len(groups) < number:
        raise InputError(f"{run} has only {len(groups)} groups of sessions: ask for fewer parts")
    width = len(str(number - 1))
    parts: dict[str, list[str]] = {f"part-{i:0{width}}": [] for i in range(number)}
    for members in groups.values():
        smallest = min(parts.values(), key=len)
        smallest.extend(members)
    return parts


def _with_ancestors(calls: SessionIndex, session_id: str, roles: Collection[str]) -> set[str]:
    """Return the ids of the calls with these roles and of their ancestors, whose tokens their rows
    do not repeat."""
    parents: dict[str, str | None] = {}
    selected: list[str] = []
    for batch in calls.batches(session_id, ("call_id", "parent_id", "role")):
        for row in batch.to_pylist():
            parents[row["call_id"]] = row["parent_id"]
            if row["role"] in roles:
                selected.append(row["call_id"])
    kept: set[str] = set()
    for call_id in selected:
        ancestor: str | None = call_id
        while ancestor is not None and ancestor not in kept:
            kept.add(ancestor)
            ancestor = parents.get(ancestor)
    return kept


def _copy(
    tables: Tables,
    session_id: str | None,
    writer: RunWriter,
    calls: Collection[str] | None = None,
) -> None:
    """Write the rows of a session; with `session_id` None, the events without a session.

    With `calls`, a set of call ids, rows of other calls are left out, and so is what was trained:
    its rows are accounts of whole sessions.
    """
    for name, table in tables.items():
        if calls is not None and name == "trained":
            continue
        for batch in table.batches(session_id):
            if calls is not None and name != "sessions":
                of_call = batch.column("call_id")
                kept = pc.is_in(of_call, pa.array(list(calls), pa.string()))
                batch = batch.filter(pc.or_(of_call.is_null(), kept))
            if batch.num_rows:
                writer.add_batch(name, batch)
    writer.end_session()
