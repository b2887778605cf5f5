"""Facts of a session: counts and findings from the rows that the recorder wrote.

Faults: sessions that failed because of the engine, the recorder or the machine. They have no reward.

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

Budgets of a session, and the sessions that ended because they had used one up.

The recorder refuses calls over a budget, and tells the harness as its API tells it. A harness may go on all the same:
one whose prompt is too long compacts its history. So a budget has ended a session only if no later call was completed.

Groups of a rollout and the ids of their sessions.

| id | form |
| --- | --- |
| group | `<task>-<key>.<round>`; the key is 8 hexadecimal characters, a digest of what the sessions have in common |
| session | `<group>-<index>` |
| another attempt at it | `<group>-<index>~<number>` |
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from rolltap.addons.dialects.routes import ANY_PREFIX, find_route
from rolltap.addons.store.records import CallRole, CallStatus
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows

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


class Budget(BaseModel):
    """Budgets of one session. None is no limit. A session that used one up has the status `budget`.

    Attributes:
        calls: Model calls.
        sampled_tokens: Sampled tokens of all calls together.
        prompt_tokens: Tokens of the prompt of one call. A longer one is refused as by a model with that window, so that
            harnesses compact their history.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: int | None = Field(default=None, ge=1)
    sampled_tokens: int | None = Field(default=None, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)

    def options(self) -> dict[str, str]:
        """Return the recorder's options (`rolltap_max_calls` and others) of the budgets that are set."""
        return {f"rolltap_max_{name}": str(value) for name, value in self.model_dump(exclude_none=True).items()}


def find_budget(calls: Sequence[Asked], events: Sequence[Told]) -> str | None:
    """Return the budget that ended a session whose calls have ended, in words, or None.

    When there are several, the newest is named.
    """
    told = [event for event in events if event.kind == "budget"]
    if not told:
        return None
    last = max(told, key=lambda event: event.at)
    went_on = any(call.status == "completed" and call.started_at > last.at for call in calls)
    return None if went_on else f"budget: {last.detail}"


_REFUSALS = ("refused", "rejected", "unauthorised")


class Facts(NamedTuple):
    """Facts of a session whose calls have ended.

    Attributes:
        fault: The failure of the engine, the recorder or the machine, in words; None when there is none.
        budget: The budget that ended it, in words; None when none did.
        completed_calls: Number of completed model calls.
        calls: Number of all recorded model calls.
        uncaptured: Number of requests that look like model calls and were not answered, as far as they are told.
        refusals: Number of requests that were refused, as far as the recorder tells each: an event may stand for many.
        permanent: True when the session could not be run, and no further attempt can be before somebody mends it.
    """

    fault: str | None = None
    budget: str | None = None
    completed_calls: int = 0
    calls: int = 0
    uncaptured: int = 0
    refusals: int = 0
    permanent: bool = False


def session_facts(rows: SessionRows, session_id: str) -> Facts:
    """Return the facts of a session whose calls have ended.

    Raises `RunError` and `OSError` when the folder cannot be read.
    """
    calls = [
        Asked(call_id, role, status, started_at, len(completion_ids or ()))
        for call_id, role, status, started_at, completion_ids in rows.of(
            "calls", session_id, ("call_id", "role", "status", "started_at", "completion_ids")
        )
    ]
    events = [Told(*row) for row in rows.of("events", session_id, Told._fields)]
    return Facts(
        fault=find_fault(calls, events),
        budget=find_budget(calls, events),
        completed_calls=sum(call.status == "completed" for call in calls),
        calls=len(calls),
        uncaptured=sum(event.kind == "uncaptured" for event in events),
        refusals=sum(event.kind in _REFUSALS for event in events),
    )


_ATTEMPT = re.compile(r"~([1-9][0-9]*)$")


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions to run of one task. A group may have others that were run before."""

    task: Task
    group_id: str
    session_ids: Sequence[str]
    key: Mapping[str, str] = field(default_factory=dict)
    """Part of the group's key -> its digest, as `key_parts`; empty in a training."""


def place_of(session_id: str) -> str:
    """Return the id of a session's first attempt."""
    return _ATTEMPT.sub("", session_id)


def attempt_of(session_id: str) -> int:
    """Return the number of a session's earlier attempts."""
    found = _ATTEMPT.search(session_id)
    return int(found[1]) if found else 0


def next_attempt(session_id: str) -> str:
    """Return the id of the next attempt at a session."""
    return f"{place_of(session_id)}~{attempt_of(session_id) + 1}"


def key_parts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the digest of each value that the sessions of a group have in common: 8 hexadecimal characters.

    The values are of JSON.
    """
    texts = {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
    return {name: _short(text) for name, text in texts.items()}


def group_key(parts: Mapping[str, str]) -> str:
    """Return the digest of what the sessions of a group have in common: 8 hexadecimal characters."""
    return _short(json.dumps(parts, sort_keys=True))


def _short(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]
