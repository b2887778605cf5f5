"""Rollouts beside the trainer's steps: groups of sessions run in a thread, and a step takes the
complete ones.

Groups have numbers: group `n` is of step `n // groups_per_step`, by the order of the tasks. They
start in this order, as many as may start, and a step takes the oldest complete ones. A bound of 0
makes a step wait for groups that its own weights sample. Forks have the number of the group that
they fork. A step takes one complete group more for each group that it forks: the forks, if they are
the oldest that are complete, or another. The run folder has all that is known of groups: after a
restart those that were not taken go on, with the sessions that have ended.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import islice
from typing import Any, NamedTuple, Self, TypeVar

from rolltap.addons.errors import RolltapError
from rolltap.addons.store.records import Session
from rolltap.trainer.console import Advance
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.training.steps import placed

T = TypeVar("T")


@dataclass(slots=True)
class StalenessBound:
    """The groups that may start, of `size` groups a step: at most `(max_staleness + step + 1) *
    size`, and their forks.

    So the weights that sample a group are at most `max_staleness` steps older than those that it
    trains, if groups are taken in the order of their starts (AReaL, arXiv 2505.24298, section 5).

    Attributes:
        groups: Number and group of those that no earlier attempt has trained or dropped, in their
            order. The forks of trained groups are among them.
        step: Number of steps that are trained.
        begun: Number of the groups of these steps, and of those that were started for others.
    """

    max_staleness: int
    size: int
    steps: int
    groups: Iterator[tuple[int, Group]]
    step: int = 0
    begun: int = 0

    def take(self) -> list[tuple[int, Group]]:
        """Return the groups that start now."""
        steps = min(self.max_staleness + self.step + 1, self.steps)
        started = list(islice(self.groups, max(0, steps * self.size - self.begun)))
        self.begun += len(started)
        return started

    def replace(self) -> None:
        """Let another group start in place of one that counts for no step."""
        self.begun -= 1


class CompleteGroup(NamedTuple):
    """A group whose sessions have ended. Groups are ordered by number; a fork comes after its
    group."""

    number: int
    is_fork: bool
    group: Group
    sessions: list[Session]
    """In the order of the group's ids. Sessions that never began are not among them."""


def _in_loop(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    """Let another thread call an async method, and wait for its result."""

    @wraps(method)
    def call(rollouts: "AsyncRollouts", *args: Any) -> T:
        return rollouts._call(method(rollouts, *args))

    return call


class AsyncRollouts:
    """A runner in a thread with an event loop of its own. A context manager: it stops the sessions
    that still run.

    Methods are for one other thread. They raise what the runner raises, then and at every later
    call.

    `open_runner` gets a callback for the progress; `finished` returns the sessions of a group that
    need not be run: id -> session.
    """

    def __init__(
        self,
        bound: StalenessBound,
        open_runner: Callable[[Advance], AbstractAsyncContextManager[GroupRunner]],
        *,
        finished: Callable[[Group], Mapping[str, Session]],
    ) -> None:
        self._bound = bound
        self._open = open_runner
        self._finished = finished
        self._show: Advance = lambda *_: None
        self._progress = ("", 0, 0)
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self._complete = asyncio.PriorityQueue[CompleteGroup]()
        self._evaluated: list[asyncio.Future[list[Session]]] = []
        self._idle = 0.0
        self._since = time.monotonic()
        self._is_idle = True

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "rolltap-rollouts")
        self._ended: Future[Any] = self._thread.submit(asyncio.run, self._run())
        wait([self._begun, self._ended], return_when=FIRST_COMPLETED)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            if self._begun.done():
                self._begun.result().call_soon_threadsafe(self._leaving.set)
        self._thread.shutdown()

    def show(self, advance: Advance) -> None:
        """Show the progress by `advance` from now on."""
        self._show = advance
        advance(*self._progress)

    @_in_loop
    async def publish(self, step: int) -> None:
        """Let groups start with published weights. `step` is the number of steps that are
        trained."""
        self._bound.step = step
        await self._start()

    @_in_loop
    async def take(self) -> CompleteGroup:
        """Wait for the oldest complete group, and return it."""
        return await self._complete.get()

    @_in_loop
    async def replace(self) -> None:
        """Let another group start in place of one that was taken and counts for no step."""
        self._bound.replace()
        await self._start()

    @_in_loop
    async def submit(self, number: int, group: Group) -> None:
        """Start a group of forks, with the number of the group that is forked."""
        await self._submit(number, group)

    @_in_loop
    async def evaluate(self, groups: Sequence[Group]) -> None:
        """Start the groups of an evaluation beside the others."""
        for group in groups:
            result = await self._runner.submit(group)
            self._evaluated.append(result)

    @_in_loop
    async def end_evaluation(self) -> None:
        """Wait for the end of the sessions that `evaluate` began."""
        for result in self._evaluated:
            await result
        self._evaluated = []

    @_in_loop
    async def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Stop the sessions that run and whose first call has a version that is `too_old`."""
        self._runner.cancel_running(too_old, why)

    @_in_loop
    async def idle_seconds(self) -> float:
        """Return the seconds in which no session ran, since the last call."""
        self._note_idle()
        idle = self._idle
        self._idle = 0.0
        return idle

    async def _run(self) -> None:
        self._leaving = asyncio.Event()
        with suppress(asyncio.CancelledError):
            async with self._open(self._advance) as self._runner:
                self._begun.set_result(asyncio.get_running_loop())
                await self._leaving.wait()
                raise asyncio.CancelledError  # without it the runner would wait for its sessions

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result."""
        called: Future[T] | None = None
        with suppress(RuntimeError):  # the loop has just ended
            if not self._ended.done():
                called = asyncio.run_coroutine_threadsafe(coroutine, self._begun.result())
        while called and not called.done() and not self._ended.done():
            # interrupts are handled in between
            wait([called, self._ended], timeout=1, return_when=FIRST_COMPLETED)
        if called and called.done() and not called.cancelled():
            return called.result()
        coroutine.close()
        raise self._ended.exception() or RolltapError("the rollouts have ended")

    async def _start(self) -> None:
        for number, group in self._bound.take():
            await self._submit(number, group)

    async def _submit(self, number: int, group: Group) -> None:
        found = dict(self._finished(group))
        missing = [name for name in group.session_ids if name not in found]
        result = await self._runner.submit(replace(group, session_ids=missing))
        result.add_done_callback(partial(self._end, number, group, found))

    def _end(
        self,
        number: int,
        group: Group,
        found: dict[str, Session],
        done: asyncio.Future[list[Session]],
    ) -> None:
        if done.cancelled():
            return  # the runner has ended
        ended = found | placed(group, done.result())
        sessions = [ended[name] for name in group.session_ids if name in ended]
        is_fork = group.fork is not None
        self._complete.put_nowait(CompleteGroup(number, is_fork, group, sessions))

    def _advance(self, what: str, done: int, total: int) -> None:
        self._note_idle()
        self._progress = (what, done, total)
        self._show(what, done, total)

    def _note_idle(self) -> None:
        now = time.monotonic()
        if self._is_idle:
            self._idle += now - self._since
        self._since = now
        self._is_idle = not self._runner.running
