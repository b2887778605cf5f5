"""Judging recorded sessions again. What each agent changed was kept; the judge of its task may be
another one now.

Nothing is run but judges, each as in a rollout: in a fresh checkout, in a box, and what is the
judge's stays the judge's. A session gets a further row with the new reward; its earlier rows stay.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError, RolltapError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import judged_status, session_rows
from rolltap.addons.store.staging import locked
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.boxes.hiding import HidingRuntime, private_paths
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.console import progress_bar
from rolltap.trainer.judges.archive import SUFFIX, restore_changes
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.judges.judge import judge_changes, on_copy
from rolltap.trainer.judges.layout import JudgeJob
from rolltap.trainer.judges.verdict import Judged
from rolltap.trainer.locks import workplace
from rolltap.trainer.rollouts.check import build_images, fit_tasks
from rolltap.trainer.rollouts.preparation import Starts
from rolltap.trainer.rollouts.session import count_suspicions
from rolltap.trainer.runs.views.inspect import find_session_id
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows, load_sessions

_SOURCE = "rolltap judge"
"""Who gave the reward, in the evidence."""


async def rejudge(
    run: Path,
    tasks: Sequence[Task],
    runtime: Runtime,
    *,
    only: Sequence[str],
    concurrency: int,
    progress: bool,
) -> list[dict[str, Any]]:
    """Judge sessions of a run, all without `only`, `concurrency` at a time.

    Returns and raises as `judge_again`.
    """
    known = load_sessions(run)
    ids = dict.fromkeys(find_session_id(run, each) for each in only) or known
    chosen = [known.get(each) or Session(session_id=each, status="unknown") for each in ids]
    named = {session.task_id for session in chosen}
    own = [task for task in tasks if task.id in named]
    runtime.check()
    if isinstance(runtime, HidingRuntime):
        runtime.hide(private_paths(run, own, tools=runtime.tools))
        runtime.layers()
    engines = list(read_metadata(run).get("engines", {}))
    fitting = fit_tasks(own, runtime)
    fitting = await build_images(fitting, runtime, run / "logs", at_once=concurrency)
    check_judges(fitting, ",".join(engines))
    digests = {task.id: await asyncio.to_thread(task.digest) for task in fitting}
    places = asyncio.Semaphore(concurrency)
    ended: list[str] = []

    async def attempt(session: Session) -> dict[str, Any]:
        found = await again.attempt(session, places)
        ended.append(session.session_id)
        advance("sessions", len(ended), len(chosen))
        return found

    with workplace() as work, RunWriter(run) as writer, progress_bar(show=progress) as advance:
        again = _Again(
            run=run,
            runtime=runtime,
            tasks={task.id: task for task in fitting},
            digests=digests,
            engines=engines,
            work=work,
            starts=Starts(work / "starts", runtime),
            rows=SessionRows(run),
            writer=writer,
        )
        return list(await asyncio.gather(*map(attempt, chosen)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """State that the judgements of a run's sessions share.

    `tasks` and `digests` are by the task's id.
    """

    run: Path
    runtime: Runtime
    tasks: Mapping[str, Task]
    digests: Mapping[str, str]
    engines: Sequence[str]
    work: Path
    starts: Starts
    rows: SessionRows
    writer: RunWriter

    async def attempt(self, before: Session, places: asyncio.Semaphore) -> dict[str, Any]:
        """Judge a session, unless its reward stays. An error is of this session alone."""
        after = before
        result = "left"
        try:
            why = _kept_as_it_is(before, self.digests.get(before.task_id, ""))
            if why is None:
                async with places:
                    judged = await self.judge(before)
                after = await run_to_end(self.record, before, judged)
                result = "unjudged" if judged.reward is None else "judged"
                why = judged.unjudged
        except (RolltapError, OSError) as error:
            result = "refused"
            why = str(error)
        except Exception as error:
            result = "refused"
            why = repr(error)
        return {
            "session": before.session_id,
            "task": before.task_id,
            "before": before.reward,
            "reward": after.reward,
            "status": after.status,
            "result": result,
            "why": why,
        }

    async def judge(self, session: Session) -> Judged:
        """Apply a session's kept changes to a fresh start, and judge that."""
        task = self.tasks.get(session.task_id)
        if task is None:
            why = f"these tasks have no task {session.task_id!r} that can be judged here"
            raise InputError(f"{why}: give the tasks of the session")
        if session.runtime != self.runtime.name:
            ran = session.runtime
            if not ran:
                raise InputError("it ran in no runtime: what it changed is not known")
            why = f"it ran in the runtime {ran}, and is judged in that one alone"
            raise InputError(f"{why}: use --runtime {ran}")
        start = await self.starts.of(task)
        logs = self.run / "logs"
        name = Path(session.session_id).name
        untouched = JudgeJob(
            task=task,
            start=start,
            runtime=self.runtime,
            name=f"{name}.r{session.revision + 1}",
            logs=logs,
            engine_urls=self.engines,
        )
        async with on_copy(untouched, self.work) as (job, folders):
            kept = logs / f"{name}{SUFFIX}"
            refused = await in_folder_thread(restore_changes, kept, start, folders.workspace)
            changes = await job.find_changes(folders.workspace)
            refused = {**refused, **changes.refused}
            return await judge_changes(replace(job, changes=replace(changes, refused=refused)))

    def record(self, before: Session, judged: Judged) -> Session:
        """Write a session's further row, and return it."""
        status = judged_status(before)
        evidence = {**judged.evidence, "reward_from": _SOURCE}
        error = None if before.status == "unjudged" else before.error
        if judged.reward is None:
            evidence["ended"] = status
            status = "unjudged"
        session = replace(
            before,
            status=status,
            reward=judged.reward,
            parts=dict(judged.parts),
            evidence=evidence,
            error=judged.unjudged or error,
            revision=before.revision + 1,
            task_digest=self.digests[before.task_id],
        )
        count_suspicions(self.rows, session, self.tasks[before.task_id])
        with locked(self.run, wait=True):
            if session_rows(self.run, session.session_id)[-1].revision != before.revision:
                raise InputError("it was given another reward meanwhile: judge it again")
            self.writer.add_session(session)
        return session


def _kept_as_it_is(session: Session, digest: str) -> str | None:
    """Return why a session is not judged again by the task with a digest, None if it is."""
    source = session.evidence.get("reward_from", _SOURCE)
    if source != _SOURCE:
        return f"its reward was given by {source}"
    if session.status == "unjudged" and session.reward is None:
        return None
    if session.reward is None:
        return f"it was not judged: {session.error or session.status}"
    if session.task_digest == digest and "reward_from" in session.evidence:
        return "it was judged by this task already"
    too_much: str | None = session.evidence.get("too_much")
    return too_much
