"""Carries out what the scheduler says: sessions of groups run beside each other, and are retried and cancelled."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import TracebackType
from typing import Literal, Protocol, Self

from rolltap.addons.errors import RecorderError, UnreadableModelError
from rolltap.addons.store.records import Session
from rolltap.trainer.console import Advance
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.rollouts.outcomes import Tally
from rolltap.trainer.rollouts.resume import Group, place_of
from rolltap.trainer.rollouts.scheduler import Phase, Scheduler, Slots
from rolltap.trainer.rollouts.session import Stage, new_session, run_session

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Pause before the first retry of a session. Each one after it is twice as long."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A group that was submitted. `ended` are its sessions so far, in the order in which they ended."""

    group: Group
    stage: Stage
    policy_version: str | None
    deadline: float
    result: asyncio.Future[list[Session]]
    apart: bool
    ended: list[Session] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


OnEnd = Callable[[Session, float], None]
"""Gets a session that has a row, and the seconds for which it was judged."""


class GroupSchedule(Protocol):
    """Groups that run beside each other: in this process (`Schedule`), or on the nodes of a fleet."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def submit(
        self,
        group: Group,
        policy_version: str | None = None,
        *,
        stage: Stage | None = None,
        evaluates: bool = False,
        priority: int = 0,
        seconds: float = math.inf,
        apart: bool = False,
    ) -> asyncio.Future[list[Session]]:
        """Take a group: see `Schedule.submit`."""

    def cancel(self, name: str, why: str) -> None:
        """Stop a session or a group, by its id."""

    def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Stop the sessions that run and whose first call has a version that is `too_old`."""

    @property
    def counts(self) -> Mapping[Phase, int]:
        """Number of sessions in each phase."""

    @property
    def nodes(self) -> Mapping[str, Mapping[Phase, int]]:
        """Node of a fleet -> number of its sessions in each phase."""

    @property
    def running(self) -> int:
        """Number of sessions that run."""


class Schedule:
    """Sessions of groups that run beside each other. An async context manager.

    A session with the status `infrastructure` is retried, under the id of the next attempt, unless its task cannot be
    run at all.

    The block is cancelled, and leaving it raises `RecorderError` when the recorder dies, and after `give_up_after`
    consecutive infrastructure failures; `UnreadableModelError` after a call with tools of a model whose tool calls
    cannot be read; and `OSError` when the run folder cannot be written. The sessions that still run are stopped then,
    and have rows.

    Groups that evaluate have the first `share` of the slots, one at least, and those that the others leave. `ended` is
    called when a session has ended, each attempt of it, before the group's result is known.
    """

    def __init__(self, stage: Stage, advance: Advance, share: float = 0.0, ended: OnEnd = lambda *_: None) -> None:
        config = stage.config
        most = config.concurrency
        slots = Slots(config.preparing or most, config.ready, most, config.judging or most, max(1, int(share * most)))
        self._scheduler = Scheduler(slots, config.retries, PAUSE_SECONDS)
        self._stage, self._advance, self._ended = stage, advance, ended
        self._tally = Tally(self._scheduler.counts)
        self._groups: dict[str, _Given] = {}
        self._running: dict[str, tuple[Session, asyncio.Task[None]]] = {}
        self._slots: dict[str, asyncio.Event] = {}
        """Session that waits for a slot -> set when it has one."""
        self._named: set[str] = set()
        self._tasks = asyncio.TaskGroup()
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        """True when no session may start any more."""

    async def __aenter__(self) -> Self:
        if self._stage.runtime.warning is not None:
            _warn_once(self._stage.runtime.warning)
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._groups:  # one that waits for its retry has no task
                await asyncio.wait([given.result for given in self._groups.values()])
        except asyncio.CancelledError as error:
            kind, value, traceback = type(error), error, error.__traceback__
        self._over = True
        try:
            await self._tasks.__aexit__(kind, value, traceback)
        except ExceptionGroup as failures:
            # the first failure cancelled the other sessions; errors that came with it are in `__cause__`
            raise failures.exceptions[0] from failures
        finally:
            for given in self._groups.values():
                given.result.cancel()
            if self._timer is not None:
                self._timer.cancel()

    async def submit(
        self,
        group: Group,
        policy_version: str | None = None,
        *,
        stage: Stage | None = None,
        evaluates: bool = False,
        priority: int = 0,
        seconds: float = math.inf,
        apart: bool = False,
    ) -> asyncio.Future[list[Session]]:
        """Take a group. The result are its sessions in the order in which they ended, all attempts.

        It is cancelled when the block fails, or has failed. A group may have a `stage` of its own; its ids are those of
        no other. Groups of a higher priority go first. Sessions that have not ended after so many `seconds` are
        stopped. A group that is `apart` is somebody's of whom the others know nothing: its infrastructure failures stop
        it alone, unless an engine does not answer.

        `policy_version` is that of sessions without a sampled token; None stands for the one that is published when
        they begin. Other sessions have the version that their calls say: see `Recorder.end`. Raises `InputError` for a
        task's path that cannot be read.
        """
        stage = stage or self._stage
        if group.session_ids:
            await stage.digest(group.task)
            self._tally.expect(group.task.id, len(group.session_ids))
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + seconds
        given = _Given(group, stage, policy_version, deadline, loop.create_future(), apart)
        if self._over:
            given.result.cancel()
            return given.result
        self._groups[group.group_id] = given
        self._scheduler.submit(
            group.group_id, group.session_ids, deadline=deadline, evaluates=evaluates, priority=priority
        )
        loop.call_soon(self._go_on)  # those that are submitted together share the slots from the start
        return given.result

    def cancel(self, name: str, why: str) -> None:
        """Stop a session or a group, by its id. A session that runs gets the status `cancelled`."""
        for session, _ in self._running.values():
            if name in (session.session_id, session.group_id) and session.status == "cancelled":  # no outcome yet
                session.error = why
        self._scheduler.cancel(name)
        self._go_on()

    def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Stop the sessions that run and whose first call has a version that is `too_old`."""
        for session_id, version in self.running_versions().items():
            if too_old(version):
                self.cancel(session_id, why)

    def running_versions(self) -> dict[str, str]:
        """Return the session that runs -> the version of its first call, for each that has recorded one.

        Those of an evaluation are recorded elsewhere, and are not among them.
        """
        rows = self._stage.recorder.rows
        versions = {name: rows.first_version(name) for name in self._scheduler.running()}
        return {name: version for name, version in versions.items() if version is not None}

    @property
    def counts(self) -> Mapping[Phase, int]:
        """Number of sessions in each phase."""
        return self._scheduler.counts

    @property
    def nodes(self) -> Mapping[str, Mapping[Phase, int]]:
        """Return nothing: there is this machine alone."""
        return {}

    @property
    def running(self) -> int:
        """Number of sessions that run."""
        return self._scheduler.counts["running"]

    def _go_on(self) -> None:
        """Do what the scheduler says, and come back when it says so."""
        if self._over:
            return
        for kind, group_id, session_id in self._scheduler.advance(time.monotonic()):
            if kind == "prepare":
                self._prepare(self._groups[group_id], session_id)
            elif kind == "stop":
                session, task = self._running[session_id]
                if time.monotonic() >= self._groups[group_id].deadline and session.status == "cancelled":
                    session.error = "the deadline of its group had passed"
                task.cancel()
            elif kind == "close":
                given = self._groups.pop(group_id)
                never_run = {*map(place_of, given.group.session_ids)} - {
                    place_of(each.session_id) for each in given.ended
                }
                self._tally.total -= len(never_run)
                if not given.result.done():
                    given.result.set_result(given.ended)
            else:
                self._slots.pop(session_id).set()
        self._advance(self._tally.line(), self._tally.done, self._tally.total)
        if self._timer is not None:
            self._timer.cancel()
        if (due := self._scheduler.due()) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._go_on)

    def _prepare(self, given: _Given, session_id: str) -> None:
        session = new_session(given.stage, given.group, session_id, given.policy_version)
        task = self._tasks.create_task(self._run(session, given))
        self._running[session_id] = (session, task)
        task.add_done_callback(partial(self._never_begun, session_id))

    def _never_begun(self, session_id: str, _task: asyncio.Task[None]) -> None:
        """End a session whose task was cancelled before its first step, so that none of its code ran."""
        if self._running.pop(session_id, None) is not None:
            self._scheduler.ended(session_id, time.monotonic())
            self._go_on()

    async def _run(self, session: Session, given: _Given) -> None:
        judged_from = math.inf

        async def enter(phase: Literal["running", "judging"]) -> None:
            nonlocal judged_from
            self._slots[session.session_id] = place = asyncio.Event()
            note = self._scheduler.prepared if phase == "running" else self._scheduler.ran
            note(session.session_id)
            self._go_on()
            await place.wait()
            judged_from = time.monotonic() if phase == "judging" else math.inf

        facts = None
        try:
            given.stage.recorder.check()
            facts = await run_session(given.stage, session, given.group, enter)
            if facts.unreadable is not None:
                raise UnreadableModelError(facts.unreadable)
        except asyncio.CancelledError:
            if self._over or not self._scheduler.is_stopped(session.session_id):
                raise
        except BaseException:
            self._over = True
            raise
        finally:
            del self._running[session.session_id]
            self._slots.pop(session.session_id, None)
            if session.status != "unknown":
                given.ended.append(session)
                self._ended(session, max(0.0, time.monotonic() - judged_from))
        again = facts is not None and session.status == "infrastructure" and not facts.permanent
        further = self._scheduler.ended(session.session_id, time.monotonic(), again=again)
        if session.status != "unknown":
            self._tally.add(session, facts, again=further is not None)
            given.tally.add(session, facts, again=further is not None)
        if facts is not None and facts.permanent and session.task_id not in self._named:
            self._named.add(session.task_id)
            logger.warning("no session of task %s can be run: %s", session.task_id, session.error)
        if facts is not None:
            await self._consider_giving_up(given, session)
        self._go_on()

    async def _consider_giving_up(self, given: _Given, session: Session) -> None:
        """Stop the rollout after too many failures, or the group alone whose failures they are."""
        most, failures = self._stage.config.give_up_after, self._tally.failures_in_a_row
        why = f"consecutive infrastructure failures; the last, {session.session_id}: {session.error}"
        if given.apart:
            own = given.tally.failures_in_a_row
            if own >= most:
                self.cancel(given.group.group_id, f"its group was given up after {own} {why}")
            if failures < most or not await asyncio.to_thread(Engines(given.stage.recorder.engine).silent):
                return
        if failures >= most:
            self._over = True
            raise RecorderError(
                f"gave up after {failures} {why}. Fix the cause and rerun: sessions that have ended are used again"
            )


async def run_groups(
    groups: Sequence[Group],
    stage: Stage,
    *,
    policy_version: str | None,
    advance: Advance,
) -> list[Session]:
    """Run the sessions of groups. Return them group by group, in the order in which they ended, all attempts.

    `policy_version` is that of `Schedule.submit`. Raises as `Schedule`.
    """
    for group in groups:
        if group.session_ids:  # a path that cannot be read is an error before the first session
            await stage.digest(group.task)
    async with Schedule(stage, advance) as schedule:
        results = [await schedule.submit(group, policy_version) for group in groups]
        return [session for result in results for session in await result]


@cache
def _warn_once(warning: str) -> None:
    logger.warning("%s", warning)
