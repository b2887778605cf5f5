"""File descriptors of a rollout and of a service: as many as they may have, so many for each
session."""

import errno
import logging
import os
import resource

from rolltap.addons.errors import InputError

logger = logging.getLogger(__name__)

FEWEST_DESCRIPTORS = 256
"""Files that a recorder must be able to have open, to answer a call."""
MOST_DESCRIPTORS = 65_536
"""Files that a service has open at most: programs that it starts inherit the limit, and some try
every number."""
MOST_CONNECTIONS = 16_384
FEWEST_CONNECTIONS = 8
_BASE = 96
"""Descriptors that a process needs beside its connections."""
_PER_SESSION = 24
"""Descriptors of a session that runs."""
_SPARE = 8


def raise_limit() -> int:
    """Raise the limit of open files of this process and its recorder as far as it may, and return
    it.

    Raises `InputError` for one with which no call is answered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, _at_most(MOST_DESCRIPTORS, hard))
    if limit < FEWEST_DESCRIPTORS:
        raise InputError(
            f"too few files may be open: {limit}, and a recorder needs {FEWEST_DESCRIPTORS}: raise"
            " the limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def make_room(sessions: int) -> None:
    """Raise the soft limit of open files of this process to what so many sessions at once need.

    Warns when the hard limit is lower.
    """
    needed = _BASE + _PER_SESSION * sessions
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    limit = _at_most(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        logger.warning(
            "the limit of open files is %d, and %d sessions at once need about %d: raise it (ulimit"
            " -Hn), or give a smaller --concurrency",
            limit,
            sessions,
            needed,
        )


def _at_most(wanted: int, hard: int) -> int:
    if hard == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, hard)


def share_limit(limit: int, sessions: int) -> int:
    """Return how many connections there may be beside so many sessions at once.

    As many more may have been accepted before the first one of them is looked at.
    """
    free = limit - _BASE - _PER_SESSION * sessions
    return min(max(free // 2, FEWEST_CONNECTIONS), MOST_CONNECTIONS)


def too_many_files() -> str | None:
    """Return that this process has no descriptors left, in words; None while it has some."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        used = limit
    if limit - used > _SPARE:
        return None
    return (
        f"too many open files: {used} of at most {limit}; raise the limit (ulimit -Hn) and start"
        " the service again"
    )
