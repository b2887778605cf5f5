"""Verification of a run folder: its files, the digests of its rows, and the invariants of its calls.

The first pass reads all files. The second rebuilds the calls of one session after the other. Memory: the calls of one
session, and the rows of all sessions.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import make_session
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.session_index import SessionIndex
from rolltap.addons.store.tables import TABLES, run_files
from rolltap.trainer.progress import Advance
from rolltap.trainer.runs.finding import SALVAGE, Finding
from rolltap.trainer.runs.findings import check_rows, check_session
from rolltap.trainer.runs.repair import cut_end, find_leftovers, is_held, kept_cuts, remove_leftovers

Verdict = Literal["ok", "needs repair", "damaged"]
"""`needs repair`: no row is damaged, and `--repair` removes what a failed or killed writer left."""
_FAILED_COMMIT = 8
"""Size in bytes of the uncommitted tail that a failed commit leaves: its prefix (`Segment.append`). A killed writer
leaves a longer one."""


@dataclass(slots=True)
class Verification:
    """Result of a verification: numbers of rows, findings and repairs."""

    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    """Table -> number of rows that can be read."""
    findings: list[Finding] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """A sentence for each repair."""

    @property
    def sound(self) -> bool:
        """True when no finding is damage."""
        return all(finding.grade != "damage" for finding in self.findings)

    @property
    def verdict(self) -> Verdict:
        """The gravest of the findings, in a word."""
        grades = {finding.grade for finding in self.findings}
        return "damaged" if "damage" in grades else "needs repair" if "repair" in grades else "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the verification as JSON values."""
        return {"verdict": self.verdict, "sound": self.sound, **asdict(self)}


def verify_run(run: Path, advance: Advance, *, repair: bool = False) -> Verification:
    """Check a run folder. Without `repair`, no file is changed.

    With `repair`, temporary files of dead processes are removed and uncommitted tails truncated before the check,
    except in files that a process is writing. A tail is kept in a file beside its table file. Commits with a prefix are
    kept, readable or not. Repairing is idempotent.

    Raises `RunError` when the folder is not a run, or has another schema version.
    """
    metadata = read_metadata(run)
    found = Verification()
    files = [(table, path) for table in TABLES for path in run_files(run, table)]
    if repair:
        found.repaired += remove_leftovers(run)
        for table, path in files:
            found.repaired += cut_end(path, TABLES[table])
    found.findings += _check_leftovers(run)
    sessions: defaultdict[str, list[Session]] = defaultdict(list)
    unreadable: set[str | None] = set()
    size, done = sum(path.stat().st_size for _, path in files), 0
    for table, path in files:
        with SegmentReader(path, TABLES[table]) as reader:
            for offset, batch in reader:
                found.rows[table] += batch.num_rows
                for number, (row, fault) in enumerate(check_rows(table, batch)):
                    if fault is not None:
                        found.findings.append(Finding("damage", f"{path.name}, byte {offset}", fault, SALVAGE))
                    if row is None:
                        unreadable.add(batch.column("session_id")[number].as_py())
                    elif table == "sessions":
                        sessions[row["session_id"]].append(make_session(row))
                advance("bytes read", done + offset, size)
        found.findings += _check_file(reader)
        done += path.stat().st_size
    salvaged = "left_behind" in metadata
    with SessionIndex(run, "calls") as calls, SessionIndex(run, "events") as events:
        known = dict.fromkeys([*calls.session_ids, *sessions, *events.session_ids])
        names = [name for name in known if name is not None and name not in unreadable]
        for number, name in enumerate(names, start=1):
            found.findings += check_session(
                run, name, sessions.get(name, []), list(calls.batches(name)), events.batches(name), salvaged=salvaged
            )
            advance("sessions rebuilt", number, len(names))
    return found


def _check_leftovers(run: Path) -> Iterator[Finding]:
    for path, held in find_leftovers(run):
        if held:
            yield Finding("notice", path.name, "is being written")
        else:
            yield Finding(
                "repair", path.name, "is a temporary file of a process that was killed", "--repair removes it"
            )
    for path in kept_cuts(run):
        what = f"has {path.stat().st_size} bytes that a repair cut off: no reader reads them"
        yield Finding("notice", path.name, what, "remove it when no call is missing")


def _check_file(reader: SegmentReader) -> Iterator[Finding]:
    """Yield the findings of a reader after its last batch."""
    for offset, what in reader.damage.items():
        yield Finding("damage", f"{reader.path.name}, byte {offset}", what, SALVAGE)
    if reader.uncommitted and is_held(reader.path):
        yield Finding("notice", reader.path.name, "a commit is being written")
    elif reader.uncommitted == _FAILED_COMMIT:
        what = "a commit failed, for instance because the disk was full: its call was answered with an error"
        yield Finding("repair", reader.path.name, what, "--repair truncates its 8 bytes")
    elif reader.uncommitted:
        what = (
            f"its last {reader.uncommitted} bytes are not a committed message: a killed process left them, or a "
            "machine crash lost the commit's prefix"
        )
        yield Finding("repair", reader.path.name, what, "--repair truncates them and keeps them in a file beside it")
