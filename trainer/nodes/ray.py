"""A node whose sessions run in an actor on a machine of a Ray cluster: the driver's side."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import Session
from rolltap.trainer.concurrency import wait_for_end
from rolltap.trainer.nodes.fleet import LOST_SECONDS, Fleet, Member
from rolltap.trainer.nodes.messages import EndedAttempt, Report
from rolltap.trainer.rollouts.node import Enter, EnteredPhase, NodeLostError, SessionAttempt
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.traces.facts import Facts

logger = logging.getLogger(__name__)


_News = EnteredPhase | EndedAttempt | Exception


@dataclass(slots=True)
class _AwaitedSession:
    """An attempt in the actor. `news` tells the phases that it asks for, its end, or an error."""

    attempt: SessionAttempt
    has_ended: bool = False
    """True when its end was told."""
    news: asyncio.Queue[_News] = field(default_factory=asyncio.Queue)


class RayNode:
    """A member of a fleet, as a node of one runner. `follow` runs beside its sessions."""

    def __init__(self, fleet: Fleet, member: Member, slots: Slots) -> None:
        self.name = member.name
        self.slots = slots
        self.member = member
        self._fleet = fleet
        self._running: dict[int, _AwaitedSession] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: Exception | None = None
        """Why the node is lost."""

    async def run(self, attempt: SessionAttempt, enter: Enter) -> Facts:
        """Run a session there until its row is in the run folder: see `Node`."""
        if self._error is not None:
            raise self._lost()
        number = next(self.member.attempts)
        running = _AwaitedSession(attempt)
        self._running[number] = running
        self._idle.clear()
        try:
            return await self._run(number, running, enter)
        except asyncio.CancelledError:
            await wait_for_end(asyncio.create_task(self._stop(number, running)))
            raise
        finally:
            del self._running[number]
            if not self._running:
                self._idle.set()

    def first_version(self, session_id: str) -> str | None:
        """Return the version of the weights of a session's first call, when the run has it."""
        return self._fleet.first_version(session_id)

    async def wait_until_idle(self) -> None:
        """Wait until no session runs there."""
        await self._idle.wait()

    async def follow(self) -> Exception:
        """Take the node's reports until it is lost, and return why."""
        error: Exception
        try:
            while True:
                report = await self._fleet.next_report(self.member)
                self._tell(report)
                if report.is_over:
                    error = _why_over(report, self.name)
                    break
        except Exception as failure:  # of any kind: without a follower no session ends
            error = failure
        await self._lose(error)
        return error

    async def _run(self, number: int, running: _AwaitedSession, enter: Enter) -> Facts:
        attempt = running.attempt
        forked = None
        if attempt.group.fork is not None:
            forked = await asyncio.to_thread(self._fleet.forked_calls, attempt.group.fork)
        policies = self._fleet.policies()
        begun = asyncio.create_task(self._ask("begin", number, attempt, policies, forked))
        if await wait_for_end(begun):  # its cancellation must not come before it
            raise asyncio.CancelledError from begun.exception()
        begun.result()
        while True:
            news = await running.news.get()
            if isinstance(news, Exception):
                raise news
            if not isinstance(news, EndedAttempt):
                await enter(news)
                await self._ask("grant", number, news)
                continue
            attempt.row = news.row
            if news.facts is not None:
                return news.facts
            # the actor stopped it, because it can run no further session: `follow` says why

    async def _stop(self, number: int, running: _AwaitedSession) -> None:
        """Stop a session, and wait for its row. A node that does not stop it is ended."""
        await self._ask("cancel", number, running.attempt.why_stopped)
        try:
            async with asyncio.timeout(LOST_SECONDS):
                await _wait_for_end(running)
        except TimeoutError:
            name = running.attempt.session_id
            logger.warning("node %s does not stop the session %s", self.name, name)
            self._fleet.kill(self.member)
            await _wait_for_end(running)

    async def _ask(self, method: str, *arguments: Any) -> None:
        """Tell the actor something. If it fails, the actor is ended, which `follow` will see."""
        if self._error is not None:
            return
        try:
            async with asyncio.timeout(LOST_SECONDS):
                await self._fleet.ask(self.member, method, *arguments)
        except TimeoutError:
            why = f"did not answer {method!r} within {LOST_SECONDS:g} s"
            logger.warning("node %s %s and is ended", self.name, why)
            self._fleet.kill(self.member)
        except RolltapError as error:
            logger.warning("node %s refused %r and is ended: %s", self.name, method, error)
            self._fleet.kill(self.member)

    def _tell(self, report: Report) -> None:
        for number, phase in report.phases:
            if number in self._running:
                self._running[number].news.put_nowait(phase)
        for ended in report.ended:
            if ended.number in self._running:
                running = self._running[ended.number]
                running.has_ended = True
                running.news.put_nowait(ended)

    async def _lose(self, error: Exception) -> None:
        """Forget the member, and tell its sessions so, after the row of each that has one."""
        ends: dict[str, tuple[Session, Facts | None]] = {}
        sessions = []
        for running in self._running.values():
            if not running.has_ended:
                sessions.append(running.attempt.session_id)
        try:
            lost = await self._fleet.forget(self.member, str(error), sessions)
        except Exception as failure:
            error = failure
        else:
            for row in lost.ended:
                ends[row.session_id] = (row, Facts())
            for row in lost.running:
                ends[row.session_id] = (row, None)
        self._error = error
        for number, running in self._running.items():
            end = ends.get(running.attempt.session_id)
            if end is not None:
                running.news.put_nowait(EndedAttempt(number, *end))
            running.news.put_nowait(self._lost())

    def _lost(self) -> Exception:
        """Return an error of a session that the node takes with it."""
        if isinstance(self._error, OSError):  # of the run folder
            return OSError(str(self._error))
        return NodeLostError(str(self._error))


async def _wait_for_end(running: _AwaitedSession) -> None:
    """Wait until the actor tells the end of an attempt, or is lost."""
    news = await running.news.get()
    while not isinstance(news, EndedAttempt | Exception):
        news = await running.news.get()
    if isinstance(news, EndedAttempt):
        running.attempt.row = news.row


def _why_over(report: Report, name: str) -> Exception:
    if report.failure is None:
        return NodeLostError(f"node {name} was closed")
    return report.failure.error()
