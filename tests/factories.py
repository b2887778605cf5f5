"""Calls, sessions and runs for tests. A test names the fields that it is about; all others are
sound and fixed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import UNREWARDED, Call, Event, Session, VersionSpan
from rolltap.addons.store.routing import Routing
from rolltap.addons.store.rows import to_batch
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.traces.tables import SCORE_SCHEMA, Score

START = datetime(2026, 1, 1, tzinfo=UTC)


def make_call(
    name: int | str = 0,
    prompt_ids: Sequence[int] = (1,),
    completion_ids: Sequence[int] = (2,),
    *,
    after: Call | None = None,
    version: str = "1",
    **fields,
) -> Call:
    """Return a call of session "s". A number as its name is also the second at which it starts.

    With `after` it continues that call, in its session: `prompt_ids` are the new tokens.
    Log-probabilities are exact in float32; calls with different numbers have different ones, so
    they identify the tokens of a session.
    """
    number = name if isinstance(name, int) else 0
    known = []
    continued = {"session_id": "s"}
    if after:
        known = [*after.prompt_ids, *after.completion_ids]
        continued = {"session_id": after.session_id, "parent_id": after.call_id}
        continued |= {"prefix_length": len(known), "kind": "bridged"}
    defaults = {
        "call_id": str(name),
        "logprobs": [-(number + 1) - i / 64 for i in range(len(completion_ids))],
        "weight_versions": [VersionSpan(version=version, start=0, end=len(completion_ids))],
        "started_at": START + timedelta(seconds=number),
    }
    tokens = {"prompt_ids": [*known, *prompt_ids], "completion_ids": list(completion_ids)}
    return Call(**{**tokens, **defaults, **continued, **fields})


def make_session(session_id: str = "s", status: str = "completed", **fields) -> Session:
    """Return a row of a session of task "t", group "g" and harness "h", with reward 1 if the status
    has one."""
    defaults = {
        "task_id": "t",
        "group_id": "g",
        "harness": "h",
        "reward": None if status in UNREWARDED else 1.0,
        "policy_version": "1",
        "started_at": START,
    }
    return Session(session_id=session_id, status=status, **{**defaults, **fields})


def write_run(
    run: Path, *rows: Call | Session | Event | Routing | Score, sync: str = "session", **metadata
) -> Path:
    """Write metadata and rows to a run folder and return the folder."""
    write_metadata(run, {"model": "tiny", **metadata})
    return add_rows(run, *rows, sync=sync)


def add_rows(
    run: Path, *rows: Call | Session | Event | Routing | Score, sync: str = "session"
) -> Path:
    """Add rows, in this order, to a run that has metadata. Returns its folder."""
    with RunWriter(run, sync=sync) as writer:
        add = {
            Call: writer.add_call,
            Session: writer.add_session,
            Event: writer.add_event,
            Routing: writer.note,
            Score: lambda score: writer.add_batch("scores", to_batch(asdict(score), SCORE_SCHEMA)),
        }
        for row in rows:
            add[type(row)](row)
    return run


def says(content: str = "", *commands: str) -> str:
    """Return the JSON of an assistant message that calls the tool `bash` with each command, for
    `Call.reply`."""
    message: dict = {"role": "assistant", "content": content}
    if commands:
        message["tool_calls"] = []
        for number, command in enumerate(commands):
            function = {"name": "bash", "arguments": json.dumps({"command": command})}
            call = {"id": str(number), "type": "function", "function": function}
            message["tool_calls"].append(call)
    return json.dumps(message)
