"""Verification of a run folder: its files, the digests of its rows, and the invariants of its
calls; and its repair.

The first pass reads all files. The second rebuilds the calls of one session after the other.
Memory: the calls of one session, and the rows of all sessions. A repair cuts off an uncommitted
tail and keeps it beside its file, and removes temporary files of dead processes.
"""

import errno
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from huggingface_hub import try_to_load_from_cache

from rolltap.addons.errors import InputError, LedgerError, RunError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import (
    CALL_SCHEMA,
    DIGEST,
    UNREWARDED,
    Call,
    Session,
    find_violation,
)
from rolltap.addons.store.rewards import make_session
from rolltap.addons.store.rows import Row, row_digest
from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.staging import locked, new_file
from rolltap.addons.store.tables import checked_rows, named_fault, run_files
from rolltap.trainer.console import Advance
from rolltap.trainer.traces.conversations import rebuild_conversations
from rolltap.trainer.traces.reader import RecordedSession, rebuild_calls
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from rolltap.trainer.traces.tables import TABLES
from rolltap.trainer.traces.tree import parents_first

logger = logging.getLogger(__name__)

Grade = Literal["damage", "repair", "notice"]
"""`damage`: rows are lost, were changed, or break an invariant. `repair`: `--repair` removes it,
and no row with it. `notice`: unusual, but no row is damaged."""
FROM_A_COPY = "restore the file from a copy of the run if there is one; the other rows can be used"
SALVAGE = (
    "restore the file from a copy of the run, or save the other rows with `rolltap merge RUN --out"
    " NEW`"
)
Verdict = Literal["ok", "needs repair", "damaged"]
"""`needs repair`: no row is damaged, and `--repair` removes what a failed or killed writer left."""
_DISK_FULL = f"[Errno {errno.ENOSPC}]"
"""Text of an `OSError` for a full disk, as the events of refused requests have it."""
_FAILED_COMMIT = 8
"""Size in bytes of the uncommitted tail that a failed commit leaves: its prefix (`Segment.append`).
A killed writer leaves a longer one."""
_HIDDEN = re.compile(
    rf"\.(?:(?:{'|'.join(TABLES)})-.*\.arrow(?:\.cut-\d+)?|(?:run|policy)\.json)\.(?P<process>\d+)"
)
"""See `rolltap.addons.store.staging.hidden_name`."""
MOST_MISSING = 10
"""Revisions that are named when more are missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One deviation from a sound run."""

    grade: Grade
    where: str
    """File name and byte offset, or session id and call id."""
    what: str
    advice: str = ""


@dataclass(slots=True)
class Verification:
    """Result of a verification: numbers of sessions and rows, findings and repairs."""

    sessions: int = 0
    """Sessions that have a call or a row, as `Run.summary` counts them."""
    rows: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("calls", "sessions", "events"), 0)
    )
    """Table -> number of rows that can be read. Other tables are there if they have rows."""
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

    With `repair`, temporary files of dead processes are removed and uncommitted tails truncated
    before the check, except in files that a process is writing. A tail is kept in a file beside its
    table file. Commits with a prefix are kept, readable or not. Repairing is idempotent.

    Raises `RunError` when the folder is not a run, or has another schema version.
    """
    metadata = read_metadata(run)
    found = Verification()
    files = [(table, path) for table in TABLES for path in run_files(run, table)]
    if repair:
        for path, held in list(find_leftovers(run)):
            if not held:
                path.unlink()
                found.repaired.append(f"{path.name}: removed, a temporary file of a killed process")
        for table, path in files:
            found.repaired += cut_end(path, TABLES[table])
    found.findings += _check_leftovers(run)
    sessions: defaultdict[str, list[Session]] = defaultdict(list)
    unreadable: set[str | None] = set()
    size, done = sum(path.lstat().st_size for _, path in files), 0
    for table, path in files:
        with SegmentReader(path, TABLES[table]) as reader:
            for offset, batch in reader:
                found.rows[table] = found.rows.get(table, 0) + batch.num_rows
                for number, (row, fault) in enumerate(check_rows(table, batch)):
                    if fault is not None:
                        found.findings.append(
                            Finding("damage", f"{path.name}, byte {offset}", fault, SALVAGE)
                        )
                    if row is None:
                        unreadable.add(batch.column("session_id")[number].as_py())
                    elif table == "sessions":
                        sessions[row["session_id"]].append(make_session(row))
                advance("bytes read", done + offset, size)
        found.findings += _check_file(reader)
        done += path.lstat().st_size
    salvaged = "left_behind" in metadata
    rendering = load_rendering(metadata) if any(table == "calls" for table, _ in files) else None
    with SessionIndex(run, "calls") as calls, SessionIndex(run, "events") as events:
        recorded = {*calls.session_ids, *sessions} - {None}
        found.sessions = len(recorded)
        known = dict.fromkeys([*calls.session_ids, *sessions, *events.session_ids])
        names = [name for name in known if name is not None and name not in unreadable]
        for number, name in enumerate(names, start=1):
            found.findings += check_session(
                run,
                name,
                sessions.get(name, []),
                list(calls.batches(name)),
                events.batches(name),
                salvaged=salvaged,
            )
            if rendering is not None:
                found.findings += check_replies(
                    rebuild_calls(run, name, calls.batches(name)), rendering
                )
            advance("sessions rebuilt", number, len(names))
    return found


def load_rendering(metadata: Mapping[str, Any]) -> Any:
    """Return the rendering of a run's model, which reads replies; None where it is not on this
    machine.

    Nothing is downloaded, and a model of another tokenizer than the run's is none.
    """
    model = str(metadata.get("model"))
    try:
        known = Path(model, "tokenizer_config.json").is_file()
        if not known and not isinstance(
            try_to_load_from_cache(model, "tokenizer_config.json"), str
        ):
            return None
        from rolltap.addons.prompts.rendering import Rendering

        how = (str(metadata.get(name) or "auto") for name in ("renderer", "tool_parser"))
        rendering = Rendering(model, *how)
    except (
        ImportError,
        InputError,
        OSError,
        ValueError,
    ) as error:  # the name of a model may be any text
        logger.warning("replies are not compared with their tokens: %s", error)
        return None
    return rendering if rendering.digests.items() <= metadata.items() else None


def check_replies(calls: Sequence[Call], rendering: Any) -> Iterator[Finding]:
    """Yield a finding for each call of a session whose recorded reply is not what its tokens
    say."""
    from rolltap.addons.prompts.reply import is_sampled

    for conversation in rebuild_conversations(calls):
        call, reply = conversation.call, conversation.reply
        if reply is None or not call.dialect or call.violation or call.status != "completed":
            continue
        stop = call.parsed_sampling.get("stop") or []
        sampled, _ = rendering.read(
            call.prompt_ids, call.completion_ids, conversation.tools or [], stop
        )
        if not is_sampled(reply, sampled):
            where = f"session {call.session_id}, call {call.call_id}"
            yield Finding(
                "damage", where, "its reply is not what its tokens say", "do not run it again"
            )


def check_rows(table: str, batch: pa.RecordBatch) -> Iterator[tuple[Row | None, str | None]]:
    """Yield (row, fault) for each row of a batch. The fault is None for a sound row.

    The row is None when one of its values cannot be converted to Python, and when it is none that a
    writer writes.
    """
    for number in range(batch.num_rows):
        try:
            [(row, faults)] = checked_rows(batch.slice(number, 1))
        except RunError as error:
            yield None, f"a row has an invalid value: {error.__cause__}"
            continue
        sound = not faults
        if row[DIGEST] != row_digest(row, TABLES[table]):
            faults[DIGEST] = "its digest does not match, the row was changed after it was written"
        yield row if sound else None, named_fault(row, faults) if faults else None


def _check_file(reader: SegmentReader) -> Iterator[Finding]:
    """Yield the findings of a reader after its last batch."""
    for offset, what in reader.damage.items():
        yield Finding("damage", f"{reader.path.name}, byte {offset}", what, SALVAGE)
    if reader.uncommitted and is_held(reader.path):
        yield Finding("notice", reader.path.name, "a commit is being written")
    elif reader.uncommitted == _FAILED_COMMIT:
        what = (
            "a commit failed, for instance because the disk was full: its call was answered with an"
            " error"
        )
        yield Finding("repair", reader.path.name, what, "--repair truncates its 8 bytes")
    elif reader.uncommitted:
        what = (
            f"its last {reader.uncommitted} bytes are not a committed message: a killed process"
            " left them, or a machine crash lost the commit's prefix"
        )
        yield Finding(
            "repair",
            reader.path.name,
            what,
            "--repair truncates them and keeps them in a file beside it",
        )


def _check_leftovers(run: Path) -> Iterator[Finding]:
    for path, held in find_leftovers(run):
        if held:
            yield Finding("notice", path.name, "is being written")
        else:
            yield Finding(
                "repair",
                path.name,
                "is a temporary file of a process that was killed",
                "--repair removes it",
            )
    for path in sorted(
        run.glob("[!.]*.arrow.cut-*")
    ):  # appending one to its segment undoes the cut
        what = f"has {path.lstat().st_size} bytes that a repair cut off: no reader reads them"
        yield Finding("notice", path.name, what, "remove it when no call is missing")


def check_session(
    run: Path,
    session_id: str,
    rows: Sequence[Session],
    calls: Sequence[pa.RecordBatch],
    events: Iterable[pa.RecordBatch],
    *,
    salvaged: bool,
) -> Iterator[Finding]:
    """Yield the findings of one session: in its calls, in its own rows, and in its events.

    A `salvaged` run is merged from damaged ones, and rows are missing. There a call with a missing
    ancestor is a notice, not damage.
    """
    where = f"session {session_id}"
    ids = Counter(call_id for batch in calls for call_id in batch.column("call_id").to_pylist())
    for call_id, times in ids.items():
        if times > 1:
            advice = "remove the calls-*.arrow file that is a copy of another"
            yield Finding(
                "damage", f"{where}, call {call_id}", f"it is recorded {times} times", advice
            )
    if ids.total() == len(ids):
        yield from _check_calls(run, session_id, calls, salvaged)
    if rows:
        yield from check_session_rows(where, rows, salvaged=salvaged)
    elif ids:
        yield Finding(
            "notice", where, "has no row in sessions: its calls have no reward and no group"
        )
    yield from _check_events(where, ids, events)


def _check_calls(
    run: Path, session_id: str, batches: Sequence[pa.RecordBatch], salvaged: bool
) -> Iterator[Finding]:
    recorded: dict[str, str | None] = {}
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("call_id", "violation"))
        recorded.update(zip(*columns, strict=True))
    # with the recorded violations removed, a violation means that the prompt cannot be rebuilt
    column = CALL_SCHEMA.get_field_index("violation")
    unmarked = (
        batch.set_column(column, "violation", pa.nulls(batch.num_rows, pa.string()))
        for batch in batches
    )
    calls = rebuild_calls(run, session_id, unmarked, check_digests=False)  # `check_rows` did
    recorded_parents = {call.call_id: call.parent_id for call in calls}
    orphaned: set[str] = set()
    for call_id, parent_id in parents_first(recorded_parents):
        if parent_id in orphaned or (recorded_parents[call_id] or call_id) not in recorded_parents:
            orphaned.add(call_id)
    for call in calls:
        where = f"session {session_id}, call {call.call_id}"
        if call.violation and salvaged and call.call_id in orphaned:
            yield Finding(
                "notice",
                where,
                call.violation,
                "damaged rows were not merged: see left_behind in run.json",
            )
        elif call.violation:
            yield Finding("damage", where, call.violation, FROM_A_COPY)
        call.violation = recorded[call.call_id] or call.violation
        yield from _check_tokens(where, call)
        yield from check_times(where, call.started_at, call.first_token_at, call.finished_at)
    try:
        trace_session(
            RecordedSession(session_id=session_id, session=None, calls=calls), TraceOptions()
        )
    except LedgerError as error:
        yield Finding(
            "damage", f"session {session_id}", str(error), "please report it as a bug of rolltap"
        )


def _check_tokens(where: str, call: Call) -> Iterator[Finding]:
    if min(call.prompt_ids[call.prefix_length :], default=0) < 0:
        yield Finding("damage", where, "it has a negative token id", FROM_A_COPY)
    # a call without log-probabilities is left out of training anyway, marked or not
    violation = (
        find_violation(call.completion_ids, call.logprobs, call.weight_versions)
        if call.logprobs
        else None
    )
    if violation and not call.violation:
        yield Finding(
            "damage",
            where,
            f"{violation}, and the call is not marked",
            "the call is not trained on anyway",
        )


def _check_events(
    where: str, calls: Counter[str], events: Iterable[pa.RecordBatch]
) -> Iterator[Finding]:
    refused = 0
    for batch in events:
        columns = (batch.column(name).to_pylist() for name in ("kind", "call_id", "detail"))
        for kind, call_id, detail in zip(*columns, strict=True):
            refused += kind == "fault" and _DISK_FULL in (detail or "")
            if kind == "call_started" and call_id not in calls:
                what = (
                    "it was started, not recorded: it still runs, its recorder was killed, or the"
                    " disk was full"
                )
                yield Finding("notice", f"{where}, call {call_id}", what)
    if refused:
        yield Finding("notice", where, f"the disk was full: {refused} requests were refused")


def check_session_rows(where: str, rows: Sequence[Session], *, salvaged: bool) -> Iterator[Finding]:
    """Yield the findings of the rows of one session. In a `salvaged` run revisions may be
    missing."""
    for session in rows:
        yield from check_times(where, session.started_at, session.finished_at)
        if session.reward is not None and session.status in UNREWARDED:
            what = f"it has the status {session.status} and the reward {session.reward}"
            yield Finding("damage", f"{where}, revision {session.revision}", what, FROM_A_COPY)
    revisions = Counter(session.revision for session in rows)
    for revision, times in revisions.items():
        if times > 1:
            advice = "remove the sessions-*.arrow file that is a copy of another"
            yield Finding("damage", where, f"it has {times} rows of revision {revision}", advice)
    if missing := list(
        islice(
            (number for number in range(max(revisions)) if number not in revisions), MOST_MISSING
        )
    ):
        grade: Grade = "notice" if salvaged else "damage"
        yield Finding(grade, where, f"its rows of the revisions {missing} are missing", FROM_A_COPY)


def check_times(where: str, *times: datetime | None) -> Iterator[Finding]:
    """Yield a finding when times that should follow each other do not. None is not known."""
    known = [time for time in times if time is not None]
    if known != sorted(known):
        what = "its times are out of order: the clock was set back"
        yield Finding("notice", where, what, "do not rely on its duration")


def find_leftovers(run: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the temporary files of a run, each with True when a process may still use it.

    That is so when the file is locked, and when a process with the pid in its name is alive on this
    machine: it may be about to lock the file.
    """
    for path in sorted(run.iterdir()):
        if match := _HIDDEN.fullmatch(path.name):
            yield path, _is_alive(int(match["process"])) or is_held(path)


def is_held(path: Path) -> bool:
    """Return True when a process holds the lock of a file. Writers hold the lock of the file that
    they write."""
    with locked(path) as descriptor:
        return descriptor is None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def cut_end(path: Path, schema: pa.Schema) -> Iterator[str]:
    """Truncate the uncommitted tail of a segment, and yield a sentence. A locked segment is left as
    it is.

    The tail is kept in a file beside the segment, unless it is all zeros.
    """
    with locked(path, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
        if descriptor is None:
            return
        with SegmentReader(path, schema) as reader:
            for _ in reader:
                pass
        if reader.uncommitted:
            size = os.fstat(descriptor).st_size - reader.uncommitted
            kept = _keep(path, size) if any(map(any, _pieces(path, size))) else None
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            where = f", and are in {kept.name}" if kept else ""
            yield (
                f"{path.name}: the last {reader.uncommitted} bytes were truncated: not a committed"
                f" message{where}"
            )


def _keep(path: Path, start: int) -> Path:
    """Write what a file has from `start` on to a new file, which is on the disk when this returns.

    A file that has the same bytes is that of a repair which was killed before it truncated.
    """
    for number in count(1):
        kept = path.with_name(f"{path.name}.cut-{number}")
        if not kept.exists():
            with new_file(kept, "wb") as copy:
                copy.writelines(_pieces(path, start))
        same = kept.stat().st_size == path.stat().st_size - start
        if same and all(map(bytes.__eq__, _pieces(path, start), _pieces(kept, 0))):
            break
    return kept


def _pieces(path: Path, start: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on, of which few are in memory at once."""
    with path.open("rb") as file:
        file.seek(start)
        while piece := file.read(2**20):
            yield piece
