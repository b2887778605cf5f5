"""Judging recorded sessions again. What each agent changed was kept; the judge of its task may be another one now.

Nothing is run but judges, each as in a rollout: in a fresh checkout, in a box, and what is the judge's stays the
judge's. A session gets a further row with the new reward; its earlier rows stay.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError, RolltapError
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.rewards import judged_status, session_rows
from rolltap.addons.store.staging import locked
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.boxes import runtime as boxes
from rolltap.trainer.concurrency import in_folder_thread, run_to_end
from rolltap.trainer.console import progress_bar
from rolltap.trainer.judges.archive import SUFFIX, restore_changes
from rolltap.trainer.judges.changes import AgentResult, find_changes
from rolltap.trainer.judges.check import check_judges
from rolltap.trainer.judges.checkout import JudgeJob
from rolltap.trainer.judges.judge import judge_changes
from rolltap.trainer.judges.verdict import Judged
from rolltap.trainer.rollouts.check import build_images, fit_tasks
from rolltap.trainer.rollouts.mitmdump import workplace
from rolltap.trainer.rollouts.session import count_suspicions
from rolltap.trainer.rollouts.workspace import Starts
from rolltap.trainer.runs.views.inspect import find_session_id
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows, load_sessions

_SOURCE = "rolltap judge"
"""Who gave the reward, in the evidence."""


async def rejudge(
    run: Path, tasks: Sequence[Task], runtime: boxes.Runtime, *, only: Sequence[str], concurrency: int, progress: bool
) -> list[dict[str, Any]]:
    """Judge sessions of a run, all without `only`, `concurrency` at a time. Returns and raises as `judge_again`."""
    known, rows, logs = load_sessions(run), SessionRows(run), run / "logs"
    ids = dict.fromkeys(find_session_id(run, each) for each in only) or known
    chosen = [known.get(each) or Session(session_id=each, status="unknown") for each in ids]
    named = {session.task_id for session in chosen}
    own = [task for task in tasks if task.id in named]
    runtime.check()
    if isinstance(runtime, boxes.HidingRuntime):
        runtime.hide(boxes.private_paths(run, own, tools=runtime.tools))
        runtime.layers()
    engines = list(read_metadata(run).get("engines", {}))
    fitting = await build_images(fit_tasks(own, runtime), runtime, logs, at_once=concurrency)
    check_judges(fitting, ",".join(engines))
    ready = {task.id: task for task in fitting}
    digests = {task.id: await asyncio.to_thread(task.digest) for task in fitting}
    places, ended = asyncio.Semaphore(concurrency), list[str]()

    async def attempt(before: Session) -> dict[str, Any]:
        after, result, digest = before, "left", digests.get(before.task_id, "")
        try:
            why = _kept_as_it_is(before, digest)
            if why is None:
                async with places:
                    judged = await judge_kept(before)
                after = await run_to_end(record, before, judged)
                result, why = "unjudged" if judged.reward is None else "judged", judged.unjudged
        except Exception as error:  # of one session; the others are judged
            result, why = "refused", str(error) if isinstance(error, RolltapError | OSError) else repr(error)
        ended.append(before.session_id)
        advance("sessions", len(ended), len(chosen))
        found = {"session": before.session_id, "task": before.task_id, "before": before.reward, "reward": after.reward}
        return {**found, "status": after.status, "result": result, "why": why}

    async def judge_kept(session: Session) -> Judged:
        if (task := ready.get(session.task_id)) is None:
            raise InputError(f"no task with the id {session.task_id!r} can be judged by these tasks")
        if session.runtime != runtime.name:
            raise InputError(f"it ran in the runtime {session.runtime or '(none)'}, and is judged in no other")
        start, folder = await starts.of(task), Path(tempfile.mkdtemp(dir=work))
        made, name = AgentResult(folder / "workspace", folder / "home"), Path(session.session_id).name
        try:
            await in_folder_thread(start.copy_to, made.workspace)
            refused = await in_folder_thread(restore_changes, logs / f"{name}{SUFFIX}", start, made.workspace)
            changes = await in_folder_thread(find_changes, start.folder, made.workspace)
            name += f".r{session.revision + 1}"
            job = JudgeJob(
                task=task, start=start, runtime=runtime, result=made, name=name, logs=logs, engine_urls=engines
            )
            changes = replace(changes, refused={**refused, **changes.refused})
            return await judge_changes(replace(job, changes=changes))
        finally:
            await run_to_end(boxes.remove_folder, folder)

    def record(before: Session, judged: Judged) -> Session:
        unjudged, ended = judged.reward is None, judged_status(before)
        session = replace(
            before,
            status="unjudged" if unjudged else ended,
            reward=judged.reward,
            parts=dict(judged.parts),
            evidence={**judged.evidence, "reward_from": _SOURCE, **({"ended": ended} if unjudged else {})},
            error=judged.unjudged or (None if before.status == "unjudged" else before.error),
            revision=before.revision + 1,
            task_digest=digests[before.task_id],
        )
        count_suspicions(rows, session, ready[before.task_id])
        with locked(run, wait=True):
            if session_rows(run, session.session_id)[-1].revision != before.revision:
                raise InputError("it was given another reward meanwhile")
            writer.add_session(session)
        return session

    with workplace() as work, RunWriter(run) as writer, progress_bar(show=progress) as advance:
        starts = Starts(work / "starts", runtime)
        return list(await asyncio.gather(*map(attempt, chosen)))


def _kept_as_it_is(session: Session, digest: str) -> str | None:
    """Return why a session is not judged again by the task with a digest, None if it is."""
    source = session.evidence.get("reward_from", _SOURCE)
    if source != _SOURCE:
        return f"its reward was given by {source}"
    if session.reward is None:
        return None if session.status == "unjudged" else f"it was not judged: {session.error or session.status}"
    if session.task_digest == digest and "reward_from" in session.evidence:
        return "it was judged by this task already"
    too_much: str | None = session.evidence.get("too_much")
    return too_much
