"""Findings of a verification, in the rows of a file and in the calls of one session."""

import errno
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import get_args

import pyarrow as pa

from rolltap.addons.errors import LedgerError, RunError
from rolltap.addons.store.digest import DIGEST, row_digest
from rolltap.addons.store.records import Call, CallKind, CallRole, CallStatus, Session, find_violation
from rolltap.addons.store.tables import TABLES, batch_rows
from rolltap.trainer.runs.finding import FROM_A_COPY, Finding, check_times, check_values
from rolltap.trainer.runs.session_findings import check_session_rows
from rolltap.trainer.traces.reader import RecordedSession, Row, rebuild_calls
from rolltap.trainer.traces.sessions import TraceOptions, trace_session
from rolltap.trainer.traces.tree import parents_first

_DISK_FULL = f"[Errno {errno.ENOSPC}]"
"""Text of an `OSError` for a full disk, as the events of refused requests have it."""


def check_rows(table: str, batch: pa.RecordBatch) -> Iterator[tuple[Row | None, str | None]]:
    """Yield (row, fault) for each row of a batch. The fault is None for a sound row.

    The row is None when one of its values cannot be converted to Python, for example a string that is not UTF-8.
    """
    for number in range(batch.num_rows):
        try:
            [row] = batch_rows(batch.slice(number, 1))
        except RunError as error:
            yield None, f"a row has an invalid value: {error.__cause__}"
            continue
        fault = None
        if row[DIGEST] != row_digest(row, TABLES[table]):
            name = f"call {row['call_id']} of session" if table == "calls" else "a row of session"
            fault = f"{name} {row['session_id']}: its digest does not match, the row was changed after it was written"
        yield row, fault


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

    A `salvaged` run is merged from damaged ones, and rows are missing. There a call with a missing ancestor is a
    notice, not damage.
    """
    where = f"session {session_id}"
    ids = Counter(call_id for batch in calls for call_id in batch.column("call_id").to_pylist())
    for call_id, count in ids.items():
        if count > 1:
            advice = "remove the calls-*.arrow file that is a copy of another"
            yield Finding("damage", f"{where}, call {call_id}", f"it is recorded {count} times", advice)
    if ids.total() == len(ids):
        yield from _check_calls(run, session_id, calls, salvaged)
    if rows:
        yield from check_session_rows(where, rows, salvaged=salvaged)
    elif ids:
        yield Finding("notice", where, "has no row in sessions: its calls have no reward and no group")
    yield from _check_events(where, ids, events)


def _check_calls(run: Path, session_id: str, batches: Sequence[pa.RecordBatch], salvaged: bool) -> Iterator[Finding]:
    recorded: dict[str, str | None] = {}
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("call_id", "violation"))
        recorded.update(zip(*columns, strict=True))
    # with the recorded violations removed, a violation means that the prompt cannot be rebuilt
    unmarked = (_without_violations(batch) for batch in batches)
    calls = rebuild_calls(run, session_id, unmarked, check_digests=False)  # `check_rows` did
    recorded_parents = {call.call_id: call.parent_id for call in calls}
    orphaned: set[str] = set()
    for call_id, parent_id in parents_first(recorded_parents):
        if parent_id in orphaned or (recorded_parents[call_id] or call_id) not in recorded_parents:
            orphaned.add(call_id)
    for call in calls:
        where = f"session {session_id}, call {call.call_id}"
        if call.violation and salvaged and call.call_id in orphaned:
            yield Finding("notice", where, call.violation, "damaged rows were not merged: see left_behind in run.json")
        elif call.violation:
            yield Finding("damage", where, call.violation, FROM_A_COPY)
        call.violation = recorded[call.call_id] or call.violation
        yield from _check_tokens(where, call)
        names = {"kind": get_args(CallKind), "role": get_args(CallRole), "status": get_args(CallStatus)}
        yield from check_values(where, call, **names)
        yield from check_times(where, call.started_at, call.first_token_at, call.finished_at)
    try:
        trace_session(RecordedSession(session_id=session_id, session=None, calls=calls), TraceOptions())
    except LedgerError as error:
        yield Finding("damage", f"session {session_id}", str(error), "please report it as a bug of rolltap")


def _without_violations(batch: pa.RecordBatch) -> pa.RecordBatch:
    column = batch.schema.get_field_index("violation")
    return batch.set_column(column, "violation", pa.nulls(batch.num_rows, pa.string()))


def _check_tokens(where: str, call: Call) -> Iterator[Finding]:
    if min(chain(call.prompt_ids[call.prefix_length :], call.completion_ids), default=0) < 0:
        yield Finding("damage", where, "it has a negative token id", FROM_A_COPY)
    # a call without log-probabilities is left out of training anyway, marked or not
    violation = find_violation(call.completion_ids, call.logprobs, call.weight_versions) if call.logprobs else None
    if violation and not call.violation:
        yield Finding("damage", where, f"{violation}, and the call is not marked", "the call is not trained on anyway")


def _check_events(where: str, calls: Counter[str], events: Iterable[pa.RecordBatch]) -> Iterator[Finding]:
    refused = 0
    for batch in events:
        columns = (batch.column(name).to_pylist() for name in ("kind", "call_id", "detail"))
        for kind, call_id, detail in zip(*columns, strict=True):
            refused += kind == "fault" and _DISK_FULL in (detail or "")
            if kind == "call_started" and call_id not in calls:
                what = "it was started, not recorded: it still runs, its recorder was killed, or the disk was full"
                yield Finding("notice", f"{where}, call {call_id}", what)
    if refused:
        yield Finding("notice", where, f"the disk was full: {refused} requests were refused")
