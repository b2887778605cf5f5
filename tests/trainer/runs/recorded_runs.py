"""Runs with random sessions (hypothesis), and readers of runs for comparisons."""

import json
import math
from collections import Counter
from dataclasses import replace
from datetime import timedelta

from hypothesis import strategies as st

from rolltap.addons.store.records import Call, Event, VersionSpan, find_violation
from rolltap.addons.store.tables import TABLES, read_rows
from rolltap.trainer.runs.import_calls import link
from rolltap.trainer.traces.reader import iter_sessions
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests.factories import START, make_call, make_session, says, write_run

TOKENS = st.lists(st.integers(0, 2), max_size=3)


@st.composite
def session_calls(draw, session_id):
    """Draw the calls of one session: continuations, retries and unrelated prompts over few distinct
    tokens.

    Log-probabilities are exact in float32. Parents are not linked.
    """
    calls = []
    for number in range(draw(st.integers(1, 8))):
        earlier = draw(st.sampled_from(calls)) if calls else None
        match draw(st.sampled_from(["root", "follow", "follow", "retry"])) if earlier else "root":
            case "follow":
                prompt_ids = earlier.prompt_ids + earlier.completion_ids + draw(TOKENS)
            case "retry":
                prompt_ids = list(earlier.prompt_ids)
            case _:
                prompt_ids = [draw(st.integers(0, 2)), *draw(TOKENS)]
        completion_ids = draw(TOKENS)
        logprobs = [-(number + 1) - i / 64 for i in range(len(completion_ids))]
        odd = [[], [*logprobs, -1.0], [math.nan] * len(logprobs)]
        logprobs = draw(st.sampled_from([logprobs] * 3 + odd))
        spans = []
        if completion_ids:
            version = draw(st.sampled_from(["1", "2"]))
            spans.append(VersionSpan(version=version, start=0, end=len(completion_ids)))
        violation = None
        if logprobs:
            violation = find_violation(completion_ids, logprobs, spans)
        calls.append(
            Call(
                session_id=session_id,
                call_id=f"c{number}",
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                logprobs=logprobs,
                weight_versions=spans,
                parent_id=draw(st.sampled_from([None, *(call.call_id for call in calls)])),
                status=draw(st.sampled_from(["completed", "completed", "aborted", "failed"])),
                violation=violation,
                role=draw(st.sampled_from(["agent", "agent", "subagent", "auxiliary"])),
                finish_reason=draw(st.sampled_from(["stop", "length", None])),
                started_at=START + timedelta(seconds=number // 2),
            )
        )
    return calls


FIELDS = st.fixed_dictionaries(
    {
        "task_id": st.sampled_from(["t1", "t2"]),
        "group_id": st.sampled_from(["g1", "g2"]),
        "harness": st.sampled_from(["h1", "h2"]),
        "reward": st.sampled_from([None, 0.0, 0.5, 1.0]),
        "policy_version": st.sampled_from(["1", "2"]),
    }
)


@st.composite
def recorded_sessions(draw):
    """Draw sessions with their calls. Call ids repeat between sessions."""
    sessions = []
    for number in range(draw(st.integers(1, 4))):
        name = f"s{number}"
        sessions.append((make_session(name, **draw(FIELDS)), draw(session_calls(name))))
    return sessions


def traces_of(run, strategy="prefix_merging"):
    """Return a map of session ids to traces and ledgers."""
    return {
        traced.recorded.session_id: (traced.traces, traced.ledger)
        for traced in iter_traces(run, TraceOptions(strategy))
    }


OF_SESSION = ("task_id", "group_id", "harness", "reward")
OF_CALL = (
    "session_id",
    "call_id",
    "completion_ids",
    "logprobs",
    "finish_reason",
    "role",
    "status",
    "parent_id",
)


def import_line(call, session):
    """Return a call as a line that `rolltap import` reads."""
    line = {name: getattr(session, name) for name in OF_SESSION}
    line |= {name: getattr(call, name) for name in OF_CALL}
    line["prompt_ids"] = list(call.prompt_ids)
    line["started_at"] = call.started_at.isoformat()
    line["policy_version"] = "1"
    for span in call.weight_versions:
        line["policy_version"] = span.version
    return json.dumps(line)


def record(run, sessions, **metadata):
    """Write sessions as a recorder does: linked calls, prompts as suffixes of their parents, an
    event for each call."""
    rows = [Event(kind="unauthorised", host="example.com")]
    for session, calls in sessions:
        for call in linked(calls):
            about = {"session_id": call.session_id, "call_id": call.call_id}
            rows += [Event(kind="call_started", at=call.started_at, **about), call]
        rows += [Event(kind="refused", session_id=session.session_id, host="example.com"), session]
    write_run(run, *rows, sync="never", **metadata)


def linked(calls):
    return link([replace(call, kind_reason="first") for call in calls])


def rows_of(run):
    """Return all rows of a run in a form that does not depend on their order."""
    return {table: Counter(row["digest"] for row in read_rows(run, table)) for table in TABLES}


def ignore(*_):
    """Ignore the progress."""


def make_run(run, *sessions, **metadata):
    """Write a run whose sessions have two calls each. The second call continues the first."""
    recorded = []
    for session in sessions:
        first = make_call("a", session_id=session.session_id)
        recorded.append((session, [first, make_call("b", [3], [4], after=first)]))
    record(run, recorded, **metadata)
    return run


def shell(session_id, number, command, **fields):
    """Return a call that runs a shell command and ends half a second after its start."""
    ended = START + timedelta(seconds=number, milliseconds=500)
    return make_call(
        number,
        session_id=session_id,
        **{"reply": says("", command), "finished_at": ended, **fields},
    )


def ids_of(run):
    return sorted(recorded.session_id for recorded in iter_sessions(run))
