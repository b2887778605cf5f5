"""Groups that run on the nodes of a fleet beside each other: carries out what the placement says."""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from rolltap.addons.errors import RecorderError, RolltapError, UnreadableModelError
from rolltap.addons.store.records import Session
from rolltap.trainer.console import Advance
from rolltap.trainer.nodes.fleet import Fleet, Member
from rolltap.trainer.nodes.placement import Placement, run_again
from rolltap.trainer.rollouts.outcomes import Tally
from rolltap.trainer.rollouts.queue import Phase
from rolltap.trainer.rollouts.resume import Group, place_of
from rolltap.trainer.rollouts.runner import OnEnd

logger = logging.getLogger(__name__)

SILENT_SECONDS = 60.0
"""Time without a report after which a node is given no more."""
LOST_SECONDS = 600.0
"""Time without a report after which a node is given up, and its sessions are run elsewhere."""
TICK_SECONDS = 1.0


@dataclass(slots=True)
class _Given:
    """A group that was submitted. `ended` are its sessions so far, all attempts."""

    group: Group
    how: Mapping[str, Any]
    deadline: float
    result: asyncio.Future[list[Session]]
    ended: list[Session] = field(default_factory=list)
    cancelled: bool = False


class FleetSchedule:
    """The methods of a `GroupRunner`, for the nodes of a fleet. An async context manager.

    A node that is lost, or whose worker has failed, costs its running sessions: they have the status `infrastructure`
    and are retried on other nodes. Nodes that join the cluster get groups too.

    Leaving the block raises `RecorderError` when no node is left, `UnreadableModelError` as a `GroupRunner`, and
    `OSError` when the run folder cannot be written.
    """

    def __init__(self, fleet: Fleet, advance: Advance, ended: OnEnd) -> None:
        self._fleet, self._advance, self._note = fleet, advance, ended
        self._placement = Placement()
        self._tally = Tally()
        self._groups: dict[str, _Given] = {}
        self._tasks = asyncio.TaskGroup()
        self._watching: set[asyncio.Task[None]] = set()
        self._over = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for member in list(self._fleet.members.values()):
            self._join(member)
        self._watch(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._groups:
                await asyncio.wait([given.result for given in self._groups.values()])
        except asyncio.CancelledError as error:
            kind, value, traceback = type(error), error, error.__traceback__
        self._over = True
        if self._groups:
            stops = [("cancel", name, "the rollout was stopped while it ran") for name in self._groups]
            asks = [self._fleet.ask(member, *stop) for member in self._fleet.members.values() for stop in stops]
            await asyncio.gather(*asks, return_exceptions=True)
        for task in self._watching:
            task.cancel()
        try:
            await self._tasks.__aexit__(kind, value, traceback)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            for given in self._groups.values():
                given.result.cancel()

    async def submit(
        self,
        group: Group,
        policy_version: str | None = None,
        *,
        priority: int = 0,
        seconds: float = math.inf,
        apart: bool = False,
    ) -> asyncio.Future[list[Session]]:
        """Take a group, as `GroupRunner.submit`."""
        how = {"policy_version": policy_version, "priority": priority, "apart": apart}
        result: asyncio.Future[list[Session]] = asyncio.get_running_loop().create_future()
        given = _Given(group, how, time.monotonic() + seconds, result)
        if self._over:
            result.cancel()
            return result
        self._groups[group.group_id] = given
        self._tally.total += len(group.session_ids)
        if group.session_ids:
            self._placement.submit(group.group_id, group.session_ids, evaluates=group.evaluates, priority=priority)
        self._end_if_over(given)
        asyncio.get_running_loop().call_soon(self._go_on)
        return result

    def cancel(self, name: str, why: str) -> None:
        """Stop a session or a group, by its id."""
        if (given := self._groups.get(name)) is not None:
            given.cancelled = True
            self._placement.drop(name)
            self._end_if_over(given)
        for member in list(self._fleet.members.values()):
            self._tasks.create_task(self._tell(member, "cancel", name, why))

    def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Stop the sessions that run and whose first call has a version that is `too_old`."""
        for member in self._fleet.members.values():
            for name, version in (member.report.running if member.report else {}).items():
                if too_old(version):
                    self.cancel(name, why)

    @property
    def counts(self) -> Mapping[Phase, int]:
        """Number of sessions in each phase, on all nodes."""
        counts: Counter[Phase] = Counter({"waiting": self._placement.waiting()})
        for each in self.nodes.values():
            counts.update(each)
        return counts

    @property
    def nodes(self) -> dict[str, Mapping[Phase, int]]:
        """Number of sessions in each phase, by node."""
        return {name: each.report.counts if each.report else {} for name, each in self._fleet.members.items()}

    @property
    def running(self) -> int:
        """Number of sessions that run."""
        return self.counts.get("running", 0)

    def _join(self, member: Member) -> None:
        self._placement.join(member.name, member.slots)
        self._watch(self._follow(member))

    def _watch(self, work: Any) -> None:
        task = self._tasks.create_task(work)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _follow(self, member: Member) -> None:
        """Take the reports of a node until it is lost."""
        report = member.report
        while report is not None:
            for session, judged in report.ended:
                self._placement.ended(member.name, session)
                self._end(session, judged)
            for name in report.closed:
                self._placement.closed(member.name, name)
                if name in self._groups:
                    self._end_if_over(self._groups[name])
            if report.failure is not None and report.package is None:
                error = report.failure.error()
                if isinstance(error, UnreadableModelError):
                    raise error
                return await self._lose(member, error)
            self._go_on()
            try:
                report = await self._fleet.next_report(member)
            except RolltapError as error:
                return await self._lose(member, error)

    async def _tick(self) -> None:
        """Look for new nodes, deadlines and silent nodes."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for name in self._fleet.newcomers():
                self._watch(self._greet(name))
            for member in list(self._fleet.members.values()):
                if member.report is not None and time.monotonic() - member.seen > LOST_SECONDS:
                    self._fleet.kill(member)  # the task that follows it loses it
            for given in list(self._groups.values()):
                if given.deadline <= time.monotonic():
                    self._placement.drop(given.group.group_id)
                    self._end_if_over(given)
            self._go_on()

    async def _greet(self, name: str) -> None:
        """Take a new node. It may build images first."""
        if await self._fleet.join(name, late=True) is None:
            self._join(self._fleet.members[name])

    async def _lose(self, member: Member, error: Exception) -> None:
        """Forget a node, and run elsewhere what had not ended there."""
        self._fleet.forget(member)
        pieces = self._placement.lost(member.name)
        await self._end_lost(str(error), [piece.group_id for piece in pieces])
        for piece in pieces:
            if (given := self._groups.get(piece.group_id)) is None:
                continue
            retries = self._fleet.setup.config.retries
            again = run_again(piece.session_ids, given.ended, given.group.session_ids, retries)
            if again and not given.cancelled:
                self._placement.again(piece, again)
            self._end_if_over(given)
        if not self._fleet.members:
            raise RecorderError(f"no node of the fleet is left; the last: {error}")
        self._go_on()

    async def _end_lost(self, why: str, groups: Sequence[str]) -> None:
        """End the sessions that no node holds and that began, and those of some groups that have rows."""
        held = {place_of(name) for piece in self._placement.pieces() for name in piece.session_ids}
        ended = await self._fleet.write("end_lost", held, why, groups)
        known = {each.session_id for name in groups if name in self._groups for each in self._groups[name].ended}
        for session in ended:
            if session.session_id not in known:
                self._end(session, 0.0)

    async def _give(self, name: str, group: Group, how: Mapping[str, Any]) -> None:
        if (member := self._fleet.members.get(name)) is not None:
            await self._tell(member, "give", group, self._fleet.policy(), how)

    async def _tell(self, member: Member, method: str, *arguments: Any) -> None:
        try:
            await self._fleet.ask(member, method, *arguments)
        except RolltapError as error:
            logger.warning("%s", error)
            self._fleet.kill(member)  # the task that follows it loses it, after the rows that it had sent

    def _go_on(self) -> None:
        if self._over:
            return
        now = time.monotonic()
        silent = [name for name, member in self._fleet.members.items() if now - member.seen > SILENT_SECONDS]
        for name, piece in self._placement.advance(silent):
            given = self._groups[piece.group_id]
            group = replace(given.group, session_ids=piece.session_ids)
            self._tasks.create_task(self._give(name, group, {**given.how, "seconds": given.deadline - now}))
        nodes = f"{self.running} running on {len(self._fleet.members)} nodes"
        self._advance(f"{self._tally.line()}; {nodes}", self._tally.done, self._tally.total)

    def _end(self, session: Session, judged: float) -> None:
        """Note a session of a group of this schedule, which has its row."""
        if (given := self._groups.get(session.group_id or "")) is not None:
            given.ended.append(session)
            self._note(session, judged)

    def _end_if_over(self, given: _Given) -> None:
        """End a group of which nothing waits or runs."""
        name = given.group.group_id
        if self._placement.pieces(name) or given.result.done():
            return
        del self._groups[name]
        for session in {place_of(each.session_id): each for each in given.ended}.values():
            self._tally.add(session, None, again=False)
        given.result.set_result(given.ended)
