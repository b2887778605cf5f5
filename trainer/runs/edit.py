"""Split and filter of a run by session; merge of several runs, or of the sound rows of a damaged
run.

Rows are copied unchanged, with their digests; a merge changes only names that two runs share.
Output folders are created atomically. Memory: a split or a filter takes the tokens of one session
and the rows of all sessions; a merge takes one batch and the ids of the sessions.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.errors import InputError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.metadata import read_metadata, write_metadata
from rolltap.addons.store.records import DIGEST, CallRole, Session, SessionStatus, json_text
from rolltap.addons.store.rows import row_digest
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import RunWriter, batch_rows, read_batches, run_files
from rolltap.trainer.console import Advance
from rolltap.trainer.names import file_name, some
from rolltap.trainer.runs.verify import check_rows
from rolltap.trainer.traces.reader import load_sessions, recorded_ids
from rolltap.trainer.traces.sessions import suspected
from rolltap.trainer.traces.tables import TABLES

SplitBy = Literal["harness", "task_id", "group_id", "policy_version", "status"]
"""Field of the session's row to split by: one part per value, named after it."""

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


def _fits(criteria: Filter, session_id: str, session: Session | None) -> bool:
    """Return True when a session fits, `roles` aside.

    A session without a row has the status `unknown`, no harness, no policy version and no
    suspicions. One without a reward fits no criterion on it.
    """
    session = session or Session(session_id=session_id, status="unknown")
    matched = suspected(session).keys()
    wanted = [
        (session_id, criteria.get("session_ids")),
        (session.harness, criteria.get("harnesses")),
        (session.policy_version, criteria.get("policy_versions")),
        (session.status, criteria.get("statuses")),
        (session.task_id, criteria.get("tasks")),
        (session.runtime, criteria.get("runtimes")),
    ]
    reward = math.nan if session.reward is None else session.reward
    least, most = criteria.get("min_reward"), criteria.get("max_reward")
    suspicious, suspicions = criteria.get("suspicious"), criteria.get("suspicions")
    return (
        all(not values or value in values for value, values in wanted)
        and (suspicious is None or suspicious == bool(matched))
        and (not suspicions or not matched.isdisjoint(suspicions))
        and (least is None or reward >= least)
        and (most is None or reward <= most)
    )


class _Run:
    """The rows of a run by session, in all its tables; a context manager."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.metadata = read_metadata(run)
        self.rows = load_sessions(run)
        self._stack = ExitStack()

    def __enter__(self) -> "_Run":
        self.tables = {
            table: self._stack.enter_context(SessionIndex(self.run, table)) for table in TABLES
        }
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def session_ids(self) -> list[str]:
        """Session ids: those with calls in the order of their first call, then those with only a
        row or events."""
        tables = (self.tables[name] for name in ("calls", "sessions", "events"))
        known = dict.fromkeys(session_id for table in tables for session_id in table.session_ids)
        return [session_id for session_id in known if session_id is not None]

    def copy(
        self, session_id: str | None, writer: RunWriter, calls: Collection[str] | None = None
    ) -> None:
        """Write the rows of a session; with `session_id` None, the events without a session.

        With `calls`, a set of call ids, calls, their routings, scores and events are limited to
        these, and what was trained is left out: its rows are accounts of whole sessions.
        """
        kept = None if calls is None else pa.array(list(calls), pa.string())
        for name, table in self.tables.items():
            for batch in table.batches(session_id) if kept is None or name != "trained" else ():
                if kept is not None and name in ("calls", "routing", "scores"):
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

    `parts` is a field of the session's row, or a number of parts of about equal size. In the latter
    case sessions of one group stay together. Events without a session go to the first part.

    Raises `InputError` for another field, a number below 1, no session and fewer groups than parts,
    and `RunError` when the run cannot be read.
    """
    if isinstance(parts, int) and parts < 1:
        raise InputError(f"parts={parts}: give at least 1")
    if not isinstance(parts, int) and parts not in get_args(SplitBy):
        raise InputError(f"by={parts!r}: choose {', '.join(get_args(SplitBy))}")
    with _Run(run) as source:
        sessions_of = (
            _even_parts(source, parts) if isinstance(parts, int) else _parts_by(source, parts)
        )
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
    """Write the sessions that fit to the new folder `out`. Return their number. Events without a
    session are left out.

    Raises `InputError` when no session fits or one of `session_ids` is not in the run, and
    `RunError` when the run cannot be read.
    """
    roles = criteria.get("roles", ())
    with _Run(run) as source:
        if unknown := set(criteria.get("session_ids", ())).difference(source.session_ids):
            raise InputError(f"{run} has no session {some(sorted(unknown))}")
        fitting = [
            name for name in source.session_ids if _fits(criteria, name, source.rows.get(name))
        ]
        kept = 0
        with new_folder(out) as staged:
            write_metadata(staged, source.metadata)
            with RunWriter(staged, "never") as writer:
                for done, session_id in enumerate(fitting, start=1):
                    calls = _with_ancestors(source, session_id, roles) if roles else None
                    if calls is None or calls:
                        source.copy(session_id, writer, calls)
                        kept += 1
                    advance("sessions copied", done, len(fitting))
            if not kept:
                raise InputError(f"no session of {run} fits: {out} was not written")
    return kept


def _parts_by(source: _Run, field: SplitBy) -> dict[str, list[str]]:
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for session_id in source.session_ids:
        row = source.rows.get(session_id)
        value = getattr(row, field) if row else None
        parts[file_name(value) if value else UNNAMED].append(session_id)
    return parts


def _even_parts(source: _Run, number: int) -> dict[str, list[str]]:
    """Assign each group, in the order of its first session, to the part with the fewest sessions so
    far."""
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for session_id in source.session_ids:
        row = source.rows.get(session_id)
        groups[("group", row.group_id) if row and row.group_id else ("session", session_id)].append(
            session_id
        )
    if len(groups) < number:
        raise InputError(
            f"{source.run} has only {len(groups)} groups of sessions: ask for fewer parts"
        )
    parts: list[list[str]] = [[] for _ in range(number)]
    for session_ids in groups.values():
        min(parts, key=len).extend(session_ids)
    width = len(str(number - 1))
    return {f"part-{i:0{width}}": session_ids for i, session_ids in enumerate(parts)}


def _with_ancestors(source: _Run, session_id: str, roles: Collection[CallRole]) -> set[str]:
    """Return the ids of the calls with these roles and of their ancestors, whose tokens their rows
    do not repeat."""
    parents: dict[str, str | None] = {}
    selected = []
    for batch in source.tables["calls"].batches(session_id):
        for call_id, parent_id, role in zip(
            *(batch.column(name).to_pylist() for name in ("call_id", "parent_id", "role")),
            strict=True,
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


_JOINED = ("engines", "recorders", "left_behind")
"""Keys of `run.json` whose values are joined from all runs."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The losses of one damaged file when its run is merged."""

    file: str
    """`RUN/FILE`."""
    rows: int
    """Rows whose digest does not match."""
    unreadable_ranges: int
    """Byte ranges that cannot be read, each of one or more adjacent commits."""


@dataclass(frozen=True, slots=True)
class _Source:
    run: Path
    metadata: dict[str, Any]
    sessions: set[str]
    groups: set[str]

    @property
    def name(self) -> str:
        return self.run.absolute().name

    @property
    def names_model(self) -> bool:
        """True unless the run is an import without a model."""
        return self.metadata.get("source") != "import" or "tokenizer_sha256" in self.metadata

    def origins(self, merged: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the run's name and the metadata that differs from `merged`; for a merged run, one
        entry per origin."""
        origins = self.metadata.get("merged_from", [{"run": self.name}])
        known = (*_JOINED, "merged_from", "run_id")
        other = {
            key: value
            for key, value in self.metadata.items()
            if key not in known and merged.get(key) != value
        }
        return [{**other, **origin} for origin in origins]


def merge_runs(runs: Sequence[Path], out: Path, advance: Advance) -> tuple[int, list[LeftBehind]]:
    """Write the sound rows of one or more runs to the new folder `out`.

    Return the number of sessions, and the losses: rows that cannot be read or whose digest does not
    match are not copied. The new `run.json` lists the losses as `left_behind`.

    When two runs have sessions or groups of equal names, all names of the later run get a prefix,
    which `merged_from` of the new `run.json` has. Parts of one run that have different sessions
    keep their names, so that a group of the run becomes whole again.

    Raises `InputError` when the runs' tokenizers or chat templates differ, when two runs have the
    same session with the same content, and when no row of a damaged run is sound. Raises `RunError`
    when a run cannot be read.
    """
    sources = [_source(run) for run in runs]
    # an import that names no model is taken to be of the model of the runs it is merged with
    recorded = [source for source in sources if source.names_model] or sources
    recorded.sort(
        key=lambda source: source.metadata.get("source") == "import"
    )  # the merged run is a recorded one
    _require_one_model(recorded)
    prefixes = _prefixes(sources)
    tables = [(source, table) for source in sources for table in TABLES]
    files = [
        (source, table, path) for source, table in tables for path in run_files(source.run, table)
    ]
    size, done = sum(path.lstat().st_size for _, _, path in files), 0
    sessions: set[str | None] = set()
    left_behind: list[LeftBehind] = []
    with new_folder(out) as staged:
        with RunWriter(staged, "never") as writer:
            for source, table, path in files:
                done += path.lstat().st_size
                prefix = prefixes.get(source.run, "")
                left_behind += _copy_sound_rows(source, table, path, writer, sessions, prefix)
                advance("bytes copied", done, size)
        if left_behind and not sessions:
            raise InputError(
                f"no session of {', '.join(map(str, runs))} can be saved: {out} was not written"
            )
        write_metadata(staged, _merged_metadata(recorded[0], sources, left_behind, prefixes))
    return len(sessions), left_behind


def _copy_sound_rows(
    source: _Source,
    table: str,
    path: Path,
    writer: RunWriter,
    sessions: set[str | None],
    prefix: str,
) -> Iterator[LeftBehind]:
    """Write the rows of a file whose digest matches, with `prefix` before names. Yield the losses,
    if there are any.

    Adds to `sessions` the ids of sessions with a copied call or row.
    """
    rows = 0
    with SegmentReader(path, TABLES[table]) as reader:
        for _, batch in reader:
            sound = pa.array([fault is None for _, fault in check_rows(table, batch)])
            if sound.true_count:
                copied = batch.filter(sound)
                if prefix:
                    copied = _with_prefix(table, copied, prefix)
                writer.add_batch(table, copied)
                if table != "events":
                    sessions.update(copied.column("session_id").unique().to_pylist())
            rows += sound.false_count
    writer.end_session()
    if rows or reader.damage:
        yield LeftBehind(f"{source.name}/{path.name}", rows, len(reader.damage))


def _require_one_model(sources: Sequence[_Source]) -> None:
    first = sources[0]
    for key in ("tokenizer_sha256", "chat_template_sha256"):
        for other in sources[1:]:
            if first.metadata.get(key) != other.metadata.get(key):
                what = key.removesuffix("_sha256").replace("_", " ")
                raise InputError(
                    f"{first.run} and {other.run} do not have the same {what}: merge runs of one"
                    " model"
                )


def _source(run: Path) -> _Source:
    metadata = read_metadata(run)
    batches = read_batches(run, "sessions")
    groups = {
        name for batch in batches for name in batch.column("group_id").unique().to_pylist() if name
    }
    return _Source(run, metadata, recorded_ids(run), groups)


def _prefixes(sources: Sequence[_Source]) -> dict[Path, str]:
    """Return run -> the prefix of its names, for each run that shares names with an earlier run."""
    prefixes: dict[Path, str] = {}
    taken: set[str] = set()
    for number, source in enumerate(sources):
        names = source.sessions | source.groups
        if any(_shares_names(earlier, source) for earlier in sources[:number]):
            prefix = _free_prefix(source.name, names, taken)
            prefixes[source.run] = prefix
            names = {prefix + name for name in names}
        taken |= names
    return prefixes


def _shares_names(earlier: _Source, later: _Source) -> bool:
    """Return True for names that mean different things in two runs. Raises `InputError` for a
    session that is one."""
    sessions = earlier.sessions & later.sessions
    require_other_content(earlier.run, later.run, sessions)
    run_id = later.metadata.get("run_id")
    are_parts_of_one = run_id is not None and run_id == earlier.metadata.get("run_id")
    groups = set() if are_parts_of_one else earlier.groups & later.groups
    return bool(sessions or groups)


def _free_prefix(folder: str, names: set[str], taken: set[str]) -> str:
    """Return the name of a run's folder with a dot, and with a number where a name would be
    taken."""
    plain = re.sub(r"[^\w-]", "-", folder)
    prefix = f"{plain}."
    number = 1
    while not taken.isdisjoint(prefix + name for name in names):
        number += 1
        prefix = f"{plain}-{number}."
    return prefix


def _with_prefix(table: str, batch: pa.RecordBatch, prefix: str) -> pa.RecordBatch:
    """Return the rows with `prefix` before the ids of their sessions and groups, and with their new
    digests."""
    schema = TABLES[table]
    rows = batch_rows(batch)
    for row in rows:
        _rename(row, prefix)
        if table == "events" and row["kind"] == "session_started":
            detail = json.loads(row["detail"])
            _rename(detail, prefix)
            row["detail"] = json_text(detail)
        row[DIGEST] = row_digest(row, schema)
    return pa.RecordBatch.from_pylist(rows, schema)


def _rename(row: dict[str, Any], prefix: str) -> None:
    for name in ("session_id", "group_id"):
        if row.get(name):
            row[name] = prefix + row[name]


def require_other_content(first: Path, second: Path, session_ids: Collection[str]) -> None:
    """Raise `InputError` when one of the sessions, which both runs have, has the same content in
    both."""
    if not session_ids:
        return
    known = _digests(first, session_ids)
    other = _digests(second, session_ids)
    if same := sorted(name for name in session_ids if known[name] == other[name]):
        what = f"{second} and {first} both have session {some(same)}, with the same content"
        raise InputError(f"{what}: leave one run out")


def _digests(run: Path, session_ids: Collection[str]) -> dict[str, set[str]]:
    """Return session id -> the digests of its calls and its rows."""
    digests: defaultdict[str, set[str]] = defaultdict(set)
    for table in ("calls", "sessions"):
        for batch in read_batches(run, table, session_ids):
            names = batch.column("session_id").to_pylist()
            for name, digest in zip(names, batch.column(DIGEST).to_pylist(), strict=True):
                digests[name].add(digest)
    return digests


def _merged_metadata(
    first: _Source,
    sources: Sequence[_Source],
    left_behind: Sequence[LeftBehind],
    prefixes: Mapping[Path, str],
) -> dict[str, Any]:
    """Return the metadata of the first run with the engines, recorders and losses of all runs.

    Other metadata in which a run differs is in `merged_from`.
    """
    merged = {key: value for key, value in first.metadata.items() if key != "run_id"}
    if engines := {
        url: engine
        for source in sources
        for url, engine in source.metadata.get("engines", {}).items()
    }:
        merged["engines"] = engines
    losses = [
        {"file": loss.file, "rows": loss.rows, "places": loss.unreadable_ranges}
        for loss in left_behind
    ]
    for key, more in (("recorders", []), ("left_behind", losses)):
        entries = [entry for source in sources for entry in source.metadata.get(key, [])] + more
        if entries:
            merged[key] = [
                entry for number, entry in enumerate(entries) if entry not in entries[:number]
            ]
    merged["merged_from"] = []
    for source in sources:
        origins = source.origins(merged)
        if prefix := prefixes.get(source.run):
            origins = [
                {**origin, "prefix": prefix + origin.get("prefix", "")} for origin in origins
            ]
        merged["merged_from"] += origins
    return merged
