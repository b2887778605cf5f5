"""Errors of a call as the harness receives them."""

import errno
import logging

from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint.budget import BudgetUsedUp, PromptOverBudget
from rolltap.addons.errors import EngineError, RunError
from rolltap.addons.store.records import EventKind

logger = logging.getLogger(__name__)

_OUR_STATUS = 500
"""The lowest HTTP status of a `DialectError` that is not the harness's: of the recorder or the machine."""

RETRY_SECONDS = 10
"""Value of `retry-after` while the disk is full."""
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a commit that end when somebody frees space."""


def event_kind(error: Exception) -> EventKind:
    """Return the kind of the event for a model call that ends with `error`: `fault`, `budget` or `rejected`.

    What the harness asked wrongly is a `DialectError`, found before the engine is asked. Any other error is ours: also
    an engine's refusal with a status below 500, because the recorder made the request that it refuses.
    """
    if isinstance(error, BudgetUsedUp | PromptOverBudget):
        return "budget"
    theirs = isinstance(error, DialectError) and error.status < _OUR_STATUS
    return "rejected" if theirs else "fault"


def as_dialect_error(error: Exception) -> DialectError:
    """Return an error as the harness receives it. Logs the traceback of an unexpected one."""
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
    logger.error("a bug of rolltap or of a renderer", exc_info=error)
    return DialectError(f"internal error of the recorder: {error!r}", status=500, code="internal_error")
