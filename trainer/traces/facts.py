"""Facts of a session: counts, its fault and its budget, from the rows that the recorder wrote.

`outcomes` says which failures are faults. The recorder refuses calls over a budget, and tells the
harness as its API tells it. A harness may go on all the same: one whose prompt is too long compacts
its history. So a budget has ended a session only if no later call was completed.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple

from rolltap.addons.dialects.routes import find_route
from rolltap.addons.store.records import CallRole, CallStatus
from rolltap.trainer.traces.reader import SessionRows

_PAST_IT = (
    "Its HTTP client must take user name and password from the proxy's URL, too. Node's own fetch"
    " uses the proxy with Node 22.21, 24.5 or newer, and a base URL on loopback is never sent to"
    " it. `rolltap doctor -- COMMAND` tries a program"
)
"""Causes that keep model calls away from the proxy."""
DISTRUST = (
    "The program does not trust the recorder's certificate. It reads none of the variables for"
    " certificates that `rolltap env` prints: put the file of SSL_CERT_FILE where its own settings"
    " take a CA."
)
"""Advice after a connection whose TLS failed."""
_PLACE_BYTES = 1 << 20
_LOOPBACK = re.compile(
    r"https?://(?:localhost|127\.0\.0\.1|\[::1\])[\w:./-]*|connection refused|ECONNREFUSED", re.I
)


def model_places(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return texts that may name the address of a program's model, by where they stand."""
    places: dict[str, str] = {}
    for name, value in environment.items():
        if name.endswith(("BASE_URL", "API_BASE")):
            places[name] = value
    for word in command[1:]:
        if not os.path.isfile(word):
            continue
        with suppress(OSError), open(word, "rb") as file:
            places[word] = file.read(_PLACE_BYTES).decode(errors="replace")
    places["the command line"] = " ".join(command)
    return places


def on_loopback(places: Mapping[str, str]) -> str:
    """Return a sentence that names the places of a model on loopback; empty without one."""
    named: list[str] = []
    for place, text in places.items():
        match = _LOOPBACK.search(text)
        if match is not None:
            named.append(f"{match[0]!r} in {place}")
    if not named:
        return ""
    return f"A model on loopback is asked past the recorder, and there is {' and '.join(named)}"


class CallFact(NamedTuple):
    """A recorded call. `sampled` is the number of its sampled tokens."""

    call_id: str
    role: CallRole
    status: CallStatus
    started_at: datetime
    sampled: int


class EventFact(NamedTuple):
    """A recorded event, with the method, path and host of its request."""

    kind: str
    call_id: str | None
    detail: str
    at: datetime
    method: str
    path: str
    host: str = ""


def find_fault(calls: Sequence[CallFact], events: Sequence[EventFact]) -> str | None:
    """Return the newest fault of a session whose calls have ended, in words; None without one."""
    roles = {call.call_id: call.role for call in calls}
    faults = _of_kinds(events, "fault")
    lost: list[EventFact] = []
    for event in _of_kinds(events, "call_started"):
        if event.call_id not in roles:
            detail = f"call {event.call_id} began and could not be recorded"
            lost.append(event._replace(detail=detail))
    own = [call for call in calls if call.role != "auxiliary"]
    if not any(call.sampled for call in own or calls):
        if faults:
            why = f": {_newest(faults).detail}"
        elif _of_kinds(events, "budget"):
            # the first prompt was over the budget: another attempt would be refused too
            return None
        elif calls or lost:
            why = ""
        else:
            return _why_no_call(events)
        return f"no token was sampled, so that no reward can be the policy's{why}"
    open_faults: list[EventFact] = []
    for fault in faults + lost:
        if own and _is_side_question(fault, roles):
            continue
        if not _recovered(fault, roles.get(fault.call_id or ""), calls):
            open_faults.append(fault)
    if not open_faults:
        return None
    return f"it did not recover from: {_newest(open_faults).detail}"


def failed_tls(kind: str, detail: str) -> bool:
    """Return True for the event of a connection whose TLS failed, as the addon of the egress writes
    it."""
    return kind == "refused" and "TLS failed: " in detail


def _why_no_call(events: Sequence[EventFact]) -> str:
    rejected = _of_kinds(events, "rejected")
    if rejected:
        return f"every model call was refused: {_newest(rejected).detail}"
    uncaptured = _of_kinds(events, "uncaptured")
    if uncaptured:
        last = _newest(uncaptured)
        request = f"{last.method} {last.host}{last.path} ({last.detail})"
        return f"no model call came, only requests to unknown paths that look like one: {request}"
    untrusting = [event for event in events if failed_tls(event.kind, event.detail)]
    if untrusting:
        last = _newest(untrusting)
        return f"no model call came: {last.host}: {last.detail}. {DISTRUST}"
    others = [event for event in _of_kinds(events, "refused") if event.method]
    if others:
        last = _newest(others)
        request = f"{last.method} {last.host}{last.path}"
        return f"no model call came, only other requests: {request}. {_PAST_IT}"
    return f"no model call came: did the program use the proxy? {_PAST_IT}"


def _of_kinds(events: Sequence[EventFact], *kinds: str) -> list[EventFact]:
    return [event for event in events if event.kind in kinds]


def _newest(events: Sequence[EventFact]) -> EventFact:
    return max(events, key=attrgetter("at"))


def _is_side_question(fault: EventFact, roles: Mapping[str, CallRole]) -> bool:
    """Return True for a fault of a side question, or of a request that asks for no sample."""
    if fault.call_id is not None and fault.call_id in roles:
        return roles[fault.call_id] == "auxiliary"
    route = find_route(fault.method, fault.path, {})
    return route is not None and route.service in ("models", "count_tokens")


def _recovered(fault: EventFact, role: CallRole | None, calls: Sequence[CallFact]) -> bool:
    enough: set[CallRole] = {"agent", "subagent", "compaction"}
    if role is not None:
        enough = {"agent", role}
    return any(call.role in enough for call in _completed_after(fault, calls))


def _completed_after(event: EventFact, calls: Sequence[CallFact]) -> list[CallFact]:
    return [call for call in calls if call.status == "completed" and call.started_at > event.at]


def find_budget(calls: Sequence[CallFact], events: Sequence[EventFact]) -> str | None:
    """Return the newest budget that ended a session whose calls have ended, in words; None when
    none did."""
    refused = _of_kinds(events, "budget")
    if not refused:
        return None
    last = _newest(refused)
    if _completed_after(last, calls):
        return None
    return f"budget: {last.detail}"


def find_divergence(calls: Sequence[CallFact], events: Sequence[EventFact]) -> str | None:
    """Return why a fork did not come to the call at which it samples, in words; None when it did,
    and after a fault."""
    if _of_kinds(events, "fault"):
        return None
    for event in _of_kinds(events, "diverged"):
        return event.detail
    if _of_kinds(events, "rerun") and not calls:
        return "diverged: it ended before the call at which it forks"
    return None


class Facts(NamedTuple):
    """Facts of a session whose calls have ended.

    Attributes:
        fault: The failure of the engine, the recorder or the machine, in words; None when there is
            none.
        budget: The budget that ended it, in words; None when none did.
        completed_calls: Number of completed model calls.
        calls: Number of all recorded model calls.
        uncaptured: Number of requests that look like model calls and were not answered, as far as
            they are told.
        refusals: Number of requests that were refused, as far as the recorder tells each: an event
            may stand for many.
        unreadable: Why a call with tools was refused, when the model's tool calls cannot be read;
            None when none was.
        diverged: Why a fork did not come to the call at which it forks, in words; None when it did.
        permanent: True when the session could not be run, and no retry can be before its task or
            preset is fixed.
    """

    fault: str | None = None
    budget: str | None = None
    completed_calls: int = 0
    calls: int = 0
    uncaptured: int = 0
    refusals: int = 0
    unreadable: str | None = None
    permanent: bool = False
    diverged: str | None = None


def session_facts(rows: SessionRows, session_id: str) -> Facts:
    """Return the facts of a session whose calls have ended. Raises `RunError` and `OSError` of the
    folder."""
    columns = ("call_id", "role", "status", "started_at", "completion_ids")
    calls: list[CallFact] = []
    for call_id, role, status, started_at, sampled in rows.of("calls", session_id, columns):
        calls.append(CallFact(call_id, role, status, started_at, len(sampled or ())))
    events = [EventFact(*row) for row in rows.of("events", session_id, EventFact._fields)]
    unreadable = None
    for event in _of_kinds(events, "unreadable")[:1]:
        unreadable = event.detail
    return Facts(
        diverged=find_divergence(calls, events),
        fault=find_fault(calls, events),
        budget=find_budget(calls, events),
        completed_calls=[call.status for call in calls].count("completed"),
        calls=len(calls),
        uncaptured=len(_of_kinds(events, "uncaptured")),
        unreadable=unreadable,
        refusals=len(_of_kinds(events, "refused", "rejected", "unauthorised")),
    )
