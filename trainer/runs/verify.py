"""Is a run folder sound? Every file, every row's digest and every invariant.

First all files are read through, then the calls of one session after the other are rebuilt. Memory is that of one
session and of the sessions' rows.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltap.addons.store.digest import DIGEST, row_digest
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import SESSION_SCHEMA, Session
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.tables import TABLES, batch_rows, run_files
from rolltap.trainer.progress import Advance
from rolltap.trainer.runs.findings import FROM_A_COPY, Finding, check_session
from rolltap.trainer.runs.repair import cut_tail, find_leftovers, is_held, remove_leftovers
from rolltap.trainer.runs.segment_tail import find_tail
from rolltap.trainer.traces.reader import Row, SessionIndex


@dataclass(slots=True)
class Verification:
    """What was read, what was found and what was done about it."""

    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    """Table -> rows that can be read."""
    findings: list[Finding] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return all(finding.grade != "damage" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The verification as JSON values."""
        return {"sound": self.sound, **asdict(self)}


def verify_run(run: Path, advance: Advance, *, repair: bool = False) -> Verification:
    """Check a run folder; without `repair`, nothing in it is changed.

    With it, incomplete ends of files that nobody writes are cut off and leftover files removed first, where no row that
    could be read gets lost by that. A second repair then has nothing to do.

    Raises `RunError` when the folder is not a run, or is one of another schema.
    """
    read_metadata(run)
    found = Verification()
    if repair:
        found.repaired += remove_leftovers(run)
        for table, schema in TABLES.items():
            found.repaired += [cut for path in run_files(run, table) if (cut := cut_tail(path, schema))]
    found.findings += _check_leftovers(run)
    sessions: dict[str, Session] = {}
    unreadable: set[str | None] = set()
    files = [(table, path) for table in TABLES for path in run_files(run, table)]
    size, done = sum(path.stat().st_size for _, path in files), 0
    for table, path in files:
        with SegmentReader(path, TABLES[table]) as reader:
            for offset, batch in reader:
                where = f"{path.name}, byte {offset}"
                found.rows[table] += batch.num_rows
                try:
                    rows = batch_rows(batch)
                except (ValueError, OverflowError) as error:
                    what = f"a row has a value that cannot be: {error}"
                    found.findings.append(Finding("damage", where, what, FROM_A_COPY))
                    unreadable.update(batch.column("session_id").to_pylist())
                    continue
                found.findings += _check_digests(where, table, rows)
                if table == "sessions":
                    sessions |= {row["session_id"]: _session(row) for row in rows}
                advance("bytes read", done + offset, size)
            found.findings += [
                Finding("damage", f"{path.name}, byte {offset}", f"a commit is damaged: {what}", FROM_A_COPY)
                for offset, what in reader.invalid
            ]
        found.findings += _check_tail(path, TABLES[table], reader.damage)
        done += path.stat().st_size
    with SessionIndex(run, "calls") as calls, SessionIndex(run, "events") as events:
        known = dict.fromkeys([*calls.session_ids, *sessions, *events.session_ids])
        names = [name for name in known if name is not None and name not in unreadable]
        for number, name in enumerate(names, start=1):
            found.findings += check_session(
                run, name, sessions.get(name), list(calls.batches(name)), events.batches(name)
            )
            advance("sessions rebuilt", number, len(names))
    return found


def _session(row: Row) -> Session:
    return Session(**{name: row[name] for name in SESSION_SCHEMA.names if name != DIGEST})


def _check_leftovers(run: Path) -> Iterator[Finding]:
    for path, held in find_leftovers(run):
        if held:
            yield Finding("notice", path.name, "is being written")
        else:
            yield Finding("notice", path.name, "was left behind by a process that was killed", "--repair sees to it")


def _check_digests(where: str, table: str, rows: list[Row]) -> Iterator[Finding]:
    for row in rows:
        if row[DIGEST] != row_digest(row, TABLES[table]):
            name = f"call {row['call_id']} of session" if table == "calls" else "a row of session"
            what = f"{name} {row['session_id']} does not have its digest: it was changed after it was recorded"
            yield Finding("damage", where, what, FROM_A_COPY)


def _check_tail(path: Path, schema: pa.Schema, damage: str | None) -> Iterator[Finding]:
    tail = find_tail(path, schema)
    if tail is None:
        return
    where = f"{path.name}, byte {tail.start}"
    if is_held(path):
        yield Finding("notice", where, "a commit is being written")
    elif tail.kind == "unknown":
        more = f", {tail.later} whole commits among them" if tail.later else ""
        yield Finding("damage", where, f"{tail.size} bytes cannot be read{more}: {damage}", FROM_A_COPY)
    elif tail.kind == "uncommitted":
        what = f"a commit was not completed: its {tail.size} bytes are not read, and nothing is lost"
        yield Finding("notice", where, what, "--repair cuts them off")
    else:
        what = f"the file has lost its end, {tail.size} bytes of a commit are left"
        yield Finding("damage", where, what, "take the file from a copy of the run, or have --repair cut them off")
