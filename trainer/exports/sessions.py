"""What the formats share: reading a run session by session, naming a session's file, writing JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolltap.trainer.file_names import file_name
from rolltap.trainer.progress import Advance
from rolltap.trainer.traces.reader import RecordedSession, count_sessions, iter_sessions


def each_session(run: Path, advance: Advance) -> Iterator[RecordedSession]:
    """The sessions of a run, one at a time. Raises `RunError` when the folder cannot be read."""
    total = count_sessions(run)
    for done, recorded in enumerate(iter_sessions(run), 1):
        yield recorded
        advance("sessions", done, total)


def session_file(session_id: str) -> str:
    """A file name for a session, whatever its id."""
    return f"{file_name(session_id)}.json"


def dump_json(value: Any) -> str:
    """`value` as JSON. NaN and the infinities, which JSON lacks and a harness may have sent, become their names."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=str), ensure_ascii=False)
