"""Scheduling of sessions: several at a time, each in a copy of the workspace, with credentials of its own."""

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rolltap.addons.errors import RecorderError, RunError
from rolltap.addons.store.records import Session, SessionStatus, utc_now
from rolltap.trainer.blocking import run_to_end
from rolltap.trainer.progress import Advance
from rolltap.trainer.rollouts.environment import clean_environment
from rolltap.trainer.rollouts.evaluate import evaluate
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.runtimes.supervised import run_supervised
from rolltap.trainer.rollouts.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of running sessions. `timeout` is in seconds, for the harness without its evaluator."""

    harness: Harness
    concurrency: int
    timeout: float


@dataclass(frozen=True, slots=True)
class Group:
    """Sessions to run of one task. A group may have others that were run before."""

    task: Task
    group_id: str
    session_ids: Sequence[str]


def new_group(task: Task, sessions: int) -> Group:
    """Return a group of a new id with a number of sessions."""
    group_id = f"{task.id}-{uuid.uuid4().hex[:8]}"
    return Group(task, group_id, [f"{group_id}-{index}" for index in range(sessions)])


async def run_groups(
    groups: Sequence[Group],
    plan: Plan,
    recorder: Recorder,
    *,
    policy_version: str | None,
    advance: Advance,
) -> list[Session]:
    """Run the sessions of groups and record the outcome of every session, failed ones included.

    `policy_version` is that of sessions without a sampled token; None stands for the published one. Other sessions have
    the version that their calls say: see `Recorder.end`.

    Returns the sessions in the order in which they ended. Raises `RecorderError` when the recorder dies, `EngineError`
    when the engine does not say its context window, and `OSError` when the run folder cannot be written.
    """
    harness_env = await asyncio.to_thread(plan.harness.environment, recorder.engine)
    semaphore = asyncio.Semaphore(plan.concurrency)
    sessions: list[Session] = []
    total = sum(len(group.session_ids) for group in groups)

    async def one(group: Group, session_id: str) -> None:
        async with semaphore:
            recorder.check()
            session = Session(
                session_id=session_id,
                task_id=group.task.id,
                group_id=group.group_id,
                harness=plan.harness.name,
                status="infrastructure",
                policy_version=policy_version,
            )
            await _run_session(session, group.task, plan, recorder, harness_env)
            session.finished_at = utc_now()
            await run_to_end(recorder.end, session)
            sessions.append(session)
            what = f"{len(sessions)} of {total} sessions: {session.session_id} {session.status} {session.reward}"
            advance(what, len(sessions), total)

    try:
        async with asyncio.TaskGroup() as running:
            for group in groups:
                for session_id in group.session_ids:
                    running.create_task(one(group, session_id))
    except ExceptionGroup as failures:
        # the first failure cancelled the other sessions; errors that came with it are in `__cause__`
        raise failures.exceptions[0] from failures
    return sessions


async def _run_session(
    session: Session, task: Task, plan: Plan, recorder: Recorder, harness_env: dict[str, str]
) -> None:
    """Run the harness and the evaluator, and set the outcome in `session`.

    A session with a fault has the status `infrastructure` and no reward, and is not evaluated.
    """
    try:
        logs = recorder.path / "logs"
        logs.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="rolltap-", ignore_cleanup_errors=True) as folder:
            workspace, home = Path(folder, "workspace"), Path(folder, "home")
            home.mkdir()
            if task.workspace is not None:
                await asyncio.to_thread(shutil.copytree, task.workspace, workspace, symlinks=True)
            else:
                workspace.mkdir()
            base = clean_environment(home)
            env = {**base, **harness_env, **recorder.environment(session.session_id)}
            log = logs / f"{session.session_id}.log"
            command = plan.harness.command_for(task.instruction)
            how_it_ended = await run_supervised(command, cwd=workspace, env=env, timeout=plan.timeout, log=log)
            session.exit_status = how_it_ended.status
            status, ended = _outcome(session.exit_status, plan.timeout)
            session.error = await run_to_end(recorder.end_calls, session.session_id)
            if session.error is not None:
                session.error += f" ({ended or 'the harness ended with status 0'}; its output is in {log})"
                return
            session.reward, fault = await evaluate(task, workspace, base, logs / f"{session.session_id}.evaluate.log")
            session.status, session.error = ("infrastructure", fault) if fault is not None else (status, ended)
    except OSError as error:
        session.error = f"the session could not be run: {error}"
    except (RecorderError, RunError) as error:
        session.error = str(error)  # `Recorder.end` raises it once this session has its row


def _outcome(exit_status: int | None, timeout: float) -> tuple[SessionStatus, str | None]:
    """Return the status of a session that had no fault, and why it is not `completed`."""
    if exit_status is None:
        return "timeout", f"stopped after {timeout:g} s"
    if exit_status != 0:
        return "failed", f"the harness ended with status {exit_status}"
    return "completed", None
