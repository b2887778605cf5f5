"""Scheduling of sessions: several at a time, with retries of those that failed because of infrastructure."""

import asyncio
import logging
from collections.abc import Sequence
from functools import cache

from rolltap.addons.concurrency import backoff
from rolltap.addons.errors import RecorderError, UnreadableModelError
from rolltap.addons.store.records import Session
from rolltap.trainer.console import Advance
from rolltap.trainer.rollouts.outcomes import Tally
from rolltap.trainer.rollouts.resume import Group, next_attempt
from rolltap.trainer.rollouts.session import Stage, run_session

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Pause before the first retry of a session. Each one after it is twice as long."""


async def run_groups(
    groups: Sequence[Group], stage: Stage, *, policy_version: str | None, advance: Advance
) -> list[Session]:
    """Run the sessions of groups and record the outcome of every session, failed ones included.

    A session with the status `infrastructure` is retried, under the id of the next attempt, unless its task cannot be
    run at all. `policy_version` is that of sessions without a sampled token; None stands for the published one. Other
    sessions have the version that their calls say: see `Recorder.end`.

    Returns the sessions in the order in which they ended, all attempts. Raises `RecorderError` when the recorder dies,
    and after `give_up_after` consecutive infrastructure failures; `UnreadableModelError` after a call with tools of a
    model whose tool calls cannot be read; `InputError` for a task's path that cannot be read, and `OSError` when the
    run folder cannot be written. The sessions that still run are stopped then, and have rows.
    """
    config, recorder, runtime = stage.config, stage.recorder, stage.runtime
    if runtime.warning is not None:
        _warn_once(runtime.warning)
    for group in groups:
        if group.session_ids:
            await stage.digest(group.task)
    semaphore = asyncio.Semaphore(config.concurrency)
    sessions: list[Session] = []
    named: set[str] = set()
    tally = Tally(sum(len(group.session_ids) for group in groups), len({g.task.id for g in groups if g.session_ids}))

    async def attempt(group: Group, session_id: str, *, last: bool) -> bool:
        """Run a session. Return True when it is to be retried."""
        async with semaphore:
            if tally.failures_in_a_row >= config.give_up_after:
                return False  # another session gives up, and the task is about to be cancelled
            recorder.check()

            def tell(phase: str) -> None:
                tally.phases[session_id] = phase
                advance(tally.line(), tally.done, tally.total)

            session, facts = await run_session(stage, group, session_id, policy_version=policy_version, tell=tell)
            sessions.append(session)
            del tally.phases[session_id]
            if facts.unreadable is not None:
                raise UnreadableModelError(facts.unreadable)
            again = session.status == "infrastructure" and not facts.permanent and not last
            tally.add(session, facts, again=again)
            advance(tally.line(), tally.done, tally.total)
            if facts.permanent and group.task.id not in named:
                named.add(group.task.id)
                logger.warning("no session of task %s can be run: %s", group.task.id, session.error)
            if tally.failures_in_a_row >= config.give_up_after:
                raise RecorderError(
                    f"gave up after {tally.failures_in_a_row} consecutive infrastructure failures; the last, "
                    f"{session_id}: {session.error}. Fix the cause and rerun: sessions that have ended are used again"
                )
            return again

    async def one(group: Group, session_id: str) -> None:
        for pause in backoff(config.retries, PAUSE_SECONDS):
            if not await attempt(group, session_id, last=pause is None) or pause is None:
                return
            session_id = next_attempt(session_id)
            await asyncio.sleep(pause)

    try:
        async with asyncio.TaskGroup() as running:
            for group in groups:
                for session_id in group.session_ids:
                    running.create_task(one(group, session_id))
    except ExceptionGroup as failures:
        # the first failure cancelled the other sessions; errors that came with it are in `__cause__`
        raise failures.exceptions[0] from failures
    return sessions


@cache
def _warn_once(warning: str) -> None:
    logger.warning("%s", warning)
