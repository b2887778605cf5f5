"""Facts of a session: counts and findings from the rows that the recorder wrote."""

from typing import NamedTuple

from rolltap.trainer.rollouts.budget import find_budget
from rolltap.trainer.rollouts.faults import Asked, Told, find_fault
from rolltap.trainer.rollouts.session_rows import SessionRows

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
