"""Verification of a run folder: its files, the digests of its rows, and the invariants of its
calls.

The first pass reads all files. The second rebuilds the calls of one session after the other.
Memory: the calls of one session, and the places of all rows.
"""

import errno
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from huggingface_hub import try_to_load_from_cache

from rolltap.addons.errors import InputError, LedgerError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import CALL_SCHEMA, UNREWARDED, Call, Session, find_violation
from rolltap.addons.store.rewards import make_session
from rolltap.addons.store.segment import SegmentReader
from rolltap.trainer.console import Advance
from rolltap.trainer.runs.repair import find_leftovers, is_held, repair_run
from rolltap.trainer.runs.walk import check_rows, index_tables, open_files
from rolltap.trainer.traces.conversations import rebuild_conversations
from rolltap.trainer.traces.reader import RecordedSession, rebuild_calls, session_ids
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
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
_SHOWN = ("calls", "sessions", "events")
"""Tables whose rows are counted even if there are none, and whose sessions are checked."""
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
    rows: dict[str, int] = field(default_factory=dict)
    """Table -> number of rows that can be read. Other tables are there if they have rows."""
    findings: list[Finding] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    """A sentence for each repair."""

    @property
    def sound(self) -> bool:
        """True when no finding is damage."""
        return self.verdict != "damaged"

    @property
    def verdict(self) -> Verdict:
        """The gravest of the findings, in a word."""
        grades = {finding.grade for finding in self.findings}
        if "damage" in grades:
            return "damaged"
        if "repair" in grades:
            return "needs repair"
        return "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the verification as JSON values."""
        return {"verdict": self.verdict, "sound": self.sound, **asdict(self)}


def verify_run(run: Path, advance: Advance, *, repair: bool = False) -> Verification:
    """Check a run folder. Without `repair`, no file is changed; with it, see `repair_run`.

    Raises `RunError` when the folder is not a run, or has another schema version.
    """
    metadata = read_metadata(run)
    found = Verification(rows=dict.fromkeys(_SHOWN, 0))
    if repair:
        found.repaired = repair_run(run)
    found.findings += _check_leftovers(run)
    unreadable: set[str | None] = set()
    for table, reader in open_files([run], "bytes read", advance):
        for offset, batch in reader:
            found.rows[table] = found.rows.get(table, 0) + batch.num_rows
            for number, (row, fault) in enumerate(check_rows(table, batch)):
                if fault is not None:
                    where = f"{reader.path.name}, byte {offset}"
                    found.findings.append(Finding("damage", where, fault, SALVAGE))
                if row is None:
                    unreadable.add(batch.column("session_id")[number].as_py())
        found.findings += _check_file(reader)
    rendering = None
    if found.rows["calls"]:
        rendering = load_rendering(metadata)
    salvaged = "left_behind" in metadata
    with index_tables(run, _SHOWN) as tables:
        found.sessions = len(session_ids(tables["calls"], tables["sessions"]))
        names = session_ids(*tables.values())
        for number, name in enumerate(names, start=1):
            if name not in unreadable:
                found.findings += _check_session(run, name, tables, salvaged, rendering)
            advance("sessions rebuilt", number, len(names))
    return found


def load_rendering(metadata: Mapping[str, Any]) -> Any:
    """Return the rendering of a run's model, which reads replies; None where it is not on this
    machine.

    Nothing is downloaded, and a model of another tokenizer than the run's is none.
    """
    model = str(metadata.get("model"))
    renderer = str(metadata.get("renderer") or "auto")
    tool_parser = str(metadata.get("tool_parser") or "auto")
    try:
        file: Any = str(Path(model, "tokenizer_config.json"))
        if not Path(file).is_file():
            file = try_to_load_from_cache(model, "tokenizer_config.json")
        if not isinstance(file, str):
            return None
        from rolltap.addons.prompts.rendering import Rendering

        rendering = Rendering(model, renderer, tool_parser)
    # the name of a model may be any text
    except (ImportError, InputError, OSError, ValueError) as error:
        logger.warning("replies are not compared with their tokens: %s", error)
        return None
    if rendering.digests.items() <= metadata.items():
        return rendering
    return None


def check_replies(calls: Sequence[Call], rendering: Any) -> Iterator[Finding]:
    """Yield a finding for each call of a session whose recorded reply is not what its tokens
    say."""
    from rolltap.addons.prompts.reply import is_sampled

    for conversation in rebuild_conversations(calls):
        call = conversation.call
        reply = conversation.reply
        if reply is None or not call.dialect or call.violation or call.status != "completed":
            continue
        stop = call.parsed_sampling.get("stop") or []
        tools = conversation.tools or []
        sampled, _ = rendering.read(call.prompt_ids, call.completion_ids, tools, stop)
        if not is_sampled(reply, sampled):
            where = f"session {call.session_id}, call {call.call_id}"
            what = "its reply is not what its tokens say"
            yield Finding("damage", where, what, "do not run it again")


def _check_file(reader: SegmentReader) -> Iterator[Finding]:
    """Yield the findings of a reader after its last batch."""
    name = reader.path.name
    for offset, what in reader.damage.items():
        yield Finding("damage", f"{name}, byte {offset}", what, SALVAGE)
    if not reader.uncommitted:
        return
    if is_held(reader.path):
        yield Finding("notice", name, "a commit is being written")
    elif reader.uncommitted == _FAILED_COMMIT:
        what = (
            "a commit failed, for instance because the disk was full: its call was answered with an"
            " error"
        )
        yield Finding("repair", name, what, "--repair truncates its 8 bytes")
    else:
        what = (
            f"its last {reader.uncommitted} bytes are not a committed message: a killed process"
            " left them, or a machine crash lost the commit's prefix"
        )
        advice = "--repair truncates them and keeps them in a file beside it"
        yield Finding("repair", name, what, advice)


def _check_leftovers(run: Path) -> Iterator[Finding]:
    for path, is_used in find_leftovers(run):
        if is_used:
            yield Finding("notice", path.name, "is being written")
        else:
            what = "is a temporary file of a process that was killed"
            yield Finding("repair", path.name, what, "--repair removes it")
    # appending one to its segment undoes the cut
    for path in sorted(run.glob("[!.]*.arrow.cut-*")):
        what = f"has {path.lstat().st_size} bytes that a repair cut off: no reader reads them"
        yield Finding("notice", path.name, what, "remove it when no call is missing")


def _check_session(
    run: Path,
    session_id: str,
    tables: Mapping[str, SessionIndex],
    salvaged: bool,
    rendering: Any,
) -> Iterator[Finding]:
    """Yield the findings of one session: in its calls, in its own rows, and in its events.

    A `salvaged` run is merged from damaged ones, and rows are missing. There a call with a missing
    ancestor is a notice, not damage.
    """
    where = f"session {session_id}"
    calls = list(tables["calls"].batches(session_id))
    times: Counter[str] = Counter()
    for batch in calls:
        times.update(batch.column("call_id").to_pylist())
    copied = [call_id for call_id in times if times[call_id] > 1]
    for call_id in copied:
        what = f"it is recorded {times[call_id]} times"
        advice = "remove the calls-*.arrow file that is a copy of another"
        yield Finding("damage", f"{where}, call {call_id}", what, advice)
    if not copied:
        yield from _check_calls(run, session_id, calls, salvaged)
        if rendering is not None:
            yield from check_replies(rebuild_calls(run, session_id, calls), rendering)
    rows = [make_session(row) for row in tables["sessions"].rows(session_id)]
    if rows:
        yield from check_session_rows(where, rows, salvaged=salvaged)
    elif calls:
        what = "has no row in sessions: its calls have no reward and no group"
        yield Finding("notice", where, what)
    yield from _check_events(where, times, tables["events"].batches(session_id))


def _check_calls(
    run: Path,
    session_id: str,
    batches: Sequence[pa.RecordBatch],
    salvaged: bool,
) -> Iterator[Finding]:
    marked: dict[str, str | None] = {}
    unmarked: list[pa.RecordBatch] = []
    # with the recorded violations removed, a violation means that the prompt cannot be rebuilt
    column = CALL_SCHEMA.get_field_index("violation")
    for batch in batches:
        for row in batch.select(["call_id", "violation"]).to_pylist():
            marked[row["call_id"]] = row["violation"]
        nothing = pa.nulls(batch.num_rows, pa.string())
        unmarked.append(batch.set_column(column, "violation", nothing))
    # `check_rows` has compared the digests
    calls = rebuild_calls(run, session_id, unmarked, check_digests=False)
    parents = {call.call_id: call.parent_id for call in calls}
    orphaned: set[str] = set()
    for call_id, known_parent in parents_first(parents):
        parent_id = parents[call_id]
        is_lost = parent_id is not None and parent_id not in parents
        if is_lost or known_parent in orphaned:
            orphaned.add(call_id)
    for call in calls:
        where = f"session {session_id}, call {call.call_id}"
        if call.violation and salvaged and call.call_id in orphaned:
            advice = "damaged rows were not merged: see left_behind in run.json"
            yield Finding("notice", where, call.violation, advice)
        elif call.violation:
            yield Finding("damage", where, call.violation, FROM_A_COPY)
        call.violation = marked[call.call_id] or call.violation
        yield from _check_tokens(where, call)
        yield from _check_times(where, call.started_at, call.first_token_at, call.finished_at)
    recorded = RecordedSession(session_id=session_id, session=None, calls=calls)
    try:
        trace_session(recorded, TraceOptions())
    except LedgerError as error:
        advice = "please report it as a bug of rolltap"
        yield Finding("damage", f"session {session_id}", str(error), advice)


def _check_events(
    where: str, calls: Collection[str], events: Iterable[pa.RecordBatch]
) -> Iterator[Finding]:
    refused = 0
    for batch in events:
        for event in batch.select(["kind", "call_id", "detail"]).to_pylist():
            call_id = event["call_id"]
            if event["kind"] == "fault" and _DISK_FULL in (event["detail"] or ""):
                refused += 1
            if event["kind"] == "call_started" and call_id not in calls:
                what = (
                    "it was started, not recorded: it still runs, its recorder was killed, or the"
                    " disk was full"
                )
                yield Finding("notice", f"{where}, call {call_id}", what)
    if refused:
        yield Finding("notice", where, f"the disk was full: {refused} requests were refused")


def _check_tokens(where: str, call: Call) -> Iterator[Finding]:
    if min(call.prompt_ids[call.prefix_length :], default=0) < 0:
        yield Finding("damage", where, "it has a negative token id", FROM_A_COPY)
    # a call without log-probabilities is left out of training anyway, marked or not
    if call.violation or not call.logprobs:
        return
    violation = find_violation(call.completion_ids, call.logprobs, call.weight_versions)
    if violation:
        what = f"{violation}, and the call is not marked"
        yield Finding("damage", where, what, "the call is not trained on anyway")


def check_session_rows(where: str, rows: Sequence[Session], *, salvaged: bool) -> Iterator[Finding]:
    """Yield the findings of the rows of one session. In a `salvaged` run revisions may be
    missing."""
    for session in rows:
        yield from _check_times(where, session.started_at, session.finished_at)
        if session.reward is not None and session.status in UNREWARDED:
            what = f"it has the status {session.status} and the reward {session.reward}"
            yield Finding("damage", f"{where}, revision {session.revision}", what, FROM_A_COPY)
    revisions = Counter(session.revision for session in rows)
    for revision, times in revisions.items():
        if times > 1:
            advice = "remove the sessions-*.arrow file that is a copy of another"
            yield Finding("damage", where, f"it has {times} rows of revision {revision}", advice)
    missing: list[int] = []
    for number in range(max(revisions)):
        if number not in revisions:
            missing.append(number)
        if len(missing) == MOST_MISSING:
            break
    if missing:
        grade: Grade = "notice" if salvaged else "damage"
        yield Finding(grade, where, f"its rows of the revisions {missing} are missing", FROM_A_COPY)


def _check_times(where: str, *times: datetime | None) -> Iterator[Finding]:
    """Yield a finding when times that should follow each other do not. None is not known."""
    known = [time for time in times if time is not None]
    if known != sorted(known):
        what = "its times are out of order: the clock was set back"
        yield Finding("notice", where, what, "do not rely on its duration")
