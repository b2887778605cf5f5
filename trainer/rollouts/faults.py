"""Faults: sessions that failed because of the engine, the recorder or the machine. They have no reward.

What the recorder has written decides. A session has a fault if no token was sampled in its calls other than side
questions (role `auxiliary`), or in these if it has no others, because its reward would say nothing about the policy.
It has one too if a model call failed for a reason of ours (an event `fault`), or began and could not be recorded, and
the harness did not recover: no later call of the same role, or of the agent itself, was completed. A call that is
stopped after the engine was silent for long has such an event: a session that is stopped at its time limit while it
waits for an engine that hangs has a fault. A request that was refused before it became a call has no role: later calls
other than side questions are taken for its recovery.

Side questions and requests for the list of models or a number of tokens are no part of solving the task. Their failures
count only in a session without other calls: they may have kept the harness from making one.

All else that ends a session is the agent's: requests that were wrong, the limits of the session and of the context
window, its time limit while it was being answered, and its exit status. This includes a harness that was killed: an
agent can kill its own harness, and the kernel's kill for want of memory looks the same.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from rolltap.addons.dialects.routes import ANY_PREFIX, find_route
from rolltap.addons.store.records import CallRole, CallStatus

NO_CALL = (
    "no model call came: did the program use the proxy? Its HTTP client must take user name and password from the URL, "
    "too. Node's own fetch uses the proxy with Node 22.21, 24.5 or newer, and a base URL on loopback is never sent "
    "to it. `rolltap doctor -- COMMAND` tries a program"
)
"""The fault of a session without a request to a model API."""
DISTRUST = (
    "The program does not trust the recorder's certificate. It reads none of the variables for certificates that "
    "`rolltap env` prints: put the file of SSL_CERT_FILE where its own settings take a CA."
)
"""Advice after a connection whose TLS failed."""


class Asked(NamedTuple):
    """A recorded call. `sampled` is the number of its sampled tokens."""

    call_id: str
    role: CallRole
    status: CallStatus
    started_at: datetime
    sampled: int


class Told(NamedTuple):
    """A recorded event, with the method, path and host of its request."""

    kind: str
    call_id: str | None
    detail: str
    at: datetime
    method: str
    path: str
    host: str = ""


def find_fault(calls: Sequence[Asked], events: Sequence[Told]) -> str | None:
    """Return the fault of a session whose calls have ended, in words, or None when it failed by itself or not at all.

    When there are several, the newest is named.
    """
    roles = {call.call_id: call.role for call in calls}
    faults = [event for event in events if event.kind == "fault"]
    lost = [
        event._replace(detail=f"call {event.call_id} began and could not be recorded")
        for event in events
        if event.kind == "call_started" and event.call_id not in roles
    ]
    own = [call for call in calls if call.role != "auxiliary"]
    if not any(call.sampled for call in own or calls):
        if not faults and any(event.kind == "budget" for event in events):
            return None  # the first prompt was over the budget: another attempt would be refused too
        if not calls and not faults and not lost:
            return _why_none(events)
        why = f": {_newest(faults).detail}" if faults else ""
        return f"no token was sampled, so that no reward can be the policy's{why}"
    open_faults = [
        fault
        for fault in faults + lost
        if not (own and _is_aside(fault, roles)) and not _recovered(fault, roles.get(fault.call_id or ""), calls)
    ]
    return f"it did not recover from: {_newest(open_faults).detail}" if open_faults else None


def failed_tls(kind: str, detail: str) -> bool:
    """Return True for the event of a connection whose TLS failed, as the addon of the egress writes it."""
    return kind == "refused" and "TLS failed: " in detail


def _why_none(events: Sequence[Told]) -> str:
    """Return why a session has no call.

    Its requests were refused, were not known as model calls, failed in their TLS, or did not come.
    """
    if rejected := [event for event in events if event.kind == "rejected"]:
        return f"every model call was refused: {_newest(rejected).detail}"
    if uncaptured := [event for event in events if event.kind == "uncaptured"]:
        last = _newest(uncaptured)
        request = f"{last.method} {last.host}{last.path}"
        return f"no model call came, only requests to unknown paths that look like one: {request}"
    if distrusting := [event for event in events if failed_tls(event.kind, event.detail)]:
        last = _newest(distrusting)
        return f"no model call came: {last.host}: {last.detail}. {DISTRUST}"
    return NO_CALL


def _newest(events: Sequence[Told]) -> Told:
    return max(events, key=lambda event: event.at)


def _is_aside(fault: Told, roles: Mapping[str, CallRole]) -> bool:
    """Return True for a fault of a side question, or of a request that asks for no sample."""
    if fault.call_id is not None and fault.call_id in roles:
        return roles[fault.call_id] == "auxiliary"
    route = find_route(fault.method, fault.path, {}, ANY_PREFIX)
    return route is not None and route.service in ("models", "count_tokens")


def _recovered(fault: Told, role: CallRole | None, calls: Sequence[Asked]) -> bool:
    enough = {"agent", role} if role is not None else {"agent", "subagent", "compaction"}
    return any(call.status == "completed" and call.started_at > fault.at and call.role in enough for call in calls)
