"""Rollouts beside the trainer's steps: groups of sessions run in a thread, and a step takes those that are complete.

Groups have numbers: group `n` is of step `n // groups_per_step`, by the order of the tasks. They start in this order,
as many as may start, and a step takes the oldest complete ones. The run folder has all that is known of them: after a
restart the groups that were not taken go on, with the sessions that have ended.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import islice
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import Session
from rolltap.trainer.console import Advance
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.schedule import Evaluation, GroupSchedule
from rolltap.trainer.service.remote import RemoteSchedule
from rolltap.trainer.training.steps import placed

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Flow:
    """Numbers of the groups that may start: at most `(ahead + step + 1) * size`, of `size` groups a step.

    So the weights that sample a group are at most `ahead` steps older than those that it trains, if groups are taken in
    the order of their starts (AReaL, arXiv 2505.24298, section 5).

    Attributes:
        numbers: Those of the groups that no earlier attempt has trained or dropped, in their order.
        step: Number of steps that are trained.
        begun: Number of the groups of these steps, and of those that were started for others. One that counts for no
            step is taken off: another one may start in its place.
    """

    ahead: int
    size: int
    steps: int
    numbers: Iterator[int]
    step: int = 0
    begun: int = 0

    def start(self) -> list[int]:
        """Return the groups that start now."""
        most = min(self.ahead + self.step + 1, self.steps) * self.size
        started = list(islice(self.numbers, max(0, most - self.begun)))
        self.begun += len(started)
        return started


def _in_loop(
    method: Callable[Concatenate["Ahead", P], Coroutine[None, None, T]],
) -> Callable[Concatenate["Ahead", P], T]:
    """Let another thread call an async method, and wait for its result."""

    @wraps(method)
    def call(ahead: "Ahead", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return ahead._call(method(ahead, *args, **kwargs))

    return call


class Ahead:
    """A schedule in a thread with an event loop of its own. A context manager: it stops the sessions that still run.

    Methods are for one other thread. They raise what the schedule raises, then and at every later call.

    `open_schedule` gets what shows the progress; `group_of` returns the group of a number, and `finished` its sessions
    that need not be run: id -> session.
    """

    def __init__(
        self,
        flow: Flow,
        open_schedule: Callable[[Advance], GroupSchedule | RemoteSchedule],
        *,
        group_of: Callable[[int], Group],
        finished: Callable[[Group], Mapping[str, Session]],
        show: Advance,
    ) -> None:
        self._flow, self._open = flow, open_schedule
        self._group_of, self._finished, self._show = group_of, finished, show
        self._begun: Future[Any] = Future()
        self._complete = asyncio.PriorityQueue[tuple[int, list[Session]]]()
        """Numbers and sessions of complete groups."""
        self._evaluated: Sequence[asyncio.Future[list[Session]]] = ()
        self._idle, self._since, self._is_idle = 0.0, time.monotonic(), True

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "rolltap-ahead")
        self._ended: Future[Any] = self._thread.submit(asyncio.run, self._run())
        wait([self._begun, self._ended], return_when=FIRST_COMPLETED)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            if self._begun.done():
                self._begun.result().call_soon_threadsafe(self._leaving.set)
        self._thread.shutdown()

    @_in_loop
    async def publish(self, step: int) -> None:
        """Let groups start with published weights. `step` is the number of steps that are trained."""
        self._flow.step = step
        await self._start()

    @_in_loop
    async def take(self) -> list[Session]:
        """Wait for the oldest complete group, and return its sessions. Those that never began are not among them."""
        _, sessions = await self._complete.get()
        return sessions

    @_in_loop
    async def give_up(self) -> None:
        """Let another group start in place of one that was taken and counts for no step."""
        self._flow.begun -= 1
        await self._start()

    @_in_loop
    async def evaluate(self, evaluation: Evaluation) -> None:
        """Run the groups of an evaluation beside the others."""
        stage, groups = evaluation.stage, evaluation.groups
        self._evaluated = [await self._schedule.submit(each, stage=stage, evaluates=True) for each in groups]

    @_in_loop
    async def end_evaluation(self) -> None:
        """Wait for the end of the sessions that `evaluate` began."""
        for result in self._evaluated:
            await result

    @_in_loop
    async def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Stop the sessions that run and whose first call has a version that is `too_old`."""
        self._schedule.cancel_running(too_old, why)

    @_in_loop
    async def idle_seconds(self) -> float:
        """Return the seconds in which no session ran, since the last call."""
        self._note_idle()
        idle, self._idle = self._idle, 0.0
        return idle

    async def _run(self) -> None:
        self._leaving = asyncio.Event()
        with suppress(asyncio.CancelledError):
            async with self._open(self._advance) as self._schedule:
                self._begun.set_result(asyncio.get_running_loop())
                await self._leaving.wait()
                raise asyncio.CancelledError  # without it the schedule would wait for its sessions

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
        sessions = found | placed(group, done.result())
        self._complete.put_nowait((number, [sessions[name] for name in group.session_ids if name in sessions]))

    def _advance(self, what: str, done: int, total: int) -> None:
        self._note_idle()
        self._show(what, done, total)

    def _note_idle(self) -> None:
        now = time.monotonic()
        self._idle += now - self._since if self._is_idle else 0.0
        self._since, self._is_idle = now, not self._schedule.running
