"""States of a generation, their transitions, and the status that each records."""

from enum import Enum, auto

from rolltap.addons.store.records import CallStatus


class State(Enum):
    """State of a generation. `NEXT` lists the transitions."""

    SAMPLING = auto()
    SAMPLED = auto()
    """The completion has a finish reason. It is committed once a request listens."""
    COMMITTED = auto()
    """Recorded as completed: later calls can continue it. With `rolltap_fsync=call` the sync is outstanding."""
    COMPLETED = auto()
    FAILED = auto()
    ABORTED = auto()


NEXT = {
    State.SAMPLING: {State.SAMPLED, State.FAILED, State.ABORTED},
    State.SAMPLED: {State.COMMITTED, State.FAILED, State.ABORTED},
    State.COMMITTED: {State.COMPLETED, State.FAILED},
}
"""Transitions. The other states are final."""
UNRECORDED = {State.SAMPLING, State.SAMPLED}
STATUS: dict[State, CallStatus] = {State.COMMITTED: "completed", State.FAILED: "failed", State.ABORTED: "aborted"}
"""Recorded status of a call, by the state that follows the unrecorded ones. A call whose sync fails stays `completed`:
its harness gets an error."""
