"""Rolling out tasks: one function for scripts and notebooks, and its async twin."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.runs import Run, open_run
from rolltap.trainer.blocking import run_blocking
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.scheduler import Plan, run_groups
from rolltap.trainer.rollouts.task import Task, load_tasks


def rollout(
    tasks: Sequence[Task] | str | Path,
    *,
    harness: Harness | str,
    engine: str,
    model: str | Path,
    out: str | Path,
    sessions: int = 8,
    concurrency: int = 8,
    timeout: float = 1800.0,
    options: Mapping[str, str | Sequence[str]] | None = None,
    progress: bool = True,
) -> Run:
    """Run every task several times with a harness, record all model calls, and return the run.

    `tasks` is a list of tasks, or the path of a JSON Lines file of them. `harness` is a harness, the name of a preset,
    or the path of a `.toml` file. `engine` is the URL of the vLLM server that serves `model`, or several separated by
    commas. `out` is the run folder; a folder that is a run already gets more sessions. The `sessions` of one task
    are one group. At most `concurrency` of all sessions run at the same time. A harness is stopped after `timeout`
    seconds. `options` are further mitmproxy options of the recorder; one that is
    repeatable has a list of values. `progress` shows a progress bar on a terminal.

    Works in a script and in a notebook; `rollout_async` is for an event loop. A session that fails does not end the
    rollout. Its status says what happened. KeyboardInterrupt stops the harnesses; what was recorded stays in the run.

    Raises `InputError` for wrong arguments, before anything is started; `RecorderError` when the recorder does not
    start or dies; `EngineError` when an engine does not answer at the start; `OSError` when the run folder cannot be
    written.
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
            timeout=timeout,
            options=options,
            progress=progress,
        )
    )


async def rollout_async(
    tasks: Sequence[Task] | str | Path,
    *,
    harness: Harness | str,
    engine: str,
    model: str | Path,
    out: str | Path,
    sessions: int = 8,
    concurrency: int = 8,
    timeout: float = 1800.0,
    options: Mapping[str, str | Sequence[str]] | None = None,
    progress: bool = True,
) -> Run:
    """Do what `rollout` does inside an event loop. Cancelling it stops the harnesses and the recorder."""
    task_list = load_tasks(Path(tasks)) if isinstance(tasks, str | Path) else list(tasks)
    if repeated := {task.id for task in task_list if [other.id for other in task_list].count(task.id) > 1}:
        raise InputError(f"several tasks have the id {min(repeated)!r}: ids name tasks in the dataset")
    for name, value in {"tasks": len(task_list), "sessions": sessions, "concurrency": concurrency}.items():
        if value < 1:
            raise InputError(f"rollout needs at least one of {name}")
    if isinstance(harness, str):
        harness = Harness.load(harness)
    harness.require_program()
    for url in engine.split(","):
        await asyncio.to_thread(EngineAdmin(url.strip()).models)
    plan = Plan(harness, sessions, concurrency, timeout)
    async with _started(Recorder(out, engine=engine, model=model, options=options)) as recorder:
        with progress_bar(show=progress) as advance:
            await run_groups(task_list, plan, recorder, policy_version="default", advance=advance)
    return open_run(out)


@asynccontextmanager
async def _started(recorder: Recorder) -> AsyncIterator[Recorder]:
    """Start and stop a recorder without blocking the event loop."""
    starting = asyncio.create_task(asyncio.to_thread(recorder.__enter__))
    try:
        await asyncio.shield(starting)
        yield recorder
    finally:
        await starting  # when cancelled meanwhile: a process that has begun to start is stopped as well
        await asyncio.to_thread(recorder.__exit__, None, None, None)
