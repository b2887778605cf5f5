"""Scheduling of sessions: several at a time, and further attempts at those that failed because of infrastructure."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import cache

from rolltap.addons.errors import RecorderError
from rolltap.addons.store.records import Session
from rolltap.trainer.progress import Advance
from rolltap.trainer.rollouts.facts import Group, next_attempt
from rolltap.trainer.rollouts.outcomes import Tally
from rolltap.trainer.rollouts.plan import Plan, Shared, shared_async
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.runtimes.sandbox import HidingRuntime, private_paths
from rolltap.trainer.rollouts.session import Stage, run_session
from rolltap.trainer.tasks.task import Task

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
    common: Shared | None = None,
) -> list[Session]:
    """Run the sessions of groups and record the outcome of every session, failed ones included.

    A session with the status `infrastructure` is tried again, under the id of the next attempt, unless it would fail
    again until somebody mends its task. `policy_version` is that of sessions without a sampled token; None stands for
    the published one. Other sessions have the version that their calls say: see `Recorder.end`. `common` is what the
    sessions of several calls share; without it they share what is made for this call.

    Returns the sessions in the order in which they ended, all attempts. Raises `RecorderError` when the recorder dies,
    and when too many sessions in a row say nothing of the policy; `EngineError` when the engine does not say its
    context window, `InputError` for a path of a task that cannot be read, and `OSError` when the run folder cannot be
    written. The sessions that still run are stopped then, and have rows.
    """
    if plan.runtime.warning is not None:
        _tell_once(plan.runtime.warning)
    harness_env = await asyncio.to_thread(plan.harness.environment, recorder.engine)
    semaphore = asyncio.Semaphore(plan.concurrency)
    sessions: list[Session] = []
    told: set[str] = set()
    tally = Tally(sum(len(group.session_ids) for group in groups), len({g.task.id for g in groups if g.session_ids}))

    async def attempt(task: Task, group_id: str, session_id: str, *, last: bool) -> bool:
        """Run a session. Return True when it is to be tried again."""
        async with semaphore:
            if tally.in_a_row >= plan.give_up_after:
                return False  # another session gives up, and the task is about to be cancelled
            recorder.check()
            session, facts = await run_session(stage, task, group_id, session_id)
            sessions.append(session)
            again = session.status == "infrastructure" and not facts.permanent and not last
            tally.add(session, facts, again=again)
            advance(tally.line(), tally.done, tally.total)
            if facts.permanent and task.id not in told:
                told.add(task.id)
                logger.warning("no session of task %s can be run: %s", task.id, session.error)
            _require_sense(tally, plan, session)
            return again

    async def one(task: Task, group_id: str, session_id: str) -> None:
        for number in range(plan.retries + 1):
            if not await attempt(task, group_id, session_id, last=number == plan.retries):
                return
            session_id = next_attempt(session_id)
            await asyncio.sleep(PAUSE_SECONDS * 2**number)

    try:
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(shared_async(plan)) if common is None else common
            if isinstance(plan.runtime, HidingRuntime):
                plan.runtime.hide(private_paths(recorder.path, own.work, [group.task for group in groups]))
            for group in groups:
                if group.session_ids and group.task.id not in own.digests:
                    own.digests[group.task.id] = await asyncio.to_thread(group.task.digest)
            stage = Stage(
                plan,
                recorder,
                own.work,
                own.starts,
                own.provenances,
                own.digests,
                harness_env,
                policy_version,
                {group.group_id: group.key for group in groups},
            )
            async with asyncio.TaskGroup() as running:
                for group in groups:
                    for session_id in group.session_ids:
                        running.create_task(one(group.task, group.group_id, session_id))
    except ExceptionGroup as failures:
        # the first failure cancelled the other sessions; errors that came with it are in `__cause__`
        raise failures.exceptions[0] from failures
    return sessions


@cache
def _tell_once(warning: str) -> None:
    logger.warning("%s", warning)


def _require_sense(tally: Tally, plan: Plan, last: Session) -> None:
    """Raise `RecorderError` when it makes no sense to go on."""
    if tally.in_a_row >= plan.give_up_after:
        raise RecorderError(
            f"gave up after {tally.in_a_row} sessions in a row that say nothing of the policy; the last, "
            f"{last.session_id}: {last.error}. Put it right and start again: sessions that have ended are used again"
        )
