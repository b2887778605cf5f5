"""The groups of a service in a runner, from their acceptance to their end.

The runner outlives recorders: deadlines, cancels and retries act also while no engine answers, and
while the recorder is started again. A recorder that dies takes its node with it, and no group: the
sessions that ran are tried again by the recorder that is started next.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rolltap.addons.engine.policy import POLICY_FILE, PolicyFile
from rolltap.addons.errors import EngineError, RecorderError, RunError
from rolltap.addons.store.metadata import RUN_FILE
from rolltap.addons.store.records import Session
from rolltap.addons.store.staging import write_atomically
from rolltap.addons.store.tables import ROOM_BYTES
from rolltap.trainer.concurrency import in_folder_thread
from rolltap.trainer.descriptors import too_many_files
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.node import Node
from rolltap.trainer.rollouts.resume import Recorded, interrupted_sessions
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.book import GroupBook, OpenGroup
from rolltap.trainer.service.ledgers import Ledgers
from rolltap.trainer.service.requests import SessionView, State
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import SessionRows, load_sessions

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
"""Pause before the recorder is started again, and between questions whether the engines answer."""
_MENDABLE = (RecorderError, EngineError, RunError, OSError)
"""Errors after which the recorder is started again: what was recorded is kept."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether sessions can run, in words."""

    problems: list[str] = field(default_factory=list)
    """Reasons why no session runs."""
    warnings: list[str] = field(default_factory=list)
    """Faults beside which sessions run."""


class RecordedGroups:
    """The open groups of a service, as they run. `run` runs them.

    `worker` has not started. `digests` are those of its tasks. `share` is that of the slots which
    groups that evaluate have, see `GroupRunner`.
    """

    def __init__(
        self,
        worker: Worker,
        book: GroupBook,
        digests: Mapping[str, str],
        share: float,
    ) -> None:
        self.engines = Engines(worker.recorder.engine)
        self.runner: GroupRunner | None = None
        """None until `run` has begun."""
        self.observe: Callable[[Session, float, Ledger], object] = lambda *_: None
        """Gets each session that has ended, the seconds for which it was judged, and the ledger of
        its tokens."""
        self.say: Callable[[str], object] = lambda _: None
        """Gets a line for each session and each group that has ended."""
        self._worker = worker
        self._run_folder = worker.recorder.path
        self._book = book
        self._digests = digests
        self._share = share
        self._problem: str | None = "the recorder is starting"
        self._unwritten: str | None = None
        """Why an event cannot be written."""
        self._ledgers = Ledgers()
        self._work: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._failure: asyncio.Future[None]
        self._lost: asyncio.Future[None]
        """It gets the error with which the recorder died."""

    async def run(self) -> None:
        """Run the groups until it is cancelled.

        Raises `InputError` for what no restart mends.
        """
        while True:
            try:
                await self._run()
            except _MENDABLE as error:
                self._say_problem(error)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _run(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        self._leaving = False
        recorded = await asyncio.to_thread(self._recorded)
        try:
            async with self._make_runner() as runner:
                async with self._book.changes:
                    self.runner = runner
                    for name in [*self._book.open]:
                        await self.start(name, recorded)
                recording = asyncio.create_task(self._keep_recording(runner))
                try:
                    both = [recording, self._failure]
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    if recording.done():
                        recording.result()
                    self._failure.result()
                finally:
                    recording.cancel()
                    await asyncio.wait([recording])
        finally:
            self.runner = None
            self._leaving = True
            await asyncio.gather(*self._work, return_exceptions=True)

    def _recorded(self) -> Recorded:
        """Return the sessions of earlier starts, also those that a kill interrupted.

        Raises `RunError` and `OSError`.
        """
        sessions: list[Session] = []
        for run in (self._run_folder, self._run_folder / EVALUATION):
            if not (run / RUN_FILE).exists():
                continue
            sessions += load_sessions(run).values()
            rows = SessionRows(run)
            for session in interrupted_sessions(run):  # the recorder writes their rows
                version = rows.first_version(session.session_id) or session.policy_version
                session.policy_version = version or PolicyFile(run).read().version
                sessions.append(session)
        return Recorded(sessions)

    async def _keep_recording(self, runner: GroupRunner) -> None:
        """Keep the recorder running. Raises `InputError` for what no restart mends."""
        while True:
            outside = await asyncio.to_thread(self._outside)
            if outside.problems:
                self._problem = "; ".join(outside.problems)
            else:
                try:
                    await self._record(runner)
                except _MENDABLE as error:
                    self._say_problem(error)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _record(self, runner: GroupRunner) -> None:
        """Run sessions until the recorder dies. Raises what it died of."""
        self._lost = asyncio.get_running_loop().create_future()
        async with self._worker:
            self._worker.digests.update(self._digests)
            async with self._worker.attach(runner, share=self._share):
                self._problem = None
                await self._lost

    def _make_runner(self) -> GroupRunner:
        config = self._worker.config
        return GroupRunner(
            [],
            _silent,
            retries=config.retries,
            give_up_after=config.give_up_after,
            ended=self._note,
            lost=self._note_lost,
            silent=self._all_silent,
        )

    def _note_lost(self, _node: Node, error: Exception) -> None:
        """Let the recorder be started again, when no node is left."""
        if self.runner is not None and not self.runner.nodes and not self._lost.done():
            self._lost.set_exception(error)

    def _all_silent(self) -> list[str]:
        """Return the engines if none answers: the recorder can do without some."""
        silent = self.engines.silent()
        if len(silent) < len(self.engines.admins):
            return []
        return silent

    def _say_problem(self, error: Exception) -> None:
        self._problem = f"the recorder is started again: {error}"
        logger.error("%s", self._problem)

    async def start(self, name: str, recorded: Recorded) -> None:
        """Run what is missing of an open group, once `run` has begun.

        `recorded` has its sessions of earlier starts. The caller holds the book's lock.
        """
        if self.runner is None:
            return
        opened = self._book.open[name]
        request = opened.request
        opened.writes = []  # of an earlier runner: what failed is noted again
        over = self._book.accepted[name].cancelled or request.seconds_left() <= 0
        if opened.group is None:
            if over:
                nothing: asyncio.Future[list[Session]] = asyncio.Future()
                nothing.set_result([])
                self._do(partial(self._end, name, nothing))
            return
        if request.evaluation:
            await asyncio.to_thread(self._share_policy)
        failures: Counter[str] = Counter()
        for session in recorded.attempts(opened.group):
            if session.status == "infrastructure":
                failures[SessionName.parse(session.session_id).place] += 1
            if session.session_id not in opened.known:  # the service ended before its event
                self._note(replace(session, group_id=name), 0.0)  # somebody may have changed it
        missing: list[str] = []
        retries_used: dict[str, int] = {}
        for session_id in recorded.missing(opened.group).session_ids:
            place = SessionName.parse(session_id).place
            may_run = failures[place] <= self._worker.config.retries
            if not over and may_run and place not in opened.stopped:
                missing.append(session_id)
                retries_used[session_id] = failures[place]
                opened.begun[place] = session_id
        result = await self.runner.submit(
            replace(opened.group, session_ids=missing),
            priority=request.priority,
            seconds=request.seconds_left(),
            apart=True,
            retries_used=retries_used,
        )
        self._do(partial(self._end, name, result))

    def cancel_session(self, group: OpenGroup, place: str) -> None:
        """Stop a session of an open group, by its id in the request. Its attempt is one of
        these."""
        if self.runner is None or place not in group.begun:
            return
        name = SessionName.parse(group.begun[place])
        for _ in range(self._worker.config.retries + 1):
            self.runner.cancel(str(name), "it was cancelled")
            name = name.next

    def _share_policy(self) -> None:
        """Let evaluations begin with the weights of the run."""
        file = self._run_folder / EVALUATION / POLICY_FILE
        if not file.exists() and (self._run_folder / POLICY_FILE).exists():
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, (self._run_folder / POLICY_FILE).read_text())

    def health(self) -> Health:
        """Return what keeps sessions from running, and what else is wrong.

        Asks the engines: call it in a thread.
        """
        found = self._outside()
        if self._problem is not None and not found.problems:
            found.problems.append(self._problem)
        if self._unwritten is not None:
            found.problems.append(self._unwritten)
        disk = os.statvfs(self._run_folder)
        if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
            room = f"less than {ROOM_BYTES >> 20} MiB are free for {self._run_folder}"
            found.problems.append(f"the disk is full: {room}")
        return found

    def _outside(self) -> Health:
        """Return what the machine and the engines lack.

        The recorder spreads sessions over the engines that answer.
        """
        files = too_many_files()
        if files is not None:
            return Health([files])
        silent = self.engines.silent()
        words = [f"the engine at {url} does not answer" for url in silent]
        if len(silent) == len(self.engines.admins):
            return Health(words)
        return Health(warnings=words)

    def _note(self, session: Session, judging: float) -> None:
        group = self._book.open[session.group_id]
        group.writes.append(self._do(partial(self._write, session, judging)))

    def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Write an event beside the runner, as often as it takes."""

        def over(task: asyncio.Task[None]) -> None:
            self._work.discard(task)
            if task.cancelled():
                return
            error = task.exception()
            if error is not None and not self._failure.done():
                self._failure.set_exception(error)

        task = asyncio.create_task(self._insist(work))
        self._work.add(task)
        task.add_done_callback(over)
        return task

    async def _insist(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except (OSError, RunError) as error:
                if self._leaving:
                    raise
                self._unwritten = f"an event of the journal cannot be written: {error}"
                logger.error("%s", self._unwritten)
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                self._unwritten = None
                return

    async def _write(self, session: Session, judging: float) -> None:
        """Write the event of a session that has ended."""
        name = session.group_id
        try:
            run = self._book.folder(name)
            ledger = await in_folder_thread(self._ledgers.of, run, session)
        except (OSError, RunError):
            raise
        except Exception:  # what one session recorded must not keep others from running
            what = "the tokens of session %s cannot be counted"
            logger.warning(what, session.session_id, exc_info=True)
            ledger = Ledger()
        view = SessionView(**{each: getattr(session, each) for each in SessionView.model_fields})
        number = await self._book.journal.add(
            "session",
            id=name,
            **view.model_dump(),
            sampled=ledger.sampled,
            left_out=dict(ledger.left_out),
        )
        self._book.accepted[name].sessions.append(number)
        self._book.open[name].known[session.session_id] = session.status
        self.observe(session, judging, ledger)
        reward = "no reward"
        if session.reward is not None:
            reward = f"reward {session.reward:g}"
        self.say(f"session {session.session_id}: {session.status}, {reward}")

    async def _end(self, name: str, result: asyncio.Future[list[Session]]) -> None:
        """Write the end of a group, after those of its sessions."""
        await asyncio.wait([result])
        if result.cancelled():
            return  # with the runner
        group = self._book.open[name]
        accepted = self._book.accepted[name]
        await asyncio.gather(*group.writes)
        events = self._book.journal.get_all(accepted.sessions)
        rewards: dict[str, float] = {}
        left_out: Counter[str] = Counter()
        for event in events:
            left_out.update(event["left_out"])
            if event["reward"] is not None:
                rewards[event["session_id"]] = event["reward"]
        async with self._book.changes:
            state: State = "ended"
            if accepted.cancelled:
                state = "cancelled"
            elif group.request.seconds_left() <= 0 and group.unfinished():
                state = "expired"
            number = await self._book.journal.add(
                "ended",
                id=name,
                state=state,
                session_ids=[event["session_id"] for event in events],
                rewards=rewards,
                sampled=sum(event["sampled"] for event in events),
                left_out=left_out,
            )
            self._book.close(name, number)
        self.say(f"group {name}: {state}, {len(events)} sessions")


def _silent(_what: str, _done: int, _total: int) -> None:
    """Show no progress: the service has metrics."""
