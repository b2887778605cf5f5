"""Rolling out tasks: one function for scripts and notebooks, and its async twin."""

import asyncio
import json
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import session_rows
from rolltap.runs import Run, open_run
from rolltap.trainer.concurrency import run_blocking, run_to_end, wait_for_end
from rolltap.trainer.progress import progress_bar
from rolltap.trainer.rollouts.check import check_engines, check_judges, fit_tasks
from rolltap.trainer.rollouts.facts import Budget, Facts
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.judges.command import judge_here
from rolltap.trainer.rollouts.mitmdump import rollout_lock, workplace
from rolltap.trainer.rollouts.outcomes import is_judged, outcome
from rolltap.trainer.rollouts.plan import Plan, shared_async
from rolltap.trainer.rollouts.provenance import Provenances
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.resume import Recorded, end_interrupted, going_on, keys_of
from rolltap.trainer.rollouts.runtimes.choose import make_runtime
from rolltap.trainer.rollouts.runtimes.process import ProcessRuntime
from rolltap.trainer.rollouts.runtimes.runtime import Ended, Runtime
from rolltap.trainer.rollouts.schedule import run_groups
from rolltap.trainer.tasks.sources import load_tasks
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import load_sessions


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
    runtime: str | Runtime = "process",
    tools: Sequence[str | Path] = (),
    container_engine: str | None = None,
    container_arguments: Sequence[str] = (),
    repositories: str | Path | None = None,
    max_calls: int | None = None,
    max_sampled_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    retries: int = 2,
    give_up_after: int = 8,
    new_groups: bool = False,
    options: Mapping[str, str | Sequence[str]] | None = None,
    progress: bool = True,
) -> Run:
    """Run every task several times with a harness, record all model calls, and return the run.

    `tasks` is a list of tasks, or what `load_tasks` reads, with `repositories`. `harness` is a harness, the name of a
    preset, or the path of a `.toml` file. `engine` is the URL of the vLLM server that serves `model`, or several
    separated by commas. The `sessions` of one task are one group. At most `concurrency` of all sessions run at the same
    time. A harness is stopped after `timeout` seconds, unless its task has a time limit of its own. `recorders` is the
    number of the recorder's processes, as in `Recorder`. `options` are further mitmproxy options of the recorder; a
    repeatable one has a list of values. `progress` shows a progress bar on a terminal.

    `out` is the run folder. A rollout into the folder of an earlier one goes on with it: sessions that have ended are
    used again; those that were interrupted, failed because of the engine, the recorder or the machine, or could not be
    judged are tried again. It begins groups of its own when something else decides the sessions: the task's content,
    the harness, its version and program, image, runtime, time limit, budgets, recorder options, model or weights; it
    says on stderr which. `new_groups` begins further groups, once the newest ones are complete.

    `runtime` is where sessions run: `process`, `sandbox`, `container`, `apptainer`, or a runtime that you made. The
    first does not protect this machine from the harness. `tools` are folders of installed programs that a box shows,
    read-only; `container_engine` and `container_arguments` are the program that makes containers, and its arguments.
    `max_calls`, `max_sampled_tokens` and `max_prompt_tokens` are budgets of a session: model calls, sampled tokens, and
    prompt tokens of one call.

    A session that fails does not end the rollout: its status says what happened. With the status `infrastructure` it
    failed because of the engine, the recorder or the machine, or no model call of it was answered: it is tried again up
    to `retries` times, has no reward and is not trained on. The rollout stops after `give_up_after` sessions in a row
    that say nothing of the policy, if they are of more than one task or there is only one. KeyboardInterrupt stops the
    harnesses and the recorder; sessions that ran have the status `cancelled`.

    `Run.new_session_ids` of the result are the sessions of this call's groups, all attempts:
    `run.traces().batch(run.new_session_ids)`. Works in a script and in a notebook; `rollout_async` is for an event
    loop.

    Raises, before the recorder is started, `InputError` for wrong tasks, numbers, harness, runtime or options, and
    `EngineError` when an engine does not answer; `RunError` when another rollout runs in the folder;
    `MissingPackageError` without mitmproxy; `RecorderError` when the recorder does not start, for instance for a wrong
    `model` or option, dies, or when the rollout gives up; `OSError` when the run folder cannot be written.
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
            runtime=runtime,
            tools=tools,
            container_engine=container_engine,
            container_arguments=container_arguments,
            repositories=repositories,
            max_calls=max_calls,
            max_sampled_tokens=max_sampled_tokens,
            max_prompt_tokens=max_prompt_tokens,
            retries=retries,
            give_up_after=give_up_after,
            new_groups=new_groups,
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
    runtime: str | Runtime = "process",
    tools: Sequence[str | Path] = (),
    container_engine: str | None = None,
    container_arguments: Sequence[str] = (),
    repositories: str | Path | None = None,
    max_calls: int | None = None,
    max_sampled_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    retries: int = 2,
    give_up_after: int = 8,
    new_groups: bool = False,
    options: Mapping[str, str | Sequence[str]] | None = None,
    progress: bool = True,
) -> Run:
    """Do what `rollout` does inside an event loop. Cancelling it stops the harnesses and the recorder."""
    task_list = _checked_tasks(tasks, repositories)
    numbers = {"sessions": sessions, "concurrency": concurrency, "recorders": recorders, "give_up_after": give_up_after}
    budgets = {"calls": max_calls, "sampled_tokens": max_sampled_tokens, "prompt_tokens": max_prompt_tokens}
    for name, value in {**numbers, **{f"max_{name}": value for name, value in budgets.items()}}.items():
        if value is not None and value < 1:
            raise InputError(f"{name}={value}: give at least 1")
    if retries < 0:
        raise InputError(f"retries={retries}: give at least 0")
    if not timeout > 0:
        raise InputError(f"timeout={timeout}: give a number of seconds above 0")
    given = {"tools": tools, "container_engine": container_engine, "container_arguments": container_arguments}
    if not isinstance(runtime, str) and (unused := [name for name, value in given.items() if value]):
        raise InputError(f"{unused[0]} has no meaning with a runtime that you made: give it to that runtime")
    if isinstance(runtime, str):
        runtime = make_runtime(
            runtime, tools=tools, container_engine=container_engine, container_arguments=container_arguments
        )
    await asyncio.to_thread(runtime.check)
    if not isinstance(harness, Harness):
        harness = Harness.load(str(harness))
    task_list = fit_tasks(task_list, runtime)
    if not all(task.image for task in task_list):
        harness.require_program()
    plan = Plan(harness, concurrency, timeout, runtime, retries, give_up_after)
    run_folder = Path(out)
    settings = {**Budget(**budgets).options(), **(options or {})}
    recorder = Recorder(run_folder, engine=engine, model=model, options=settings, processes=recorders)
    weights = await asyncio.to_thread(check_engines, engine, str(model))
    await asyncio.to_thread(check_judges, task_list, engine)
    with rollout_lock(run_folder):
        async with _started(recorder):
            await run_to_end(end_interrupted, recorder)
            recorded = Recorded(load_sessions(run_folder).values())
            weights = f"{weights},{PolicyFile(run_folder).read().version}"
            async with shared_async(plan) as common:
                keys = await keys_of(task_list, plan, common, model=model, weights=weights, options=settings)
                groups = [
                    recorded.group(task, key, sessions, further=new_groups)
                    for task, key in zip(task_list, keys, strict=True)
                ]
                missing = [recorded.missing(group) for group in groups]
                if progress:
                    for line in going_on(run_folder, recorded, groups, missing, further=new_groups):
                        print(line, file=sys.stderr)
                with progress_bar(show=progress) as advance:
                    await run_groups(missing, plan, recorder, policy_version=None, advance=advance, common=common)
    run = open_run(out)
    ended = Recorded(load_sessions(run_folder).values())
    run.new_session_ids = tuple(session.session_id for group in groups for session in ended.attempts(group))
    return run


def _checked_tasks(tasks: Sequence[Task] | str | Path, repositories: str | Path | None) -> list[Task]:
    if isinstance(tasks, str | Path):
        return load_tasks(Path(tasks), repositories=None if repositories is None else Path(repositories))
    if isinstance(tasks, Task):
        raise InputError("tasks is one task: give a list")
    checked = list(tasks)
    if not checked:
        raise InputError("the list of tasks is empty")
    for name, number in Counter(task.id for task in checked).items():
        if number > 1:
            raise InputError(f"{number} tasks have the id {name!r}: give each task an id of its own")
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


def set_provenance(session: Session, harness: Harness) -> None:
    """Set the version of a preset's program, which is asked here and now, and the digests of both, in a session's row.

    Warns when the version is not the preset's.
    """
    with workplace() as work:
        known = run_blocking(Provenances(harness, ProcessRuntime(), work).of(None))
    session.harness_version, session.program_digest = known.harness_version, known.program_digest
    session.preset_digest = known.preset_digest


def end_recorded(session: Session, recorder: Recorder, evaluate: str | None) -> Facts:
    """End a session of a program that the caller started, with the reward of the command `evaluate`, or None.

    Returns its facts. A reward that the program gave at the session's end counts first.

    Raises as `Recorder.end_calls` and `Recorder.end`.
    """
    recorder.end_calls(session.session_id)
    facts = recorder.facts(session.session_id)
    if evaluate is not None:
        judged = None
        if is_judged(facts):
            judged = judge_here(evaluate, recorder.path / "logs" / f"{session.session_id}.evaluate.log")
            session.parts, session.evidence = json.dumps(judged.parts), json.dumps(judged.evidence)
        result = outcome(Ended(session.exit_status), math.inf, facts, judged)
        session.status, session.reward, session.error = result.status, result.reward, result.error
    elif facts.budget is not None:
        session.status, session.error = "budget", facts.budget
    if rows := session_rows(recorder.path, session.session_id):
        own = rows[-1]
        session.revision = own.revision + 1
        session.status = "completed" if session.exit_status == 0 else "failed"
        session.reward, session.parts, session.evidence, session.error = own.reward, own.parts, own.evidence, None
        session.task_id, session.group_id = own.task_id or session.task_id, own.group_id or session.group_id
    recorder.end(session)
    return facts
