"""Rolling out tasks: one function for scripts and notebooks, and its async twin."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import session_rows
from rolltap.runs import Run, open_run
from rolltap.trainer.blocking import run_blocking, run_to_end, wait_for_end
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.judges.here import judge_here
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.scheduler import Plan, new_group, run_groups
from rolltap.trainer.rollouts.tasks.task import Task, load_tasks


def rollout(
    tasks: Sequence[Task] | str | Path,
    *,
    harness: Harness | str | Path,
    engine: str,
    model: str | Path,
    out: str | Path,
    sessions: int = 8,
    concurrency: int = 8,
    recorders: int = 1,
    timeout: float = 1800.0,
    options: Mapping[str, str | Sequence[str]] | None = None,
    progress: bool = True,
) -> Run:
    """Run every task several times with a harness, record all model calls, and return the run.

    `tasks` is a list of tasks, or the path of a JSON Lines file of them. `harness` is a harness, the name of a preset,
    or the path of a `.toml` file. `engine` is the URL of the vLLM server that serves `model`, or several separated by
    commas. `out` is the run folder; a folder that is a run already gets more sessions. The `sessions` of one task are
    one group. At most `concurrency` of all sessions run at the same time. A harness is stopped after `timeout` seconds.
    `recorders` is the number of the recorder's processes, as in `Recorder`. `options` are further mitmproxy options of
    the recorder; a repeatable one has a list of values. `progress` shows a progress bar on a terminal.

    `Run.new_session_ids` of the result are the sessions of this call: `run.traces().batch(run.new_session_ids)`.

    Works in a script and in a notebook; `rollout_async` is for an event loop. A session that fails does not end the
    rollout: its status says what happened. With the status `infrastructure` it failed because of the engine, the
    recorder or the machine, or no model call of it was answered: it has no reward and is not trained on.
    KeyboardInterrupt stops the harnesses and the recorder; committed calls stay in the run.

    Raises, before the recorder is started, `InputError` for wrong tasks, numbers or harness, and `EngineError` when an
    engine does not answer; `MissingPackageError` without mitmproxy; `RecorderError` when the recorder does not start,
    for instance for a wrong `model` or option, or dies; `OSError` when the run folder cannot be written.
    """
    return run_blocking(
        rollout_async(
            tasks,
            harness=harness,
            engine=engine,
            model=model,
            out=out,
            sessions=sessions,
            concurrency=concurrency,
            recorders=recorders,
            timeout=timeout,
            options=options,
            progress=progress,
        )
    )


async def rollout_async(
    tasks: Sequence[Task] | str | Path,
    *,
    harness: Harness | str | Path,
    engine: str,
    model: str | Path,
    out: str | Path,
    sessions: int = 8,
    concurrency: int = 8,
    recorders: int = 1,
    timeout: float = 1800.0,
    options: Mapping[str, str | Sequence[str]] | None = None,
    progress: bool = True,
) -> Run:
    """Do what `rollout` does inside an event loop. Cancelling it stops the harnesses and the recorder."""
    task_list = _checked_tasks(tasks)
    for name, value in {"sessions": sessions, "concurrency": concurrency, "recorders": recorders}.items():
        if value < 1:
            raise InputError(f"{name}={value}: give at least 1")
    if not timeout > 0:
        raise InputError(f"timeout={timeout}: give a number of seconds above 0")
    if not isinstance(harness, Harness):
        harness = Harness.load(str(harness))
    harness.require_program()
    for url in engine.split(","):
        await asyncio.to_thread(EngineAdmin(url.strip()).models)
    plan = Plan(harness, concurrency, timeout)
    groups = [new_group(task, sessions) for task in task_list]
    recorder = Recorder(out, engine=engine, model=model, options=options, processes=recorders)
    async with _started(recorder):
        with progress_bar(show=progress) as advance:
            ended = await run_groups(groups, plan, recorder, policy_version=None, advance=advance)
    run = open_run(out)
    run.new_session_ids = tuple(session.session_id for session in ended)
    return run


def _checked_tasks(tasks: Sequence[Task] | str | Path) -> list[Task]:
    if isinstance(tasks, str | Path):
        return load_tasks(Path(tasks))
    if isinstance(tasks, Task):
        raise InputError("tasks is one task: give a list")
    checked = list(tasks)
    if not checked:
        raise InputError("the list of tasks is empty")
    for name, number in Counter(task.id for task in checked).items():
        if number > 1:
            raise InputError(f"{number} tasks have the id {name!r}: give each task an id of its own")
    for task in checked:
        if task.workspace is not None and not task.workspace.is_dir():
            raise InputError(f"task {task.id!r}: the workspace {task.workspace} is not a folder")
    return checked


@asynccontextmanager
async def _started(recorder: Recorder) -> AsyncIterator[None]:
    """Start and stop a recorder without blocking the event loop. Cancelling it leaves no process behind."""
    starting = asyncio.create_task(asyncio.to_thread(recorder.__enter__))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        recorder.abort_start()
        await wait_for_end(starting)
        if starting.exception() is None:
            await run_to_end(recorder.__exit__, None, None, None)
        raise
    try:
        yield
    finally:
        await run_to_end(recorder.__exit__, *sys.exc_info())


def end_recorded(session: Session, recorder: Recorder, evaluate: str | None) -> None:
    """End a session of a program that the caller started, with the reward of the command `evaluate`, or None.

    A reward that the program gave at the session's end counts first. Raises as `Recorder.end_calls` and `Recorder.end`.
    """
    if evaluate is not None:
        _judge(session, recorder, evaluate)
    if rows := session_rows(recorder.path, session.session_id):
        own = rows[-1]
        session.revision = own.revision + 1
        session.status = "completed" if session.exit_status == 0 else "failed"
        session.reward, session.parts, session.evidence, session.error = own.reward, own.parts, own.evidence, None
        session.task_id, session.group_id = own.task_id or session.task_id, own.group_id or session.group_id
    recorder.end(session)


def _judge(session: Session, recorder: Recorder, evaluate: str) -> None:
    """Set the reward of a session, or why it has none."""
    fault = recorder.end_calls(session.session_id)
    if fault is not None:
        session.status, session.error = "infrastructure", fault
        return
    judged = judge_here(evaluate, recorder.path / "logs" / f"{session.session_id}.evaluate.log")
    session.reward, session.parts = judged.reward, json.dumps(judged.parts)
    session.evidence = json.dumps(judged.evidence)
    if judged.reward is None:
        session.status, session.error = "unjudged", judged.unjudged
