"""Split and filter of a run, by session. Rows are copied unchanged, with their digests.

Memory: the tokens of one session, and the rows of all sessions. Output folders are created atomically.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata, write_metadata
from rolltap.addons.store.records import CallRole, Session
from rolltap.addons.store.session_index import SessionIndex
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import TABLES, RunWriter
from rolltap.trainer.file_names import file_name
from rolltap.trainer.progress import Advance
from rolltap.trainer.traces.outcomes import suspected
from rolltap.trainer.traces.reader import load_sessions

SplitBy = Literal["harness", "task_id", "group_id", "policy_version", "status"]
"""Field of the session's row to split by: one part per value, named after it."""

UNNAMED = "_none"
"""Name of the part of sessions without a row or with an empty value."""
MOST_NAMED = 5
"""Most session ids in one message."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Criteria of the sessions and calls to keep. A session must fit every criterion that is set."""

    min_reward: float | None = None
    max_reward: float | None = None
    harnesses: Collection[str] = ()
    policy_versions: Collection[str] = ()
    """Values of the session's `policy_version`: the weights that sampled its first token."""
    statuses: Collection[str] = ()
    sessions: Collection[str] = ()
    roles: Collection[CallRole] = ()
    """Roles of the calls to keep. Their ancestors are kept too, whatever their role. A session without a call of these
    roles is left out."""
    tasks: Collection[str] = ()
    runtimes: Collection[str] = ()
    suspicious: bool | None = None
    """Whether the session's row has suspicions."""
    suspicions: Collection[str] = ()
    """Names of rules: the session matched one of them."""

    def fits(self, session_id: str, session: Session | None) -> bool:
        """Return True when a session fits, `roles` aside. A session without a row has the status `unknown`, no harness,
        no policy version and no suspicions. A session without a reward fits no criterion on it."""
        session = session or Session(session_id=session_id, status="unknown")
        matched = suspected(session).keys()
        return (
            (not self.sessions or session_id in self.sessions)
            and (not self.harnesses or session.harness in self.harnesses)
            and (not self.policy_versions or session.policy_version in self.policy_versions)
            and (not self.statuses or session.status in self.statuses)
            and (not self.tasks or session.task_id in self.tasks)
            and (not self.runtimes or session.runtime in self.runtimes)
            and (self.suspicious is None or self.suspicious == bool(matched))
            and (not self.suspicions or not matched.isdisjoint(self.suspicions))
            and (self.min_reward is None or (session.reward is not None and session.reward >= self.min_reward))
            and (self.max_reward is None or (session.reward is not None and session.reward <= self.max_reward))
        )


class _Run:
    """The rows of a run by session, in all its tables; a context manager."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.metadata = read_metadata(run)
        self.rows = load_sessions(run)
        self._stack = ExitStack()

    def __enter__(self) -> "_Run":
        self.tables = {table: self._stack.enter_context(SessionIndex(self.run, table)) for table in TABLES}
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def session_ids(self) -> list[str]:
        """Session ids: those with calls in the order of their first call, then those with only a row or events."""
        tables = (self.tables[name] for name in ("calls", "sessions", "events"))
        known = dict.fromkeys(session_id for table in tables for session_id in table.session_ids)
        return [session_id for session_id in known if session_id is not None]

    def copy(self, session_id: str | None, writer: RunWriter, calls: Collection[str] | None = None) -> None:
        """Write the rows of a session; with `session_id` None, the events without a session.

        With `calls`, a set of call ids, calls and their events are limited to these.
        """
        kept = None if calls is None else pa.array(list(calls), pa.string())
        for name, table in self.tables.items():
            for batch in table.batches(session_id):
                if kept is not None and name == "calls":
                    batch = batch.filter(pc.is_in(batch.column("call_id"), kept))
                elif kept is not None and name == "events":
                    # events without a call are kept
                    about = batch.column("call_id")
                    batch = batch.filter(pc.or_(about.is_null(), pc.is_in(about, kept)))
                if batch.num_rows:
                    writer.add_batch(name, batch)
        writer.end_session()


def split_run(run: Path, out: Path, parts: SplitBy | int, advance: Advance) -> dict[str, int]:
    """Split a run into folders in the new folder `out`. Return part name -> number of sessions.

    `parts` is a field of the session's row, or a number of parts of about equal size. In the latter case sessions of
    one group stay together. Events without a session go to the first part.

    Raises `InputError` for another field, a number below 1, no session and fewer groups than parts, and `RunError` when
    the run cannot be read.
    """
    if isinstance(parts, int) and parts < 1:
        raise InputError(f"parts={parts}: give at least 1")
    if not isinstance(parts, int) and parts not in get_args(SplitBy):
        raise InputError(f"by={parts!r}: choose {', '.join(get_args(SplitBy))}")
    with _Run(run) as source:
        sessions_of = _even_parts(source, parts) if isinstance(parts, int) else _parts_by(source, parts)
        if not sessions_of:
            raise InputError(f"{run} has no sessions")
        total, done = len(source.session_ids), 0
        with new_folder(out) as staged:
            for number, (name, session_ids) in enumerate(sessions_of.items()):
                write_metadata(staged / name, source.metadata)
                with RunWriter(staged / name, "never") as writer:
                    for session_id in [*([None] if number == 0 else []), *session_ids]:
                        source.copy(session_id, writer)
                        done += session_id is not None
                        advance("sessions copied", done, total)
    return {name: len(session_ids) for name, session_ids in sessions_of.items()}


def filter_run(run: Path, out: Path, criteria: Filter, advance: Advance) -> int:
    """Write the sessions that fit to the new folder `out`. Return their number. Events without a session are left out.

    Raises `InputError` when no session fits or one of `criteria.sessions` is not in the run, and `RunError` when the
    run cannot be read.
    """
    with _Run(run) as source:
        if unknown := set(criteria.sessions).difference(source.session_ids):
            raise InputError(f"{run} has no session {named(unknown)}")
        fitting = [name for name in source.session_ids if criteria.fits(name, source.rows.get(name))]
        kept = 0
        with new_folder(out) as staged:
            write_metadata(staged, source.metadata)
            with RunWriter(staged, "never") as writer:
                for done, session_id in enumerate(fitting, start=1):
                    calls = _with_ancestors(source, session_id, criteria.roles) if criteria.roles else None
                    if calls is None or calls:
                        source.copy(session_id, writer, calls)
                        kept += 1
                    advance("sessions copied", done, len(fitting))
            if not kept:
                raise InputError(f"no session of {run} fits: {out} was not written")
    return kept


def named(session_ids: Iterable[str]) -> str:
    """Return the first `MOST_NAMED` ids as text, and the number of the others."""
    names = sorted(session_ids)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _parts_by(source: _Run, field: SplitBy) -> dict[str, list[str]]:
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for session_id in source.session_ids:
        row = source.rows.get(session_id)
        value = getattr(row, field) if row else None
        parts[file_name(value) if value else UNNAMED].append(session_id)
    return parts


def _even_parts(source: _Run, number: int) -> dict[str, list[str]]:
    """Assign each group, in the order of its first session, to the part with the fewest sessions so far."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for session_id in source.session_ids:
        row = source.rows.get(session_id)
        groups[("group", row.group_id) if row and row.group_id else ("session", session_id)].append(session_id)
    if len(groups) < number:
        raise InputError(f"{source.run} has only {len(groups)} groups of sessions: ask for fewer parts")
    parts: list[list[str]] = [[] for _ in range(number)]
    for session_ids in groups.values():
        min(parts, key=len).extend(session_ids)
    width = len(str(number - 1))
    return {f"part-{i:0{width}}": session_ids for i, session_ids in enumerate(parts)}


def _with_ancestors(source: _Run, session_id: str, roles: Collection[CallRole]) -> set[str]:
    """Return the ids of the calls with these roles and of their ancestors, whose tokens their rows do not repeat."""
    parents: dict[str, str | None] = {}
    selected = []
    for batch in source.tables["calls"].batches(session_id):
        for call_id, parent_id, role in zip(
            *(batch.column(name).to_pylist() for name in ("call_id", "parent_id", "role")), strict=True
        ):
            parents[call_id] = parent_id
            if role in roles:
                selected.append(call_id)
    kept: set[str] = set()
    for call_id in selected:
        ancestor: str | None = call_id
        while ancestor is not None and ancestor not in kept:
            kept.add(ancestor)
            ancestor = parents.get(ancestor)
    return kept
