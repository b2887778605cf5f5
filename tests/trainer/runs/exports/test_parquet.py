import json
from datetime import UTC

import pyarrow.parquet as pq
import pytest
from datasets import Features, List, Value, get_dataset_config_names, load_dataset

from rolltap.addons.store.metadata import add_recorder
from rolltap.addons.store.records import Event, Session
from rolltap.addons.store.schemas import CALL_SCHEMA
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.runs.exports.card import trace_row
from rolltap.trainer.runs.exports.parquet import export
from rolltap.trainer.traces.reader import RecordedCalls
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from tests.trainer.outgoing import START, code_blocks, facts, write_run

CONFIGS = ["traces", "calls", "sessions", "events"]


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def load(out, tmp_path):
    return lambda config: load_dataset(str(out), config, split="train", cache_dir=str(tmp_path / "cache"))


def ignore(what, done, total):
    pass


def test_each_table_of_the_run_is_a_config_that_load_dataset_opens(run, out, load):
    assert export(run, out, ignore) == 4 + 7 + 2 + 1
    assert {config: load(config).num_rows for config in CONFIGS} == {
        "traces": 4,
        "calls": 7,
        "sessions": 2,
        "events": 1,
    }


def test_traces_are_those_of_prefix_merging(run, out, load):
    export(run, out, ignore)
    built = [trace_row(trace) for traced in iter_traces(run, TraceOptions()) for trace in traced.traces]
    assert list(load("traces")) == built


def test_the_code_of_the_card_gives_every_call_with_its_full_prompt(run, out, tmp_path):
    export(run, out, ignore)
    names = {"cache_dir": str(tmp_path / "cache")}
    open_it, rebuild = code_blocks(out / "README.md")
    open_it = open_it.replace("path/to/this/folder", str(out))
    exec(open_it.replace('split="train"', 'split="train", cache_dir=cache_dir') + rebuild, names)
    rebuilt = [(call["session_id"], call["prompt_ids"]) for call in names["full_prompts"](names["calls"])]
    recorded = RecordedCalls(run)
    assert rebuilt == [(session, call.prompt_ids) for session, calls in recorded.items() for call in calls]


def test_a_prompt_is_stored_once_however_many_calls_continue_it(run, out, load):
    export(run, out, ignore)
    stored = {call["call_id"]: call["prompt_tail_ids"] for call in load("calls")}
    assert (stored["s-0"], stored["s-1"], stored["s-2"]) == ([1, 2], [5], [8])


def test_sessions_and_events_hold_what_was_recorded(run, out, load):
    export(run, out, ignore)
    s, t = sorted(load("sessions"), key=lambda session: session["session_id"])
    assert (s["harness"], s["reward"], s["started_at"]) == ("pi", 0.25, START)
    assert (t["harness"], t["reward"], t["status"]) == ("codex", None, "timeout")
    [event] = load("events")
    assert (event["kind"], event["host"], event["at"].astimezone(UTC)) == ("refused", "example.com", START)


def test_only_the_last_row_of_a_session_is_exported(run, out, load):
    writer = RunWriter(run)
    writer.add_session(
        Session(
            session_id="t",
            task_id="task",
            group_id="g",
            harness="codex",
            status="completed",
            exit_status=0,
            reward=1.0,
            started_at=START,
        )
    )
    writer.close()
    export(run, out, ignore)
    assert {session["session_id"]: session["reward"] for session in load("sessions")} == {"s": 0.25, "t": 1.0}


def test_every_file_carries_the_viewers_types(run, out):
    export(run, out, ignore)
    [path] = (out / "calls").iterdir()
    features = Features.from_arrow_schema(pq.read_schema(path))
    embedded = json.loads(pq.read_schema(path).metadata[b"huggingface"])["info"]["features"]
    assert embedded.keys() == features.keys()
    assert features["started_at"] == Value("timestamp[us, tz=UTC]")
    assert features["completion_ids"] == List(Value("int32"))
    assert features["logprobs"] == List(Value("float32"))


def test_the_engines_addresses_are_not_exported(run, out, load):
    export(run, out, ignore)
    calls = load("calls")
    assert "engine" not in calls.column_names
    assert set(calls.column_names) == set(CALL_SCHEMA.names) - {"engine", "digest"}
    [error] = [call["error"] for call in calls if call["error"]]
    assert error == "the engine at http://ENGINE failed: ENGINE"
    assert "gpu-7" not in (out / "README.md").read_text()


def test_events_name_no_engine(run, out, load):
    add_recorder(run, {"engines": ["http://gpu-8.internal:8000"]})
    why = "Cannot connect to host gpu-8.internal:8000 ssl:default [Connect call failed ('10.0.0.8', 8000)]"
    with RunWriter(run) as writer:
        writer.add_event(
            Event(kind="rejected", session_id="s", detail=f"the engine at http://gpu-8.internal:8000 failed: {why}")
        )
    export(run, out, ignore)
    [detail] = [event["detail"] for event in load("events") if event["kind"] == "rejected"]
    told = "Cannot connect to host ENGINE ssl:default [Connect call failed ENGINE]"
    assert detail == f"the engine at http://ENGINE failed: {told}"


def test_the_card_counts_and_names_the_place_to_load_from(run, out):
    export(run, out, ignore, where="org/name")
    assert facts(out / "README.md")["sampled tokens"] == "14: 7 to train, left out: 1 aborted, 1 auxiliary, 5 no_reward"
    card = (out / "README.md").read_text()
    assert 'load_dataset("org/name", "traces", split="train")' in card
    assert str(out) not in card


def test_a_table_without_rows_is_no_config_as_datasets_cannot_open_it(run, out, load):
    for path in (*run.glob("events-*"), *run.glob("sessions-*")):
        path.unlink()
    assert export(run, out, ignore) == 4 + 7
    assert get_dataset_config_names(str(out)) == ["traces", "calls"]
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "calls", "traces"]
    assert (load("traces").num_rows, load("calls").num_rows) == (4, 7)


def test_progress_is_reported_after_every_session(run, out):
    told = []
    export(run, out, lambda what, done, total: told.append((what, done, total)))
    assert told == [("sessions", done, 3) for done in (1, 2, 3)]


def test_neither_paths_of_this_machine_nor_engines_are_in_exported_sessions(run, out, load):
    evidence = {
        "judge": "pytest",
        "changed": ["src/a.py"],
        "log": "/home/me/runs/logs/v.judge.log",
        "tests": {"t.py::a": "x"},
    }
    with RunWriter(run) as writer:
        writer.add_session(
            Session(
                session_id="v",
                status="failed",
                error="http://gpu-7.internal:8000 (its output is in /home/me/runs/logs/v.log)",
                evidence=json.dumps(evidence),
                parts='{"speed": 0.5}',
                suspicions='{"git_history": 1}',
                harness_version="1.2.3",
                runtime="sandbox",
            )
        )
    add_recorder(run, {"engines": ["http://gpu-7.internal:8000"]})
    export(run, out, ignore)
    [row] = [row for row in load("sessions") if row["session_id"] == "v"]
    assert row["error"] == "http://ENGINE (its output is in …/v.log)"
    assert json.loads(row["evidence"]) == evidence | {"log": "…/v.judge.log"}
    assert (row["parts"], row["suspicions"]) == ('{"speed": 0.5}', '{"git_history": 1}')
    assert (row["harness_version"], row["runtime"]) == ("1.2.3", "sandbox")
    assert facts(out / "README.md")["with suspicions of cheating"] == "1 sessions"
    assert facts(out / "README.md")["ran in"] == "sandbox (1)"
