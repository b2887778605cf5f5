"""Types that a type checker gets from the public page. It is checked, not run."""

from typing import Any, assert_type

import rolltap
from rolltap.errors import EngineError, InputError
from rolltap.types import LeftBehind, RunTraces, Strategy, Summary, Verification


def read(path: str, strategy: Strategy = "prefix_merging") -> rolltap.TraceBatch:
    run = rolltap.open_run(path)
    assert_type(run, rolltap.Run)
    assert_type(run.metadata, dict[str, Any])
    assert_type(run.sessions(), list[rolltap.Session])
    for session_id, calls in run.calls.items():
        assert_type(session_id, str)
        assert_type(calls, list[rolltap.Call])
        assert_type(calls[0].parsed_messages, list[dict[str, Any]])
        assert_type(calls[0].parsed_reply, dict[str, Any] | None)
        assert_type(
            rolltap.build_traces(calls, strategy), tuple[list[rolltap.Trace], rolltap.Ledger]
        )
    for session in run.sessions():
        assert_type(session.parts, dict[str, float])
        assert_type(session.evidence, dict[str, Any])
        assert_type(session.suspicions, dict[str, int])
    assert_type(run.traces(), RunTraces)
    for trace in run.traces(strategy, roles=["agent"], max_tokens=4096):
        assert_type(trace, rolltap.Trace)
        assert_type(trace.completion_ids, list[int])
    assert_type(run.ledger(), rolltap.Ledger)
    assert_type(run.summary(), Summary)
    assert_type(run.export("parquet", "data"), int)
    assert_type(run.split("parts", by="task_id"), dict[str, rolltap.Run])
    assert_type(run.filter("good", min_reward=0.5), rolltap.Run)
    batch = run.traces(strategy).batch()
    assert_type(batch.traces, list[rolltap.Trace])
    assert_type(batch.rewards, dict[str, rolltap.GroupReward])
    return batch


def record(engine: str) -> rolltap.Run:
    task = rolltap.Task(id="t", instruction="Do it.", evaluate=["true"], workspace="start")
    try:
        run = rolltap.rollout(
            [task], harness="codex", engine=engine, model="m", out="runs/a", sessions=8
        )
    except EngineError as error:
        assert_type(error.retryable, bool)
        raise
    except InputError as error:
        assert_type(error.args, tuple[Any, ...])
        raise
    except rolltap.errors.RunError:
        raise
    with rolltap.Recorder("runs/b", engine=engine, model="m") as recorder:
        assert_type(recorder, rolltap.Recorder)
        assert_type(recorder.environment("s"), dict[str, str])
        recorder.end(rolltap.Session(session_id="s", status="completed", reward=1.0))
    assert_type(rolltap.verify_run("runs/b"), Verification)
    assert_type(
        rolltap.merge_runs(["runs/a", run.path], "both"), tuple[rolltap.Run, list[LeftBehind]]
    )
    assert_type(rolltap.train("recipe.toml", engine=engine, out="runs/c"), rolltap.Run)
    assert_type(rolltap.__version__, str)
    return run


async def record_async(engine: str) -> None:
    harness = rolltap.Harness.load("codex")
    assert_type(harness, rolltap.Harness)
    run = await rolltap.rollout_async(
        "tasks.jsonl", harness=harness, engine=engine, model="m", out="runs/a"
    )
    assert_type(run, rolltap.Run)
