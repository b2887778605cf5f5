"""Runs groups of sessions on nodes beside each other, as the queue says. Sessions are retried and
cancelled."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Self

from rolltap.addons.errors import RecorderError, RolltapError, UnreadableModelError
from rolltap.addons.store.records import Session
from rolltap.trainer.console import Advance
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.node import EnteredPhase, Node, SessionAttempt
from rolltap.trainer.rollouts.outcomes import Failures, Tally
from rolltap.trainer.rollouts.queue import Action, Phase, SessionQueue
from rolltap.trainer.rollouts.resume import NOT_RUN, Group
from rolltap.trainer.traces.facts import Facts

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Pause before the first retry of a session. Each one after it is twice as long."""

OnEnd = Callable[[Session, float], None]
"""Gets a session that has a row, and the seconds for which it was judged."""
OnLost = Callable[[Node, Exception], None]
"""Gets a node that runs no further session, and the error."""


@dataclass(slots=True)
class _SubmittedGroup:
    group: Group
    policy_version: str | None
    deadline: float
    apart: bool
    result: asyncio.Future[list[Session]]
    failures: Failures = field(default_factory=Failures)
    ended: list[Session] = field(default_factory=list)
    """Its sessions so far, in the order in which they ended."""
    done: int = 0
    """Number of those that are not retried."""
    running: dict[str, SessionAttempt] = field(default_factory=dict)
    submitted_at: float = field(default_factory=time.monotonic)
    begun_at: dict[str, float] = field(default_factory=dict)
    """First attempt of a session -> the time at which it began."""


@dataclass(slots=True)
class _RunningSession:
    """An attempt that is on a node."""

    attempt: SessionAttempt
    node: Node
    task: asyncio.Task[None]
    begun: bool = False
    """True when its task has made its first step."""
    slot: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has the slot that it waits for."""

    def stop(self) -> None:
        """Stop the attempt. Before its first step nothing is to be done: it is unwanted then."""
        if self.begun:
            self.task.cancel()


class GroupRunner:
    """Sessions of groups that run beside each other on nodes. An async context manager.

    A session with the status `infrastructure` is retried, under the id of the next attempt, unless
    its task cannot be run at all. So is a session that ran on a node that is lost, or lost it by
    its own error. One that had not begun to run waits for another node, with its retries. Nodes may
    be added and removed at any time; without one, sessions wait, and deadlines and cancellations
    act.

    A node is lost when it raises an error, and after `give_up_after` consecutive infrastructure
    failures on it. `lost` is told of it. Without `lost` the block is cancelled when the last node
    is lost, and leaving it raises the node's error: `RecorderError` above all, and `OSError` when
    the run folder cannot be written. Leaving also raises `UnreadableModelError` after a call with
    tools of a model whose tool calls cannot be read. Sessions that still run are stopped then, and
    have rows.

    `ended` is called when a session has ended, each attempt of it, before the group's result is
    known. `silent` returns the engines that do not answer.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        advance: Advance,
        *,
        retries: int,
        give_up_after: int,
        ended: OnEnd = lambda *_: None,
        lost: OnLost | None = None,
        silent: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._queue = SessionQueue(retries, PAUSE_SECONDS)
        self._give_up_after = give_up_after
        self._advance = advance
        self._ended = ended
        self._lost = lost
        self._silent = silent
        self._tally = Tally(self._queue.counts)
        self._tasks_seen: set[str] = set()
        self._nodes: dict[str, Node] = {}
        self._failures: dict[str, Failures] = {}
        """Node -> its infrastructure failures in a row."""
        self._groups: dict[str, _SubmittedGroup] = {}
        self._running: dict[str, _RunningSession] = {}
        self._named: set[str] = set()
        """Tasks that cannot be run, and were named."""
        self._tasks = asyncio.TaskGroup()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()
        """Set when a group has ended."""
        self._over = False
        """True when no session may start any more."""
        for node in nodes:
            self.add_node(node)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            while kind is None and self._groups:  # one that waits for its retry has no task
                self._closed.clear()
                await self._closed.wait()
        except asyncio.CancelledError as error:
            kind = type(error)
            value = error
            traceback = error.__traceback__
        self._over = True
        try:
            await self._tasks.__aexit__(kind, value, traceback)
        except ExceptionGroup as failures:
            # the first failure cancelled the other sessions; errors that came with it are in
            # `__cause__`
            raise failures.exceptions[0] from failures
        finally:
            for group in self._groups.values():
                group.result.cancel()
            if self._timer is not None:
                self._timer.cancel()

    def add_node(self, node: Node) -> None:
        """Run sessions on a node from now on."""
        self._nodes[node.name] = node
        self._failures[node.name] = Failures(self._tasks_seen)
        self._queue.add_node(node.name, node.slots)
        self._go_on_soon()

    def remove_node(self, node: Node, why: Exception) -> None:
        """Stop the sessions of a node, which are retried on others, and run none there any more."""
        if self._over or self._is_lost(node):
            return
        del self._nodes[node.name]
        self._queue.remove_node(node.name)
        for running in self._running.values():
            if running.node is node:
                running.attempt.why_stopped = str(why)
                running.stop()
        if self._lost is not None:
            self._lost(node, why)
        elif not self._nodes and not self._over:
            self._tasks.create_task(self._fail(why))
        self._go_on_soon()

    def rest_node(self, name: str, rests: bool) -> None:
        """Give a node no further groups while it rests."""
        self._queue.rest_node(name, rests)
        self._go_on_soon()

    async def submit(
        self,
        group: Group,
        policy_version: str | None = None,
        *,
        priority: int = 0,
        seconds: float = math.inf,
        apart: bool = False,
        retries_used: Mapping[str, int] = MappingProxyType({}),
    ) -> asyncio.Future[list[Session]]:
        """Take a group. The result is the list of its sessions, all attempts, in the order in which
        they ended.

        The result is cancelled when the block fails, or has failed. Groups of a higher priority go
        first. Sessions that have not ended after so many `seconds` are stopped. A group that is
        `apart` is somebody's of whom the others know nothing: its infrastructure failures stop it
        alone, unless an engine does not answer. `retries_used` is session -> the retries that
        it has used before.

        `policy_version` is the version of sessions without a sampled token: see `SessionAttempt`.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[Session]] = loop.create_future()
        if self._over:
            result.cancel()
            return result
        deadline = time.monotonic() + seconds
        self._queue.submit(
            group.group_id,
            group.session_ids,
            deadline=deadline,
            evaluates=group.evaluates,
            priority=priority,
            retries_used=retries_used,
        )
        submitted = _SubmittedGroup(group, policy_version, deadline, apart, result)
        self._groups[group.group_id] = submitted
        if group.session_ids:
            self._tally.total += len(group.session_ids)
            self._tasks_seen.add(group.task.id)
        self._go_on_soon()
        return result

    def cancel(self, name: str, why: str) -> None:
        """Stop a session or a group, by its id. A session that runs gets the status `cancelled`."""
        attempts: list[SessionAttempt] = []
        if name in self._groups:
            attempts += self._groups[name].running.values()
        elif name in self._running:
            attempts.append(self._running[name].attempt)
        for attempt in attempts:
            attempt.why_stopped = why
        self._queue.cancel(name)
        self._go_on()

    def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Stop the sessions that run and whose first call has a version that is `too_old`."""
        for session_id, version in self.running_versions().items():
            if too_old(version):
                self.cancel(session_id, why)

    def running_versions(self) -> dict[str, str]:
        """Return session -> version of its first call, for each that runs and has recorded one."""
        versions = {}
        for session_id, running in self._running.items():
            if self._queue.is_running(session_id):
                version = running.node.first_version(session_id)
                if version is not None:
                    versions[session_id] = version
        return versions

    @property
    def counts(self) -> Mapping[Phase, int]:
        """Number of sessions in each phase."""
        return self._queue.counts

    @property
    def nodes(self) -> Mapping[str, Mapping[Phase, int]]:
        """Node, this process aside -> number of its sessions in each phase."""
        return {name: self._queue.node_counts(name) for name in self._nodes if name}

    @property
    def running(self) -> int:
        """Number of sessions that run."""
        return self._queue.counts["running"]

    def _go_on_soon(self) -> None:
        """Go on after the events of this moment: groups that come together share the slots from the
        start."""
        with suppress(RuntimeError):  # the constructor may be called outside of a loop
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Do what the queue says, and come back when it says so."""
        if self._over:
            return
        for action in self._queue.advance(time.monotonic()):
            self._do(action)
        line = self._tally.line()
        if len(self._nodes) > 1:
            line += f"; {self.running} running on {len(self._nodes)} nodes"
        self._advance(line, self._tally.done, self._tally.total)
        if self._timer is not None:
            self._timer.cancel()
        due = self._queue.due()
        if due is not None:
            seconds = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _do(self, action: Action) -> None:
        if action.kind == "close":
            self._close(action.group_id)
            return
        group = self._groups[action.group_id]
        if action.kind == "prepare":
            self._start(group, action.session_id, self._nodes[action.node])
        elif action.kind == "stop":
            running = self._running[action.session_id]
            if time.monotonic() >= group.deadline:
                running.attempt.why_stopped = "the deadline of its group had passed"
            running.stop()
        else:
            self._running[action.session_id].slot.set()

    def _close(self, group_id: str) -> None:
        submitted = self._groups.pop(group_id)
        self._closed.set()
        self._tally.total -= len(submitted.group.session_ids) - submitted.done
        if not submitted.result.done():
            submitted.result.set_result(submitted.ended)

    def _start(self, submitted: _SubmittedGroup, session_id: str, node: Node) -> None:
        attempt = SessionAttempt(session_id, submitted.group, submitted.policy_version)
        now = time.monotonic()
        begun_at = submitted.begun_at.setdefault(SessionName.parse(session_id).place, now)
        if begun_at == now:
            attempt.queued_seconds = now - submitted.submitted_at
        else:
            attempt.retried_seconds = now - begun_at
        submitted.running[session_id] = attempt
        task = self._tasks.create_task(self._run(attempt, submitted, node))
        self._running[session_id] = _RunningSession(attempt, node, task)

    async def _run(self, attempt: SessionAttempt, submitted: _SubmittedGroup, node: Node) -> None:
        session_id = attempt.session_id
        running = self._running[session_id]
        running.begun = True
        judged_from = math.inf

        async def enter(phase: EnteredPhase) -> None:
            nonlocal judged_from
            running.slot = asyncio.Event()
            if phase == "running":
                self._queue.prepared(session_id)
            else:
                self._queue.ran(session_id)
            self._go_on()
            await running.slot.wait()
            if phase == "judging":
                judged_from = time.monotonic()

        facts: Facts | None = None
        failure: Exception | None = None
        try:
            if not self._is_unwanted(session_id, node):
                facts = await node.run(attempt, enter)
            if facts is not None and facts.unreadable is not None:
                raise UnreadableModelError(facts.unreadable)
        except asyncio.CancelledError:
            if self._over or not self._is_unwanted(session_id, node):
                raise
        except UnreadableModelError:
            self._over = True
            raise
        except (RolltapError, OSError) as error:
            failure = error
        except BaseException:
            self._over = True
            raise
        finally:
            del self._running[session_id]
            del submitted.running[session_id]
            if attempt.row is not None:
                submitted.ended.append(attempt.row)
                self._ended(attempt.row, max(0.0, time.monotonic() - judged_from))
        if failure is not None:
            self.remove_node(node, failure)
        self._note_end(submitted, attempt, node, facts, failure)
        if facts is not None:
            await self._consider_giving_up(submitted, attempt, node)
        self._go_on()

    def _is_unwanted(self, session_id: str, node: Node) -> bool:
        return self._is_lost(node) or self._queue.is_stopped(session_id)

    def _is_lost(self, node: Node) -> bool:
        return self._nodes.get(node.name) is not node

    def _note_end(
        self,
        submitted: _SubmittedGroup,
        attempt: SessionAttempt,
        node: Node,
        facts: Facts | None,
        failure: Exception | None = None,
    ) -> None:
        """Count a session that has ended, and let the queue retry it if it says nothing of the
        policy.

        `failure` is the error for which its node is lost, if it was raised for this session.
        """
        row = attempt.row
        not_begun = row is None and failure is None and self._is_lost(node)
        if not_begun and self._queue.requeue(attempt.session_id):
            return
        if facts is None:
            again = self._is_lost(node) and (row is None or row.status in NOT_RUN)
        else:
            again = row is not None and row.status == "infrastructure" and not facts.permanent
        further = self._queue.ended(attempt.session_id, time.monotonic(), again=again)
        if row is None:
            return
        self._tally.add(row, facts, again=further is not None)
        submitted.done += further is None
        if facts is None:
            return
        submitted.failures.add(row, facts)
        if not self._is_lost(node):
            self._failures[node.name].add(row, facts)
        if facts.permanent and row.task_id not in self._named:
            self._named.add(row.task_id)
            logger.warning("no session of task %s can be run: %s", row.task_id, row.error)

    async def _consider_giving_up(
        self, submitted: _SubmittedGroup, attempt: SessionAttempt, node: Node
    ) -> None:
        """Give up the node after too many failures, or the group alone whose failures they are."""
        error = "" if attempt.row is None else attempt.row.error
        last = f"consecutive infrastructure failures; the last, {attempt.session_id}: {error}"
        if submitted.apart and submitted.failures.in_a_row >= self._give_up_after:
            why = f"its group was given up after {submitted.failures.in_a_row} {last}"
            self.cancel(submitted.group.group_id, why)
        if self._is_lost(node):
            return
        failures = self._failures[node.name].in_a_row
        if failures < self._give_up_after:
            return
        if submitted.apart and not await asyncio.to_thread(self._silent):
            return
        fix = "Fix the cause and start again: sessions that have ended are used again"
        self.remove_node(node, RecorderError(f"gave up after {failures} {last}. {fix}"))

    async def _fail(self, why: Exception) -> None:
        self._over = True
        raise why
