"""Merge of several runs, or of the sound rows of a damaged run.

Rows are copied unchanged, with their digests; only names that two runs share are changed. The new
folder is created atomically. Memory: one batch, and the ids of the sessions.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata, write_metadata
from rolltap.addons.store.records import DIGEST, json_text
from rolltap.addons.store.rows import Row, row_digest
from rolltap.addons.store.staging import new_folder
from rolltap.addons.store.tables import RunWriter, batch_rows, read_batches
from rolltap.trainer.console import Advance
from rolltap.trainer.names import some
from rolltap.trainer.runs.walk import check_rows, open_files
from rolltap.trainer.traces.reader import recorded_ids
from rolltap.trainer.traces.tables import TABLES

_OF_ONE_RUN = {"engines", "recorders", "left_behind", "merged_from", "run_id"}
"""Keys of `run.json` in which runs may differ: their values are joined or left out."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The losses of one damaged file when its run is merged."""

    file: str
    """`RUN/FILE`."""
    rows: int
    """Rows whose digest does not match."""
    unreadable_ranges: int
    """Byte ranges that cannot be read, each of one or more adjacent commits."""


class _Source:
    """A run that is merged, and the names in it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.name = run.absolute().name
        self.metadata = read_metadata(run)
        self.sessions = recorded_ids(run)
        self.groups: set[str] = set()
        for batch in read_batches(run, "sessions"):
            self.groups.update(batch.column("group_id").unique().to_pylist())
        self.groups.discard("")
        self.prefix = ""
        """Text before the names of its sessions and groups in the merged run."""

    @property
    def names(self) -> set[str]:
        """Names of its sessions and groups in the merged run."""
        return {self.prefix + name for name in self.sessions | self.groups}

    @property
    def is_import(self) -> bool:
        return self.metadata.get("source") == "import"

    @property
    def names_model(self) -> bool:
        return not self.is_import or "tokenizer_sha256" in self.metadata

    def origins(self, merged: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the run's name, its prefix, and the metadata that differs from `merged`.

        A merged run has an entry for each of its origins.
        """
        other: dict[str, Any] = {}
        for key, value in self.metadata.items():
            if key not in _OF_ONE_RUN and merged.get(key) != value:
                other[key] = value
        found = []
        for origin in self.metadata.get("merged_from", [{"run": self.name}]):
            entry = {**other, **origin}
            if self.prefix:
                entry["prefix"] = self.prefix + origin.get("prefix", "")
            found.append(entry)
        return found


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
    sources = [_Source(run) for run in runs]
    # an import that names no model is taken to be of the model of the runs it is merged with
    recorded = [source for source in sources if source.names_model] or sources
    # the merged run is a recorded one if one of them is
    recorded.sort(key=lambda source: source.is_import)
    _require_one_model(recorded)
    _choose_prefixes(sources)
    by_folder = {source.run: source for source in sources}
    sessions: set[str] = set()
    left_behind: list[LeftBehind] = []
    with new_folder(out) as staged:
        with RunWriter(staged, "never") as writer:
            for table, reader in open_files(runs, "bytes copied", advance):
                source = by_folder[reader.path.parent]
                unsound = 0
                for _, batch in reader:
                    is_sound = [fault is None for _, fault in check_rows(table, batch)]
                    sound = batch.filter(pa.array(is_sound))
                    unsound += batch.num_rows - sound.num_rows
                    if sound.num_rows:
                        copied = _with_prefix(table, sound, source.prefix)
                        writer.add_batch(table, copied)
                        if table != "events":
                            sessions.update(copied.column("session_id").unique().to_pylist())
                writer.end_session()
                if unsound or reader.damage:
                    file = f"{source.name}/{reader.path.name}"
                    left_behind.append(LeftBehind(file, unsound, len(reader.damage)))
        if left_behind and not sessions:
            names = ", ".join(map(str, runs))
            raise InputError(f"no session of {names} can be saved: {out} was not written")
        write_metadata(staged, _merged_metadata(recorded[0], sources, left_behind))
    return len(sessions), left_behind


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


def _choose_prefixes(sources: Sequence[_Source]) -> None:
    """Set the prefix of each run that shares names with an earlier run.

    It is the name of the run's folder, with a number where a name would be taken.
    """
    taken: set[str] = set()
    for place, source in enumerate(sources):
        if any(_shares_names(earlier, source) for earlier in sources[:place]):
            folder = re.sub(r"[^\w-]", "-", source.name)
            source.prefix = f"{folder}."
            number = 1
            while not taken.isdisjoint(source.names):
                number += 1
                source.prefix = f"{folder}-{number}."
        taken |= source.names


def _shares_names(earlier: _Source, later: _Source) -> bool:
    """Return True for names that mean different things in two runs. Raises `InputError` for a
    session that is one."""
    sessions = earlier.sessions & later.sessions
    require_other_content(earlier.run, later.run, sessions)
    if sessions:
        return True
    run_id = later.metadata.get("run_id")
    are_parts_of_one = run_id is not None and run_id == earlier.metadata.get("run_id")
    return not are_parts_of_one and not earlier.groups.isdisjoint(later.groups)


def _with_prefix(table: str, batch: pa.RecordBatch, prefix: str) -> pa.RecordBatch:
    """Return the rows with `prefix` before the ids of their sessions and groups, and with their new
    digests."""
    if not prefix:
        return batch
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


def _rename(row: Row, prefix: str) -> None:
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
    same = sorted(name for name in session_ids if known[name] == other[name])
    if same:
        what = f"{second} and {first} both have session {some(same)}, with the same content"
        raise InputError(f"{what}: leave one run out")


def _digests(run: Path, session_ids: Collection[str]) -> dict[str, set[str]]:
    """Return session id -> the digests of its calls and its rows."""
    digests: defaultdict[str, set[str]] = defaultdict(set)
    for table in ("calls", "sessions"):
        for batch in read_batches(run, table, session_ids):
            for row in batch.select(["session_id", DIGEST]).to_pylist():
                digests[row["session_id"]].add(row[DIGEST])
    return digests


def _merged_metadata(
    first: _Source,
    sources: Sequence[_Source],
    left_behind: Sequence[LeftBehind],
) -> dict[str, Any]:
    """Return the metadata of the first run with the engines, recorders and losses of all runs.

    Other metadata in which a run differs is in `merged_from`.
    """
    engines: dict[str, Any] = {}
    for source in sources:
        engines |= source.metadata.get("engines", {})
    losses = _entries("left_behind", sources)
    for loss in left_behind:
        losses.append({"file": loss.file, "rows": loss.rows, "places": loss.unreadable_ranges})
    joined = {
        "engines": engines,
        "recorders": _entries("recorders", sources),
        "left_behind": losses,
    }
    merged = dict(first.metadata)
    merged.pop("run_id", None)
    for key, value in joined.items():
        if value:
            merged[key] = value
    merged["merged_from"] = []
    for source in sources:
        merged["merged_from"] += source.origins(merged)
    return merged


def _entries(key: str, sources: Sequence[_Source]) -> list[Any]:
    """Return the entries of a list in the metadata of all runs, equal ones once."""
    found: list[Any] = []
    for source in sources:
        for entry in source.metadata.get(key, []):
            if entry not in found:
                found.append(entry)
    return found
