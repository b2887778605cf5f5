"""Groups of a rollout and the ids of their sessions.

| id | form |
| --- | --- |
| group | `<task>-<key>.<round>`; the key is 8 hexadecimal characters, a digest of what the sessions have in common |
| session | `<group>-<index>` |
| another attempt at it | `<group>-<index>~<number>` |
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from rolltap.trainer.rollouts.tasks.task import Task

_ATTEMPT = re.compile(r"~([1-9][0-9]*)$")


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions to run of one task. A group may have others that were run before."""

    task: Task
    group_id: str
    session_ids: Sequence[str]


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


def group_key(*parts: str) -> str:
    """Return the digest of what the sessions of a group have in common: 8 hexadecimal characters."""
    return sha256("\n".join(parts).encode()).hexdigest()[:8]
