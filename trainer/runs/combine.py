"""Runs into runs: merged, split and filtered by session. Tokens are not rewritten: rows are copied with their digests.

Memory is that of one session. An output appears when it is complete.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.store.digest import DIGEST
from rolltap.addons.store.metadata import read_metadata, write_metadata
from rolltap.addons.store.records import CallRole, Session
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import TABLES, RunWriter, run_files
from rolltap.trainer.errors import UserError
from rolltap.trainer.file_names import file_name
from rolltap.trainer.progress import Advance
from rolltap.trainer.runs.findings import check_rows
from rolltap.trainer.traces.reader import SessionIndex, load_sessions

SplitBy = Literal["harness", "task_id", "group_id", "policy_version", "status"]
"""The field of the session's row whose values name the parts."""

UNNAMED = "_none"
"""Name of the part of sessions that have no row, or an empty value in it."""
MOST_NAMED = 5
"""Sessions that one message names."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which sessions are kept: those that fit every criterion that is given; and of `roles`, which calls of them."""

    min_reward: float | None = None
    max_reward: float | None = None
    harnesses: Collection[str] = ()
    policy_versions: Collection[str] = ()
    """Of the session: the newest weights that had been published when it started."""
    statuses: Collection[str] = ()
    sessions: Collection[str] = ()
    roles: Collection[CallRole] = ()
    """A call whose prompt such a call continues is kept too, with its own role."""

    def fits(self, session_id: str, session: Session | None) -> bool:
        """Whether a session is kept, `roles` aside. One that has no row, or no reward, fits no criterion on it."""
        reward = session.reward if session else None
        return (
            (not self.sessions or session_id in self.sessions)
            and (not self.harnesses or (session is not None and session.harness in self.harnesses))
            and (not self.policy_versions or (session is not None and session.policy_version in self.policy_versions))
            and (not self.statuses or (session is not None and session.status in self.statuses))
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
        )


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The losses of one damaged file when its run is merged."""

    file: str
    """Its run's name and its own."""
    rows: int
    """Rows that do not have their digest."""
    places: int
    """Places that cannot be read, each of one commit or several that follow each other."""


class _Run:
    """The rows of a run by session, in all its tables; a context manager."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.name = run.absolute().name
        self.metadata = read_metadata(run)
        self._stack = ExitStack()

    def __enter__(self) -> "_Run":
        self.tables = {table: self._stack.enter_context(SessionIndex(self.run, table)) for table in TABLES}
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._stack.close()

    @cached_property
    def rows(self) -> dict[str, Session]:
        """The row of each session that has one."""
        return load_sessions(self.run)

    @property
    def session_ids(self) -> list[str]:
        """Sessions that have calls, in the order in which they were first recorded; then those of rows and events."""
        tables = (self.tables[name] for name in ("calls", "sessions", "events"))
        known = dict.fromkeys(session_id for table in tables for session_id in table.session_ids)
        return [session_id for session_id in known if session_id is not None]

    def copy(self, session_id: str | None, writer: RunWriter, calls: Collection[str] | None = None) -> None:
        """Write the rows of a session (None: the events of none); with `calls`, of these calls only."""
        kept = None if calls is None else pa.array(list(calls), pa.string())
        for name, table in self.tables.items():
            for batch in table.batches(session_id):
                if kept is not None and name == "calls":
                    batch = batch.filter(pc.is_in(batch.column("call_id"), kept))
                elif kept is not None and name == "events":
                    # an event about a call goes with it
                    about = batch.column("call_id")
                    batch = batch.filter(pc.or_(about.is_null(), pc.is_in(about, kept)))
                if batch.num_rows:
                    writer.add_batch(name, batch)
        writer.end_session()

    def digests(self, session_id: str) -> set[str]:
        """What the calls and the row of a session hold."""
        tables = (self.tables["calls"], self.tables["sessions"])
        return {
            digest
            for table in tables
            for batch in table.batches(session_id)
            for digest in batch.column(DIGEST).to_pylist()
        }


def merge_runs(runs: Sequence[Path], out: Path, advance: Advance) -> tuple[int, list[LeftBehind]]:
    """Write the rows of several runs, or of one that is damaged, to the new folder `out`.

    Returns the number of sessions, and what cannot be read or does not have its digest, which is left behind. The new
    `run.json` says so too, under `left_behind`.

    Raises `UserError` when the runs hold tokens of different tokenizers or chat templates, and when two of them have
    calls or the row of the same session; `RunError` when one cannot be read.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(_Run(run)) for run in runs]
        # an import does not say whose tokens it holds: that it is merged with them does
        recorded = [source for source in sources if source.metadata.get("source") != "import"] or sources
        _require_one_model(recorded)
        _require_other_sessions(sources)
        tables = [(source, table) for source in sources for table in TABLES]
        files = [(source, table, path) for source, table in tables for path in run_files(source.run, table)]
        size, done = sum(path.stat().st_size for _, _, path in files), 0
        left_behind: list[LeftBehind] = []
        with new_folder(out) as staged:
            with RunWriter(staged, "never") as writer:
                for source, table, path in files:
                    done += path.stat().st_size
                    left_behind += _copy_sound_rows(source, table, path, writer)
                    advance("bytes copied", done, size)
            write_metadata(staged, _merged_metadata(recorded[0], sources, left_behind))
        return sum(len(source.session_ids) for source in sources), left_behind


def split_run(run: Path, out: Path, parts: SplitBy | int, advance: Advance) -> dict[str, int]:
    """Write each part of a run to a folder of its own in the new folder `out`; returns their names and sessions.

    By a field of the session's row, or into a number of parts of about as many sessions, where the sessions of one
    group stay together. Events of no session go to the first part.

    Raises `UserError` when there is no session or there are fewer groups than parts, and `RunError` when the run cannot
    be read.
    """
    with _Run(run) as source:
        sessions = _even_parts(source, parts) if isinstance(parts, int) else _parts_by(source, parts)
        if not sessions:
            raise UserError(f"{run} has no sessions")
        total, done = len(source.session_ids), 0
        with new_folder(out) as staged:
            for number, (name, session_ids) in enumerate(sessions.items()):
                write_metadata(staged / name, source.metadata)
                with RunWriter(staged / name, "never") as writer:
                    for session_id in [*([None] if number == 0 else []), *session_ids]:
                        source.copy(session_id, writer)
                        done += session_id is not None
                        advance("sessions copied", done, total)
    return {name: len(session_ids) for name, session_ids in sessions.items()}


def filter_run(run: Path, out: Path, criteria: Filter, advance: Advance) -> int:
    """Write the sessions that fit to the new folder `out`; returns their number. Events of no session are left out.

    Raises `UserError` when none fits or a named one is not in the run; `RunError` when the run cannot be read.
    """
    with _Run(run) as source:
        if unknown := set(criteria.sessions).difference(source.session_ids):
            raise UserError(f"{run} has no session {_named(unknown)}")
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
                raise UserError(f"no session of {run} fits: {out} was not written")
    return kept


def _copy_sound_rows(source: _Run, table: str, path: Path, writer: RunWriter) -> Iterator[LeftBehind]:
    """Write the rows of a file that have their digest; says what was left behind, if anything was."""
    rows = 0
    with SegmentReader(path, TABLES[table]) as reader:
        for _, batch in reader:
            sound = pa.array([fault is None for _, fault in check_rows(table, batch)])
            if sound.true_count:
                writer.add_batch(table, batch.filter(sound))
            rows += sound.false_count
    writer.end_session()
    if rows or reader.damage:
        yield LeftBehind(f"{source.name}/{path.name}", rows, len(reader.damage))


def _require_one_model(sources: Sequence[_Run]) -> None:
    first = sources[0]
    for key in ("tokenizer_sha256", "chat_template_sha256"):
        for other in sources[1:]:
            if first.metadata.get(key) != other.metadata.get(key):
                what = key.removesuffix("_sha256").replace("_", " ")
                raise UserError(f"{first.run} and {other.run} do not have the same {what}: merge runs of one model")


def _require_other_sessions(sources: Sequence[_Run]) -> None:
    owners: dict[str, _Run] = {}
    for source in sources:
        known = dict.fromkeys([*source.tables["calls"].session_ids, *source.tables["sessions"].session_ids])
        recorded = [session_id for session_id in known if session_id is not None]
        if repeated := [session_id for session_id in recorded if session_id in owners]:
            first = owners[repeated[0]]
            alike = first.digests(repeated[0]) == source.digests(repeated[0])
            what = "with the same content: leave one run out" if alike else "with other content"
            raise UserError(f"{source.run} and {first.run} both have session {_named(repeated)}, {what}")
        owners |= dict.fromkeys(recorded, source)


def _named(session_ids: Iterable[str]) -> str:
    names = sorted(session_ids)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _merged_metadata(first: _Run, sources: Sequence[_Run], left_behind: Sequence[LeftBehind]) -> dict[str, Any]:
    """That of the first run, with the engines, recorders and losses of all; what the others say else is in
    `merged_from`."""
    merged = dict(first.metadata)
    if engines := {url: engine for source in sources for url, engine in source.metadata.get("engines", {}).items()}:
        merged["engines"] = engines
    for key, more in (("recorders", []), ("left_behind", [asdict(loss) for loss in left_behind])):
        entries = [entry for source in sources for entry in source.metadata.get(key, [])] + more
        if entries:
            merged[key] = [entry for number, entry in enumerate(entries) if entry not in entries[:number]]
    merged["merged_from"] = [entry for source in sources for entry in _origins(source, merged)]
    return merged


def _origins(source: _Run, merged: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The run's name and what its metadata says otherwise; those of the runs that it was merged from itself."""
    metadata = dict(source.metadata)
    origins = metadata.pop("merged_from", [{"run": source.name}])
    joined = ("engines", "recorders", "left_behind")
    other = {k: v for k, v in metadata.items() if k not in joined and merged.get(k) != v}
    return [{**other, **origin} for origin in origins]


def _parts_by(source: _Run, field: SplitBy) -> dict[str, list[str]]:
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for session_id in source.session_ids:
        row = source.rows.get(session_id)
        value = getattr(row, field) if row else None
        parts[file_name(value) if value else UNNAMED].append(session_id)
    return parts


def _even_parts(source: _Run, number: int) -> dict[str, list[str]]:
    """Groups in the order of their first sessions, each to the part that has the fewest sessions so far."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for session_id in source.session_ids:
        row = source.rows.get(session_id)
        groups[("group", row.group_id) if row and row.group_id else ("session", session_id)].append(session_id)
    if len(groups) < number:
        raise UserError(f"{source.run} has only {len(groups)} groups of sessions: ask for fewer parts")
    parts: list[list[str]] = [[] for _ in range(number)]
    for session_ids in groups.values():
        min(parts, key=len).extend(session_ids)
    width = len(str(number - 1))
    return {f"part-{i:0{width}}": session_ids for i, session_ids in enumerate(parts)}


def _with_ancestors(source: _Run, session_id: str, roles: Collection[CallRole]) -> set[str]:
    """The ids of the calls with these roles, and of those whose tokens their prompts are stored without."""
    parents: dict[str, str | None] = {}
    wanted = []
    for batch in source.tables["calls"].batches(session_id):
        for call_id, parent_id, role in zip(
            *(batch.column(name).to_pylist() for name in ("call_id", "parent_id", "role")), strict=True
        ):
            parents[call_id] = parent_id
            if role in roles:
                wanted.append(call_id)
    kept: set[str] = set()
    for call_id in wanted:
        ancestor: str | None = call_id
        while ancestor is not None and ancestor not in kept:
            kept.add(ancestor)
            ancestor = parents.get(ancestor)
    return kept
