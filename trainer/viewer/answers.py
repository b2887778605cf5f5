"""The files of the page, and the answers to the paths that it asks for."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import pyarrow.compute as pc

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.door import open_file
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.tables import batch_rows, read_batches
from rolltap.trainer.runs.views.report import VersionRewards, reward_steps
from rolltap.trainer.runs.views.text import TokenText
from rolltap.trainer.runs.views.training import EVALUATION, METRICS, read_metrics
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.viewer.data import (
    JSON,
    call_json,
    compare_json,
    run_json,
    session_json,
    session_rows,
)
from rolltap.trainer.viewer.reader import RunReader, UnknownError

MOST_FOUND, SEARCH_SECONDS, AROUND = 100, 10.0, 60
"""Limits of a search, and the characters shown before and after what is found."""
MOST_BYTES = 256 * 1024
"""Longest part of a log or a patch that is shown."""
_PAGE = Path(__file__).with_name("page")


def answer(reader: RunReader, path: str) -> JSON:
    """Return the JSON of a path such as `api/sessions/ID`, percent-encoded.

    Raises `UnknownError` for what is not there, `InputError` for a wrong query, `RunError` and
    `OSError`.
    """
    place, _, query = path.partition("?")
    asked = dict(parse_qsl(query))
    match [unquote(part) for part in place.split("/")]:
        case ["api", "run"]:
            return _run(reader)
        case ["api", "sessions"]:
            return {"sessions": session_rows(reader.overview())}
        case ["api", "sessions", session_id]:
            values = session_json(reader.run, reader.session(session_id), reader.overview())
            return values | _logs(reader.run, session_id, (values["session"] or {}).get("revision"))
        case ["api", "sessions", session_id, "calls", call_id]:
            found = reader.session(session_id)
            if all(call.call_id != call_id for call in found.recorded.calls):
                raise UnknownError(
                    f"the session has no call {call_id[:200]!r}: go back to the session"
                )
            return call_json(reader.run, found, call_id, reader.text())
        case ["api", "compare"]:
            a, b = (reader.session(_given(asked, name)) for name in ("a", "b"))
            return compare_json(a, b, reader.text())
        case ["api", "search"]:
            return search(reader.run, _given(asked, "q"))
    raise UnknownError(f"there is no {place[:200]!r}")


def _given(asked: Mapping[str, str], name: str) -> str:
    if not asked.get(name):
        raise InputError(f"the query has no {name!r}: give one")
    return asked[name]


def _run(reader: RunReader) -> JSON:
    values, metrics, evaluated = run_json(reader.overview()), list[JSON](), list[VersionRewards]()
    try:
        metrics = read_metrics(reader.run / METRICS)
        if (reader.run / EVALUATION).is_dir():
            evaluated = reward_steps(load_sessions(reader.run / EVALUATION).values())
    except RunError as error:
        values["faults"].append(str(error))
    values["evaluation"] = list(map(asdict, evaluated))
    values["run"] = {
        "path": str(reader.run.absolute()),
        "name": reader.run.resolve().name,
        "model": str(read_metadata(reader.run).get("model", "")),
        "tokenizer": None if isinstance(reader.known_text, TokenText) else reader.known_text,
        "recording": reader.recording(),
    }
    steps = values["summary"]["trained"]
    return {
        **values,
        "training": {"metrics": metrics, "steps": steps} if metrics or steps else None,
    }


def _logs(run: Path, session_id: str, revision: object) -> JSON:
    ends = (f".r{revision}.judge.log", ".judge.log", ".evaluate.log", ".log")
    again, judge, evaluation, log = (_part(run, f"{session_id}{end}") for end in ends)
    return {
        "judge": again or judge or evaluation,
        "patch": _part(run, f"{session_id}.diff", end=False),
        "log": log,
    }


def _part(run: Path, name: str, *, end: bool = True) -> str | None:
    """Return a file of the run's folder `logs`, or None without one; of a longer one the last or
    the first bytes."""
    try:
        # an imported session may be named like a path
        file = open_file(run, f"logs/{name}")
    except OSError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - MOST_BYTES) if end else 0)
        text = file.read(MOST_BYTES).decode(errors="replace")
    if size <= MOST_BYTES:
        return text
    note = f"[{MOST_BYTES:,} of {size:,} bytes; the whole is in logs/{name}]"
    return f"{note}\n{text}" if end else f"{text}\n{note}"


def search(run: Path, wanted: str) -> JSON:
    """Return the calls whose new messages or reply have a text, at most `MOST_FOUND`. Capital
    letters do not matter."""
    found: list[JSON] = []
    cut, end = False, time.monotonic() + SEARCH_SECONDS
    written = json.dumps(wanted, ensure_ascii=False)[1:-1]  # the columns are JSON
    pattern = re.compile(re.escape(wanted), re.IGNORECASE)
    for batch in read_batches(run, "calls"):
        rows = batch.select(["session_id", "call_id", "messages", "reply"])
        has = [
            pc.match_substring(rows.column(name), written, ignore_case=True)
            for name in ("messages", "reply")
        ]
        for row in batch_rows(rows.filter(pc.or_(*(pc.fill_null(each, False) for each in has)))):
            texts = _texts([json.loads(row.pop(name) or "null") for name in ("messages", "reply")])
            if (at := next(filter(None, map(pattern.search, texts)), None)) is not None:
                first, last = max(0, at.start() - AROUND), at.end() + AROUND
                before, after = "… " if first else "", " …" if last < len(at.string) else ""
                found.append({**row, "text": f"{before}{at.string[first:last]}{after}"})
        cut = len(found) > MOST_FOUND or time.monotonic() > end
        if cut:
            break
    return {"sessions": found[:MOST_FOUND], "cut": cut}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def page_files() -> dict[str, Path]:
    """Return the files of the page by their paths below `page`."""
    return {
        path.relative_to(_PAGE).as_posix(): path
        for path in sorted(_PAGE.rglob("*"))
        if path.is_file()
    }
