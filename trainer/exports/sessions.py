"""Helpers of the formats: iterate over the sessions of a run, and serialise values as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolltap.trainer.progress import Advance
from rolltap.trainer.traces.reader import RecordedSession, count_sessions, iter_sessions


def each_session(run: Path, advance: Advance) -> Iterator[RecordedSession]:
    """Yield the sessions of a run, one at a time. Raises `RunError` when the folder cannot be read."""
    total = count_sessions(run)
    for done, recorded in enumerate(iter_sessions(run), 1):
        yield recorded
        advance("sessions", done, total)


def dump_json(value: Any) -> str:
    """Return `value` as JSON. NaN and the infinities, which JSON lacks, become strings: `"NaN"`, `"-Infinity"`."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=str), ensure_ascii=False)
