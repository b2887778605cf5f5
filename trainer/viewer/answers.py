"""The files of the page, and the answers to the paths that it asks for."""

import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

import pyarrow as pa
import pyarrow.compute as pc

from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.tables import batch_rows, read_batches
from rolltap.addons.store.untrusted import open_file
from rolltap.trainer.runs.views.outcomes import VersionRewards, reward_steps
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

MOST_FOUND = 100
"""Most calls that a search returns."""
SEARCH_SECONDS = 10.0
AROUND = 60
"""Characters shown before and after what a search found."""
MOST_BYTES = 256 * 1024
"""Longest part of a log or a patch that is shown."""
_SEARCHED = ("messages", "reply")
_PAGE = Path(__file__).with_name("page")


def answer(reader: RunReader, path: str) -> JSON:
    """Return the JSON of a path such as `api/sessions/ID`, percent-encoded.

    Raises `UnknownError` for what is not there, `InputError` for a wrong query, `RunError` and
    `OSError`.
    """
    place, _, query = path.partition("?")
    parameters = dict(parse_qsl(query))
    match [unquote(part) for part in place.split("/")]:
        case ["api", "run"]:
            return _run(reader)
        case ["api", "sessions"]:
            return {"sessions": session_rows(reader.overview())}
        case ["api", "sessions", session_id]:
            return _session(reader, session_id)
        case ["api", "sessions", session_id, "calls", call_id]:
            return call_json(reader.run, reader.session(session_id), call_id, reader.text())
        case ["api", "compare"]:
            a = reader.session(_required(parameters, "a"))
            b = reader.session(_required(parameters, "b"))
            return compare_json(a, b, reader.text())
        case ["api", "search"]:
            return _search(reader.run, _required(parameters, "q"))
    raise UnknownError(f"there is no {place[:200]!r}")


def _required(parameters: Mapping[str, str], name: str) -> str:
    if not parameters.get(name):
        raise InputError(f"the query has no {name!r}: give one")
    return parameters[name]


def _run(reader: RunReader) -> JSON:
    values = run_json(reader.overview())
    metrics: list[JSON] = []
    evaluated: list[VersionRewards] = []
    try:
        metrics = read_metrics(reader.run / METRICS)
        if (reader.run / EVALUATION).is_dir():
            evaluated = reward_steps(load_sessions(reader.run / EVALUATION).values())
    except RunError as error:
        values["faults"].append(str(error))
    why_no_text = None
    if isinstance(reader.known_text, str):
        why_no_text = reader.known_text
    values["evaluation"] = [asdict(each) for each in evaluated]
    values["run"] = {
        "path": str(reader.run.absolute()),
        "name": reader.run.resolve().name,
        "model": str(read_metadata(reader.run).get("model", "")),
        "tokenizer": why_no_text,
        "recording": reader.recording(),
    }
    values["training"] = None
    steps = values["summary"]["trained"]
    if metrics or steps:
        values["training"] = {"metrics": metrics, "steps": steps}
    return values


def _session(reader: RunReader, session_id: str) -> JSON:
    loaded = reader.session(session_id)
    judge_logs = [f"{session_id}.judge.log", f"{session_id}.evaluate.log"]
    if loaded.recorded.session is not None:
        judge_logs.insert(0, f"{session_id}.r{loaded.recorded.session.revision}.judge.log")
    return {
        **session_json(reader.run, loaded, reader.overview()),
        "judge": _log(reader.run, judge_logs),
        "patch": _log(reader.run, [f"{session_id}.diff"], is_end=False),
        "log": _log(reader.run, [f"{session_id}.log"]),
    }


def _log(run: Path, names: Collection[str], *, is_end: bool = True) -> str | None:
    """Return the first of some files of the run's folder `logs`, None without one.

    Of a long file it is the end, or else the begin.
    """
    for name in names:
        try:
            file = open_file(run, f"logs/{name}")
        except OSError:  # none, or the name of an imported session is like a path
            continue
        with file:
            size = os.fstat(file.fileno()).st_size
            if is_end:
                file.seek(max(0, size - MOST_BYTES))
            text = file.read(MOST_BYTES).decode(errors="replace")
        if size <= MOST_BYTES:
            return text
        note = f"[{MOST_BYTES:,} of {size:,} bytes; the whole is in logs/{name}]"
        if is_end:
            return f"{note}\n{text}"
        return f"{text}\n{note}"
    return None


def _search(run: Path, wanted: str) -> JSON:
    """Return the calls whose new messages or reply have a text, at most `MOST_FOUND`. Capital
    letters do not matter."""
    found: list[JSON] = []
    end = time.monotonic() + SEARCH_SECONDS
    pattern = re.compile(re.escape(wanted), re.IGNORECASE)
    for batch in read_batches(run, "calls"):
        for row in batch_rows(_rows_with(batch, wanted)):
            text = _excerpt(row, pattern)
            if text is not None:
                found.append(
                    {"session_id": row["session_id"], "call_id": row["call_id"], "text": text}
                )
        if len(found) > MOST_FOUND or time.monotonic() > end:
            return {"sessions": found[:MOST_FOUND], "cut": True}
    return {"sessions": found, "cut": False}


def _rows_with(batch: pa.RecordBatch, wanted: str) -> pa.RecordBatch:
    """Return the rows that have a text somewhere in the JSON of `_SEARCHED`."""
    written = json.dumps(wanted, ensure_ascii=False)[1:-1]
    rows = batch.select(["session_id", "call_id", *_SEARCHED])
    in_messages = pc.match_substring(rows["messages"], written, ignore_case=True)
    in_reply = pc.match_substring(rows["reply"], written, ignore_case=True)
    return rows.filter(pc.or_kleene(in_messages, in_reply))


def _excerpt(row: Mapping[str, Any], pattern: re.Pattern[str]) -> str | None:
    """Return the first text of a call that matches, cut to what is around the match."""
    for name in _SEARCHED:
        for text in _texts(json.loads(row[name] or "null")):
            match = pattern.search(text)
            if match is not None:
                return _around(match)
    return None


def _around(match: re.Match[str]) -> str:
    first = max(0, match.start() - AROUND)
    last = match.end() + AROUND
    excerpt = match.string[first:last]
    if first > 0:
        excerpt = f"… {excerpt}"
    if last < len(match.string):
        excerpt = f"{excerpt} …"
    return excerpt


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def page_files() -> dict[str, Path]:
    """Return the files of the page by their paths below `page`."""
    files = {}
    for path in sorted(_PAGE.rglob("*")):
        if path.is_file():
            files[path.relative_to(_PAGE).as_posix()] = path
    return files
