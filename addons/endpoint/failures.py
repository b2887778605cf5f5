"""Errors of a call as the harness receives them."""

import errno
import logging

import pyarrow as pa

from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint.budget import BudgetUsedUp, PromptOverBudget
from rolltap.addons.errors import EngineError, RolltapError, RunError
from rolltap.addons.store.records import EventKind

logger = logging.getLogger(__name__)

_OUR_STATUS = 500
"""The lowest HTTP status of a `DialectError` that is not the harness's: of the recorder or the machine."""

RETRY_SECONDS = 10
"""Value of `retry-after` while the disk is full."""
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a commit that end when somebody frees space."""
_OURS = (RolltapError, OSError, MemoryError, pa.ArrowException)
"""Errors with a cause outside of the request. A `ConnectionError` is the client's: those of engines are `EngineError`s,
and a disk has none."""


def event_kind(error: Exception) -> EventKind:
    """Return the kind of the event for a model call that ends with `error`: `fault`, `budget` or `rejected`.

    What the harness asked wrongly is a `DialectError`, found before the engine is asked. Errors of engines and disks
    are ours: also an engine's refusal with a status below 500, because the recorder made the request that it refuses.

    An error that nobody thought of is not: decoding, rendering and parsing depend on what was asked and sampled, such
    as the roles of messages, for which chat templates raise. An agent that could cause a fault could take back a
    session that would fail.
    """
    if isinstance(error, BudgetUsedUp | PromptOverBudget):
        return "budget"
    if isinstance(error, DialectError):
        return "rejected" if error.status < _OUR_STATUS else "fault"
    return "fault" if isinstance(error, _OURS) and not isinstance(error, ConnectionError) else "rejected"


def as_dialect_error(error: Exception, *, begun: bool = True) -> DialectError:
    """Return an error as the harness receives it. Logs the traceback of an unexpected one.

    `begun` is False for a request that became no call: an unexpected error says that it cannot be served. In a call
    that runs, another sample may be, so that harnesses may try again.
    """
    if isinstance(error, DialectError):
        return error
    if isinstance(error, EngineError):
        return DialectError(error.told, status=error.status, code="engine_error")
    if isinstance(error, RunError):
        return DialectError(f"the recorder cannot read its run: {error}", status=500, code="not_recorded")
    if isinstance(error, OSError):
        message = f"the recorder cannot write this call: {error}"
        if error.errno in _PASSING:
            return DialectError(message, status=503, code="not_recorded", retry_after=RETRY_SECONDS)
        return DialectError(message, status=500, code="not_recorded")
    logger.error("a request or reply that rolltap, the renderer or the chat template cannot work on", exc_info=error)
    if begun:
        return DialectError(f"internal error of the recorder: {error!r}", status=500, code="internal_error")
    return DialectError(f"This request cannot be turned into a prompt: {error!r}")
