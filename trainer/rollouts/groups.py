"""Groups of a rollout and the ids of their sessions.

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
from hashlib import sha256

from rolltap.trainer.rollouts.tasks.task import Task

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
