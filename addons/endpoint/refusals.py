"""Errors of a call as the harness receives them, and the events of refusals, whose number is
bounded."""

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from rolltap.addons.concurrency import Bucket
from rolltap.addons.dialects.call import DialectError
from rolltap.addons.endpoint.budget import BudgetUsedUp, PromptOverBudget
from rolltap.addons.errors import EngineError, RolltapError, RunError
from rolltap.addons.store.records import Event, EventKind
from rolltap.addons.store.rows import printable

logger = logging.getLogger(__name__)

UNREADABLE = "unreadable_tool_calls"
"""Code of the error for a call with tools when the model's tool calls cannot be read: it would wait
for them."""
DIVERGED = "diverged"
"""Code of the error for a request of a rerun that no recorded call answers. Its session takes no
more calls."""
RETRY_SECONDS = 10
"""Value of `retry-after` while the disk is full."""
LISTED = 64
"""Number of refusals of a session and a kind that have an event each. Later ones are counted."""
BURST = 20_000
"""Number of events of refusals that all sessions together may cause at once."""
PER_SECOND = 20.0
"""Number of such events each second after that."""
REMEMBERED = 10_000
"""Number of pairs of a session and a kind that are counted at the same time."""
_KINDS: dict[str, EventKind] = {UNREADABLE: "unreadable", DIVERGED: "diverged"}
_OUR_STATUS = 500
"""The lowest HTTP status of a `DialectError` that is of the recorder or the machine, not the
harness."""
_TRANSIENT = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a commit that end when somebody frees space."""
_OURS = (RolltapError, OSError, MemoryError, pa.ArrowException)
"""Errors with a cause outside of the request. A `ConnectionError` is the client's: those of engines
are `EngineError`s, and a disk has none."""
_DECISIVE = frozenset({"fault", "budget", "unreadable", DIVERGED})
"""Kinds of events on which the outcome of a session depends."""
_USUAL = frozenset({"refused", "joined", "replayed"})
"""Kinds of events that are no warning."""


def event_kind(error: Exception) -> EventKind:
    """Return the kind of the event for a model call that ends with `error`.

    It is `fault`, `budget`, `unreadable`, `diverged` or `rejected`. An invalid request is a
    `DialectError`, found before the engine is asked. Errors of engines and disks are ours: also
    an engine's refusal with a status below 500, because the recorder made the request that it
    refuses. An unexpected error is not: decoding, rendering and parsing depend on what was asked
    and sampled, and an agent that could cause a fault could take back a session that would fail.
    """
    if isinstance(error, BudgetUsedUp | PromptOverBudget):
        return "budget"
    if isinstance(error, DialectError):
        if error.code in _KINDS:
            return _KINDS[error.code]
        ours = error.status >= _OUR_STATUS
    else:
        ours = isinstance(error, _OURS) and not isinstance(error, ConnectionError)
    return "fault" if ours else "rejected"


def as_dialect_error(error: Exception, *, begun: bool = True) -> DialectError:
    """Return an error as the harness receives it. Logs the traceback of an unexpected one.

    `begun` is False for a request that became no call: an unexpected error says that it cannot be
    served. In a call that runs, another sample may be, so that harnesses may try again.
    """
    if isinstance(error, DialectError):
        return error
    if isinstance(error, EngineError):
        return DialectError(error.for_harness, status=error.status, code="engine_error")
    if isinstance(error, RunError):
        why = f"the recorder cannot read its run: {error}"
        return DialectError(why, status=500, code="not_recorded")
    if isinstance(error, OSError):
        why = f"the recorder cannot write this call: {error}"
        answer = DialectError(why, status=500, code="not_recorded")
        if error.errno in _TRANSIENT:
            answer.status = 503
            answer.retry_after = RETRY_SECONDS
        return answer
    logger.error(
        "a request or reply that rolltap, the renderer or the chat template cannot process",
        exc_info=error,
    )
    if begun:
        why = f"internal error of the recorder: {error!r}"
        return DialectError(why, status=500, code="internal_error")
    return DialectError(f"This request cannot be turned into a prompt: {error!r}")


def is_listed(count: int, listed: int = LISTED) -> bool:
    """Return True for each of the first `listed` repetitions, and then for those at powers of
    two."""
    return count <= listed or count & (count - 1) == 0


@dataclass(slots=True)
class _Tally:
    count: int = 0
    pending: Event | None = None
    """The newest event, unless it was written."""


class Refusals:
    """Writes events of refusals with `write`, and a log line for each.

    Repeated refusals are written at powers of two after the first `LISTED` of a session and a
    kind, with the number so far in `detail`, and at the end of the session with the total: a
    stuck session cannot flood the run or the log. Without a secret, sessions are free to choose
    their names: a rate bounds the events of all of them together, and those over it are counted
    the same way. The last event of a kind on which a session's outcome depends is written in any
    case, at the latest with its total. The texts of an event come from the wire: they are made
    printable and cut.
    """

    def __init__(self, write: Callable[[Event], None]) -> None:
        self._write = write
        self._tallies: OrderedDict[tuple[str | None, EventKind], _Tally] = OrderedDict()
        self._rate = Bucket(BURST, PER_SECOND)
        self._omitted = 0

    def record(self, event: Event) -> None:
        """Write or count one refusal."""
        event = replace(
            event,
            host=printable(event.host),
            method=printable(event.method),
            path=printable(event.path),
            detail=printable(event.detail),
        )
        if event.session_id is not None:
            event.session_id = printable(event.session_id)
        key = event.session_id, event.kind
        tally = self._tallies.setdefault(key, _Tally())
        self._tallies.move_to_end(key)
        tally.count += 1
        tally.pending = event
        if is_listed(tally.count):
            if tally.count > LISTED:
                so_far = f"{tally.count} {event.kind} so far, the last: {event.detail}"
                event = replace(event, detail=so_far)
            written = self._publish(event)
            if written or event.kind not in _DECISIVE:
                tally.pending = None
        if len(self._tallies) > REMEMBERED:
            self._end(next(iter(self._tallies)))

    def end(self, session_id: str | None) -> None:
        """Write the totals of a session, and forget them."""
        for key in [key for key in self._tallies if key[0] == session_id]:
            self._end(key)

    def close(self) -> None:
        """Write the totals of all sessions."""
        for key in list(self._tallies):
            self._end(key)
        if self._omitted:
            omitted = f"{self._omitted} events of refusals in all were left out"
            self._write(Event(kind="refused", detail=omitted))

    def _end(self, key: tuple[str | None, EventKind]) -> None:
        tally = self._tallies.pop(key)
        last = tally.pending
        if last is not None:
            detail = f"{tally.count} {last.kind} in all, the last: {last.detail}"
            self._publish(replace(last, detail=detail), always=last.kind in _DECISIVE)

    def _publish(self, event: Event, *, always: bool = False) -> bool:
        """Write an event if the rate allows it. Return False when it is counted without its
        session."""
        allowed = self._rate.take() or always
        if not allowed:
            self._omitted += 1
            if not is_listed(self._omitted, 0):
                return False
            omitted = f"{self._omitted} events of refusals in all were left out"
            event = replace(event, session_id=None, detail=f"{omitted}, the last: {event.detail}")
        level = logging.WARNING
        if event.kind in _USUAL:
            level = logging.INFO
        target = f"{event.method} {event.host}{event.path}".strip()
        why = event.detail or "not served"
        logger.log(level, "session %s: %s %s: %s", event.session_id, event.kind, target, why)
        self._write(event)
        return allowed
