"""Rollouts beside the trainer's steps: groups of sessions run in a thread, and a step takes those that are complete.

Groups have numbers: group `n` is of step `n // groups_per_step`, by the order of the tasks. They start in this order,
as many as may start, and a step takes the oldest complete ones. The run folder has all that is known of them: after a
restart the groups that were not taken go on, with the sessions that have ended.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import Session
from rolltap.trainer.console import Advance
from rolltap.trainer.rollouts.resume import Group, place_of
from rolltap.trainer.rollouts.schedule import Evaluation, Schedule

T = TypeVar("T")


@dataclass(slots=True)
class Flow:
    """Groups that run, are complete, and are taken: how many may start. A state machine without I/O.

    Those that have been started for a step before it is trained are `(ahead + step + 1) * size`, of `size` groups a
    step: so the weights that sample a group are at most `ahead` steps older than those that it trains, if groups are
    taken in the order of their starts (AReaL, arXiv 2505.24298, section 5).

    Attributes:
        steps: Number of the training's steps.
        is_over: True for the number of a group that an earlier attempt has trained or dropped.
        step: Number of steps that are trained.
    """

    ahead: int
    size: int
    steps: int
    is_over: Callable[[int], bool]
    step: int = 0
    _next: int = 0
    _kept: int = 0
    """Groups that were taken for the next step."""
    _running: set[int] = field(default_factory=set)
    _complete: dict[int, list[Session]] = field(default_factory=dict)

    def start(self) -> list[int]:
        """Return the groups that start now."""
        most = min(self.ahead + self.step + 1, self.steps) * self.size
        accepted = self.step * self.size + self._kept + len(self._complete)
        started = []
        while accepted + len(self._running) < most:
            if not self.is_over(self._next):
                self._running.add(self._next)
                started.append(self._next)
            self._next += 1
        return started

    def end(self, number: int, sessions: list[Session]) -> None:
        """Note that a group is complete, with these sessions."""
        self._running.remove(number)
        self._complete[number] = sessions

    def take(self) -> list[Session] | None:
        """Return the sessions of the oldest complete group, for the next step; None when none is complete."""
        if not self._complete:
            return None
        self._kept += 1
        return self._complete.pop(min(self._complete))

    def give_up(self) -> None:
        """Note that a group which was taken counts for no step: another one may start in its place."""
        self._kept -= 1

    def publish(self, step: int) -> None:
        """Note that so many steps are trained."""
        self.step, self._kept = step, 0


class Ahead:
    """A schedule in a thread with an event loop of its own. A context manager: it stops the sessions that still run.

    Methods are for one other thread. They raise what the schedule raises, then and at every later call.

    `open_schedule` gets what shows the progress; `group_of` returns the group of a number, and `finished` its sessions
    that need not be run: id -> session.
    """

    def __init__(
        self,
        flow: Flow,
        open_schedule: Callable[[Advance], Schedule],
        *,
        group_of: Callable[[int], Group],
        finished: Callable[[Group], Mapping[str, Session]],
        show: Advance,
    ) -> None:
        self._flow, self._open = flow, open_schedule
        self._group_of, self._finished, self._show = group_of, finished, show
        self._begun: Future[Any] = Future()
        self._ended: Future[Any] = Future()
        self._evaluated: Sequence[asyncio.Future[list[Session]]] = ()
        self._idle, self._since, self._is_idle = 0.0, time.monotonic(), True

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._work, name="rolltap-ahead", daemon=True)
        self._thread.start()
        wait([self._begun, self._ended], return_when=FIRST_COMPLETED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._ended.done():
            with suppress(RuntimeError):  # the loop has just ended
                self._begun.result().call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def publish(self, step: int) -> None:
        """Let groups start with published weights. `step` is the number of steps that are trained."""

        async def publish() -> None:
            self._flow.publish(step)
            await self._start()

        self._call(publish())

    def take(self) -> list[Session]:
        """Wait for the oldest complete group, and return its sessions. Those that never began are not among them."""

        async def take() -> list[Session]:
            while (taken := self._flow.take()) is None:
                self._changed.clear()
                await self._changed.wait()
            return taken

        return self._call(take())

    def give_up(self) -> None:
        """Let another group start in place of one that was taken and counts for no step."""

        async def give_up() -> None:
            self._flow.give_up()
            await self._start()

        self._call(give_up())

    def evaluate(self, evaluation: Evaluation) -> None:
        """Run the groups of an evaluation beside the others."""

        async def submit() -> None:
            stage, groups = evaluation.stage, evaluation.groups
            self._evaluated = [await self._schedule.submit(each, stage=stage, evaluates=True) for each in groups]

        self._call(submit())

    def end_evaluation(self) -> None:
        """Wait for the end of the sessions that `evaluate` began."""

        async def end() -> None:
            for result in self._evaluated:
                await result

        self._call(end())

    def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Stop the sessions that run and began with a version that is `too_old`."""

        async def cancel() -> None:
            self._schedule.cancel_running(too_old, why)

        self._call(cancel())

    def idle_seconds(self) -> float:
        """Return the seconds in which no session ran, since the last call."""

        async def read() -> float:
            self._note_idle()
            idle, self._idle = self._idle, 0.0
            return idle

        return self._call(read())

    def _work(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    async def _run(self) -> None:
        self._changed = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        async with self._open(self._advance) as self._schedule:
            self._begun.set_result(asyncio.get_running_loop())
            await asyncio.Event().wait()  # until it is cancelled

    def _call(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a coroutine in the loop and return its result."""
        called: Future[T] | None = None
        with suppress(RuntimeError):  # the loop has just ended
            if not self._ended.done():
                called = asyncio.run_coroutine_threadsafe(coroutine, self._begun.result())
        while called and not called.done() and not self._ended.done():
            wait([called, self._ended], timeout=1, return_when=FIRST_COMPLETED)  # interrupts are handled in between
        if called and called.done() and not called.cancelled():
            return called.result()
        coroutine.close()
        raise self._ended.exception() or RolltapError("the rollouts have ended")

    async def _start(self) -> None:
        for number in self._flow.start():
            group = self._group_of(number)
            found = dict(self._finished(group))
            missing = replace(group, session_ids=[name for name in group.session_ids if name not in found])
            result = await self._schedule.submit(missing)
            result.add_done_callback(partial(self._end, number, group, found))

    def _end(self, number: int, group: Group, found: dict[str, Session], done: asyncio.Future[list[Session]]) -> None:
        if done.cancelled():
            return  # the schedule has ended
        sessions = found | {place_of(session.session_id): session for session in done.result()}
        self._flow.end(number, [sessions[name] for name in group.session_ids if name in sessions])
        self._changed.set()

    def _advance(self, what: str, done: int, total: int) -> None:
        self._note_idle()
        self._show(what, done, total)

    def _note_idle(self) -> None:
        now = time.monotonic()
        self._idle += now - self._since if self._is_idle else 0.0
        self._since, self._is_idle = now, not self._schedule.running
