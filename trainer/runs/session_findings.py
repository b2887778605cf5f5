"""Findings in the rows of one session in `sessions`."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from rolltap.addons.store.records import UNREWARDED, Session, SessionStatus
from rolltap.trainer.runs.finding import FROM_A_COPY, Finding, Grade, check_times, check_values


def check_session_rows(where: str, rows: Sequence[Session], *, salvaged: bool) -> Iterator[Finding]:
    """Yield the findings of the rows of one session. In a `salvaged` run revisions may be missing."""
    for session in rows:
        yield from check_values(where, session, status=get_args(SessionStatus))
        yield from check_times(where, session.started_at, session.finished_at)
        for what in _faults(session):
            yield Finding("damage", f"{where}, revision {session.revision}", what, FROM_A_COPY)
    revisions = Counter(session.revision for session in rows)
    for revision, count in revisions.items():
        if count > 1:
            advice = "remove the sessions-*.arrow file that is a copy of another"
            yield Finding("damage", where, f"it has {count} rows of revision {revision}", advice)
    if missing := sorted({*range(max(revisions) + 1)} - revisions.keys()):
        grade: Grade = "notice" if salvaged else "damage"
        yield Finding(grade, where, f"its rows of the revisions {missing} are missing", FROM_A_COPY)


def _faults(session: Session) -> Iterator[str]:
    if session.reward is not None and not math.isfinite(session.reward):
        yield f"its reward is {session.reward}"
    if session.reward is not None and session.status in UNREWARDED:
        yield f"it has the status {session.status} and the reward {session.reward}"
    values: Mapping[str, Callable[[Any], bool]] = {
        "parts": lambda value: _is_number(value) and math.isfinite(value),
        "evidence": lambda value: True,
        "suspicions": lambda value: isinstance(value, int) and _is_number(value) and value >= 0,
    }
    for column, is_right in values.items():
        try:
            found = json.loads(getattr(session, column))
        except (ValueError, TypeError, RecursionError) as error:
            yield f"its {column} are not JSON: {error}"
            continue
        if not isinstance(found, dict):
            yield f"its {column} are no JSON object"
        elif wrong := [name for name, value in found.items() if not is_right(value)]:
            yield f"its {column} have wrong values: {', '.join(wrong)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
