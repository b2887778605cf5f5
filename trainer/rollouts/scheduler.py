"""Scheduling of sessions: several at a time, and further attempts at those that failed because of infrastructure."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.blocking import run_to_end
from rolltap.trainer.progress import Advance
from rolltap.trainer.rollouts.groups import Group, next_attempt
from rolltap.trainer.rollouts.plan import Plan
from rolltap.trainer.rollouts.provenance import Provenances
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.runtimes.hiding import HidingRuntime, private_paths
from rolltap.trainer.rollouts.session import Stage, run_session
from rolltap.trainer.rollouts.tally import Tally
from rolltap.trainer.rollouts.tasks.starts import Starts
from rolltap.trainer.rollouts.tasks.task import Task
from rolltap.trainer.rollouts.workplace import workplace

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Pause before the first further attempt at a session. Each one after it is twice as long."""


async def run_groups(
    groups: Sequence[Group],
    plan: Plan,
    recorder: Recorder,
    *,
    policy_version: str | None,
    advance: Advance,
    digests: Mapping[str, str] | None = None,
) -> list[Session]:
    """Run the sessions of groups and record the outcome of every session, failed ones included.

    A session with the status `infrastructure` is tried again, under the id of the next attempt. `policy_version` is
    that of sessions without a sampled token; None stands for the published one. Other sessions have the version that
    their calls say: see `Recorder.end`. `digests` are those of the tasks, by id; None: they are computed.

    Returns the sessions in the order in which they ended, all attempts. Raises `RecorderError` when the recorder dies,
    and when too many sessions in a row say nothing of the policy; `EngineError` when the engine does not say its
    context window, and `OSError` when the run folder cannot be written. The sessions that still run are stopped then,
    and have rows.
    """
    if plan.runtime.warning is not None:
        _tell_once(plan.runtime.warning)
    harness_env = await asyncio.to_thread(plan.harness.environment, recorder.engine)
    if digests is None:
        digests = {group.task.id: await asyncio.to_thread(group.task.digest) for group in groups if group.session_ids}
    semaphore = asyncio.Semaphore(plan.concurrency)
    sessions: list[Session] = []
    tally = Tally(sum(len(group.session_ids) for group in groups))

    async def one(task: Task, group_id: str, session_id: str) -> None:
        async with semaphore:
            for attempt in range(plan.retries + 1):
                if tally.in_a_row >= plan.give_up_after:
                    return  # another session gives up, and the task is about to be cancelled
                recorder.check()
                session, facts = await run_session(stage, task, group_id, session_id)
                sessions.append(session)
                again = session.status == "infrastructure" and attempt < plan.retries
                tally.add(session, facts, again=again)
                advance(tally.line(), tally.done, tally.total)
                _require_sense(tally, plan, session)
                if not again:
                    return
                session_id = next_attempt(session_id)
                await asyncio.sleep(PAUSE_SECONDS * 2**attempt)

    stack = ExitStack()
    try:
        work = await run_to_end(stack.enter_context, workplace())
        if isinstance(plan.runtime, HidingRuntime):
            plan.runtime.hide(private_paths(recorder.path, work, [group.task for group in groups]))
        starts, provenances = Starts(work / "starts", plan.runtime), Provenances(plan.harness, plan.runtime, work)
        stage = Stage(plan, recorder, work, starts, provenances, digests, harness_env, policy_version)
        async with asyncio.TaskGroup() as running:
            for group in groups:
                for session_id in group.session_ids:
                    running.create_task(one(group.task, group.group_id, session_id))
    except ExceptionGroup as failures:
        # the first failure cancelled the other sessions; errors that came with it are in `__cause__`
        raise failures.exceptions[0] from failures
    finally:
        await run_to_end(stack.close)
    return sessions


@cache
def _tell_once(warning: str) -> None:
    logger.warning("%s", warning)


def _require_sense(tally: Tally, plan: Plan, last: Session) -> None:
    """Raise `RecorderError` when it makes no sense to go on."""
    if tally.unjudged_in_a_row >= plan.give_up_after:
        raise RecorderError(
            f"the judge could not judge {tally.unjudged_in_a_row} sessions in a row; the last, {last.session_id}: "
            f"{last.error}. Put the task's judge right and start again"
        )
    if tally.in_a_row >= plan.give_up_after:
        raise RecorderError(
            f"gave up after {tally.in_a_row} sessions in a row that say nothing of the policy; the last, "
            f"{last.session_id}: {last.error}. Put it right and start again: sessions that have ended are used again"
        )
