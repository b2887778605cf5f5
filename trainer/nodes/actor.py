"""An actor on a machine of the cluster: it runs sessions there, and tells the driver what is new.

The driver's queue says when a session may run and be judged. The sessions are recorded into a
folder of this machine. All rows that it commits go to the run of the driver, those of sessions that
still run too: a node that dies takes no recorded session with it. The driver asks, and acknowledges
what it has written: a question that is asked again gets the last report again. A node ends with its
driver.
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rolltap.addons.engine.policy import POLICY_FILE, UNPUBLISHED
from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.locks import workplace
from rolltap.trainer.nodes.facts import Examined, examine, require_alike
from rolltap.trainer.nodes.messages import (
    EndedAttempt,
    Failure,
    Package,
    Policies,
    Report,
    Setup,
    recorded,
    require_ray,
)
from rolltap.trainer.nodes.rows import Shard, keep_calls
from rolltap.trainer.rollouts.node import EnteredPhase, Node, SessionAttempt
from rolltap.trainer.rollouts.queue import Phase
from rolltap.trainer.rollouts.resume import NOT_RUN
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts

WAIT_SECONDS = 1.0
"""Longest wait for something new to report."""


_WAITING: dict[EnteredPhase, Phase] = {"running": "ready", "judging": "ran"}
"""Phase -> the phase in which an attempt waits for its slot."""


@dataclass(slots=True)
class _HostedSession:
    """An attempt that is here. `phase` is the phase that it is in, or waits in."""

    attempt: SessionAttempt
    task: asyncio.Task[Facts]
    phase: Phase = "preparing"
    slot: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the driver has a slot for the phase for which the attempt waits."""


class NodeActor:
    """The actor. Every method returns a `Failure` in place of raising.

    Attempts have numbers, which the driver never gives twice: a request that is sent again because
    its answer was lost does nothing.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self._setup = setup
        self._stack = ExitStack()
        self._node: Node | None = None
        self._worker: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        """Set when the worker takes sessions, or has ended."""
        self._closing = asyncio.Event()
        self._news = asyncio.Event()
        self._failure: Failure | None = None
        self._begun: set[int] = set()
        self._running: dict[int, _HostedSession] = {}
        self._phases: list[tuple[int, EnteredPhase]] = []
        self._ended: list[EndedAttempt] = []
        self._report: Report | None = None
        """The last one, until it is acknowledged."""
        self._number = 0
        self._policies = 0
        """Number of the policies that are published here."""
        self._polling = asyncio.Lock()
        """Held by one question at a time: one whose answer is lost may still wait for it."""
        self._forking = asyncio.Lock()
        self._asked = time.monotonic()

    @recorded
    async def open(
        self,
        tasks: Sequence[Task],
        policies: Policies,
        fleet: Examined | None,
    ) -> Failure | None:
        """Start the worker, unless it runs.

        A node that joins a `fleet` is compared with what its nodes found.
        """
        if self._worker is None:
            if fleet is not None:
                failure = await self._compare(tasks, policies, fleet)
                if failure is not None:
                    return failure
            self._folder = self._stack.enter_context(workplace())
            self._out = self._folder / "run"
            self._out.mkdir()
            self._shards = [Shard(self._out), Shard(self._out / EVALUATION, EVALUATION)]
            self._publish(policies)
            self._worker = asyncio.create_task(self._work(tasks))
        await self._ready.wait()
        return self._failure

    async def _compare(
        self,
        tasks: Sequence[Task],
        policies: Policies,
        fleet: Examined,
    ) -> Failure | None:
        """Return why this node can run no sessions. Raises `InputError` if it differs."""
        version = UNPUBLISHED.version
        if "" in policies.files:
            version = json.loads(policies.files[""])["version"]
        build = True
        found = await asyncio.to_thread(examine, self.name, self._setup, tasks, version, build)
        if isinstance(found, Failure):
            return found
        require_alike({"of the fleet": fleet, self.name: found})
        return None

    @recorded
    async def begin(
        self,
        number: int,
        attempt: SessionAttempt,
        policies: Policies,
        forked: Package | None,
    ) -> None:
        """Run an attempt. `forked` has the calls of the session that its group forks."""
        self._publish(policies)
        if number in self._begun or self._node is None:
            return
        self._begun.add(number)
        task = asyncio.create_task(self._run(number, self._node, attempt, forked))
        self._running[number] = _HostedSession(attempt, task)
        task.add_done_callback(partial(self._end, number))  # of one that never began, too

    @recorded
    async def grant(self, number: int, phase: EnteredPhase) -> None:
        """Let an attempt that waits for a slot begin its phase."""
        running = self._running.get(number)
        if running is not None and running.phase == _WAITING[phase]:
            running.phase = phase
            running.slot.set()

    @recorded
    async def cancel(self, number: int, why: str) -> None:
        """Stop an attempt. Its row says why."""
        if number in self._running:
            self._stop(self._running[number], why)

    @recorded
    async def poll(self, number: int, policies: Policies) -> Report:
        """Return what is new since the report of a number, the last that was written.

        Waits a while if nothing is.
        """
        self._asked = time.monotonic()
        self._publish(policies)
        async with self._polling:
            if self._report is None or self._report.number == number:
                self._report = await self._next_report()
            return self._report  # the same again if its answer was lost

    async def _next_report(self) -> Report:
        if not self._news.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), WAIT_SECONDS)
        self._news.clear()
        # before the rows are read: they are at least as new as what is said of them
        is_over = self._worker is not None and self._worker.done()
        phases = self._phases
        ended = self._ended
        self._phases = []
        self._ended = []
        rows = [each.row for each in ended if each.row is not None]
        names = [row.session_id for row in rows]
        packages = await asyncio.to_thread(self._packages, names)
        reference = None
        if packages:
            reference = require_ray().put(packages)
        silent: list[str] = []
        if any(row.status == "infrastructure" for row in rows):
            silent = await asyncio.to_thread(Engines(self._setup.engine).silent)
        self._number += 1
        return Report(
            number=self._number,
            packages=reference,
            phases=phases,
            ended=ended,
            silent=silent,
            is_over=is_over,
            failure=self._failure,
        )

    @recorded
    async def status(self) -> dict[str, Any]:
        """Return what `rolltap fleet status` shows."""
        error = ""
        if self._failure is not None:
            error = self._failure.message
        return {
            "node": self.name,
            "slots": self._setup.config.concurrency,
            "engine": self._setup.engine,
            "groups": len({each.attempt.group.group_id for each in self._running.values()}),
            "phases": dict(Counter(each.phase for each in self._running.values())),
            "asked_seconds_ago": time.monotonic() - self._asked,
            "error": error,
        }

    @recorded
    async def close(self) -> None:
        """Stop the sessions and the recorder. The reports after it have what these recorded."""
        self._closing.set()
        if self._worker is not None:
            await asyncio.wait([self._worker])

    @recorded
    async def leave(self) -> None:
        """Remove the folder: all was reported."""
        await asyncio.to_thread(self._stack.close)

    async def _work(self, tasks: Sequence[Task]) -> None:
        """Hold the worker that runs sessions, until the node closes or an attempt has failed."""
        try:
            worker = await asyncio.to_thread(self._setup.worker, self._out)
            await asyncio.to_thread(worker.fit, tasks, self._setup.private)
            async with worker:
                self._node = worker.node()
                self._ready.set()
                await self._closing.wait()
                await self._stop_all()
        except Exception as error:
            self._fail(error)
        finally:
            self._ready.set()
            self._news.set()

    async def _stop_all(self) -> None:
        self._node = None
        why = "its node was closed"
        if self._failure is not None:
            why = self._failure.message
        for running in self._running.values():
            self._stop(running, why)
        tasks = [running.task for running in self._running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    def _stop(running: _HostedSession, why: str) -> None:
        running.attempt.why_stopped = why
        running.task.cancel()

    async def _run(
        self,
        number: int,
        node: Node,
        attempt: SessionAttempt,
        forked: Package | None,
    ) -> Facts:
        async def enter(phase: EnteredPhase) -> None:
            running = self._running[number]
            running.phase = _WAITING[phase]
            running.slot.clear()
            self._phases.append((number, phase))
            self._news.set()
            await running.slot.wait()

        if forked is not None:
            await self._keep_forked(attempt, forked)
        return await node.run(attempt, enter)

    def _end(self, number: int, task: asyncio.Task[Facts]) -> None:
        facts = None
        if not task.cancelled():
            error = task.exception()
            if error is None:
                facts = task.result()
            else:
                self._fail(error)
                self._closing.set()
        attempt = self._running.pop(number).attempt
        if facts is None and attempt.row is not None and attempt.row.status not in NOT_RUN:
            facts = Facts()  # it was stopped when it had its result
        self._ended.append(EndedAttempt(number, attempt.row, facts))
        self._news.set()

    async def _keep_forked(self, attempt: SessionAttempt, forked: Package) -> None:
        """Keep the calls of the session that an attempt forks, once, and let it read them."""
        source = attempt.group.fork
        assert source is not None
        name = hashlib.sha256(f"{source.run}\0{source.session}".encode()).hexdigest()
        copy = self._folder / "forked" / name
        async with self._forking:
            if not copy.exists():
                await asyncio.to_thread(keep_calls, forked, copy)
        attempt.group = replace(attempt.group, fork=source._replace(copy=copy))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = Failure.of(error, self.name)

    def _publish(self, policies: Policies) -> None:
        if policies.number < self._policies:
            return  # a request that comes late
        self._policies = policies.number
        for part, policy in policies.files.items():
            path = self._out / part / POLICY_FILE
            if not path.exists() or path.read_text() != policy:
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, policy)

    def _packages(self, ended: Sequence[str]) -> list[Package]:
        packages = []
        for shard in self._shards:
            package = shard.package(ended)
            if package is not None:
                packages.append(package)
        return packages
