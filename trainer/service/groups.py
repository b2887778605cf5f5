"""The service without HTTP: groups are accepted, run, cancelled and ended, once each, whatever is killed meanwhile.

The journal says which groups were accepted, cancelled and ended; the rows of the run say which of their sessions have
ended. Nothing else is known, so a start after a kill goes on from them, as the service itself does after the recorder
has died:

    accepted    session    session    cancelled    session    ended: state `ended`, `cancelled` or `expired`
"""

import asyncio
import hashlib
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rolltap.addons.engine.policy import POLICY_FILE, Policy, PolicyFile
from rolltap.addons.errors import EngineError, InputError, RecorderError, RunError
from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.metadata import RUN_FILE
from rolltap.addons.store.records import Session
from rolltap.addons.store.staging import write_atomically
from rolltap.addons.store.tables import ROOM_BYTES, run_files
from rolltap.trainer.concurrency import in_folder_thread
from rolltap.trainer.descriptors import too_many_files
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.weights import write_policy
from rolltap.trainer.names import some
from rolltap.trainer.rollouts.resume import Group, Recorded, interrupted_sessions, place_of
from rolltap.trainer.rollouts.runner import GroupRunner
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.events import EVENT, EVENT_KINDS, Accepted, AnyEvent, Cancelled, GroupEnded, Published
from rolltap.trainer.service.journal import Journal
from rolltap.trainer.service.requests import GroupRequest, GroupView, PolicyRequest, SessionView, State
from rolltap.trainer.service.tasks import ConflictError, requested_task
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.toml import describe
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.reader import RecordedSession, load_sessions, rebuild_calls
from rolltap.trainer.traces.sessions import TraceOptions, trace_session

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
"""Pause before the recorder is started again, and between questions whether the engines answer."""
TABLES = ("calls", "sessions", "events")
_MENDABLE = (RecorderError, EngineError, RunError, OSError)
"""Errors after which the recorder is started again: what was recorded is kept, and the open groups go on."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether sessions can run, in words."""

    problems: list[str] = field(default_factory=list)
    """What keeps all sessions from running."""
    warnings: list[str] = field(default_factory=list)
    """What is wrong while sessions run."""


class QueueFullError(InputError):
    """As many sessions as may wait do."""


@dataclass(slots=True)
class _Accepted:
    """A group, by the numbers of its events in the journal. `digest` is that of its request."""

    number: int
    digest: str
    sessions: list[int] = field(default_factory=list)
    cancelled: bool = False
    ended: int | None = None


@dataclass(slots=True)
class _Open:
    """A group that has not ended. `known` are the ids of its sessions that have an event. `over` is set at its end.

    Without a `task` it is not run, because of its `problem`.
    """

    request: GroupRequest
    task_digest: str
    task: Task | None = None
    problem: str | None = None
    known: set[str] = field(default_factory=set)
    writes: list[asyncio.Task[None]] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Groups:
    """The groups of a service. `run` runs them; other methods may be called at any time, by the same event loop.

    `worker` has not started; `tasks` are as it runs them. At most `most` sessions wait or run. `share` is that of the
    slots which groups that evaluate have, see `GroupRunner`. `hosts` are those of `require_portable`.

    The constructor raises as `Journal`.
    """

    def __init__(
        self, worker: Worker, tasks: Sequence[Task], *, most: int, share: float, hosts: Sequence[str] = ()
    ) -> None:
        self.worker, self.path = worker, worker.recorder.path
        self.tasks = {task.id: task for task in tasks}
        self.digests: dict[str, str] = {}
        """Id -> digest, of the tasks that were loaded or came with requests."""
        self.journal = Journal(self.path)
        self.engines = Engines(worker.recorder.engine)
        self.schedule: GroupRunner | None = None
        """None while the recorder is not running."""
        self.problem: str | None = "the recorder is starting"
        self.policies: dict[str, int] = {}
        """Version -> number of policies before it."""
        self.observe: Callable[[Session, float, Ledger], object] = lambda *_: None
        """Gets each session that has ended, the seconds for which it was judged, and the ledger of its tokens."""
        self.say: Callable[[str], object] = lambda _: None
        """Gets a line for each session and each group that has ended."""
        self._most, self._share = most, share
        self._hosts = {host.lower() for host in hosts}
        self._accepted: dict[str, _Accepted] = {}
        self._open: dict[str, _Open] = {}
        self._changes = asyncio.Lock()
        """Held while a group is accepted, cancelled or ended."""
        self._recorded = Recorded([])
        self._work: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None]
        self._calls: dict[Path, SessionIndex] = {}
        """Run folder -> its calls."""
        self._reading = threading.Lock()
        """Held while the index of calls is used."""

    async def load(self) -> None:
        """Read the journal. Call it once, first. What cannot be used is set aside, and said; the rest is taken."""
        self.digests = {task.id: await asyncio.to_thread(task.digest) for task in self.tasks.values()}
        for number, event in self.journal.read():
            try:
                self._replay(number, EVENT.validate_python(event))
            except ValidationError as error:
                self.journal.put_aside(number, describe(error, {"": EVENT_KINDS}))
            except InputError as error:
                self.journal.put_aside(number, str(error))
        for name, group in self._open.items():
            try:
                group.task = await self._task_of(group)
            except (InputError, OSError) as error:
                group.problem = str(error)
                logger.warning("the group %s is not run: %s", name, error)

    def _replay(self, number: int, event: AnyEvent) -> None:
        """Take an event of an earlier start. Raises `InputError` for one that cannot follow those before it."""
        if isinstance(event, Published):
            self.policies.setdefault(event.version, len(self.policies))
            return
        if isinstance(event, Accepted):
            if event.id in self._accepted:
                raise InputError(f"the group {event.id} is there already")
            self._accept(number, event.request, event.task_digest)
            return
        group = self._open.get(event.id)
        if group is None:
            raise InputError(f"no group {event.id} is open there")
        accepted = self._accepted[event.id]
        if isinstance(event, Cancelled):
            accepted.cancelled = True
        elif isinstance(event, GroupEnded):
            self._close(event.id, number)
        elif event.session_id in group.known or place_of(event.session_id) not in group.request.session_ids:
            raise InputError(f"the group {event.id} has no session {event.session_id} that runs")
        else:
            accepted.sessions.append(number)
            group.known.add(event.session_id)

    async def _task_of(self, group: _Open) -> Task:
        """Return the task of an open group as it was accepted. Raises `InputError` and `OSError`."""
        task = requested_task(group.request, self.tasks, self.worker, self._hosts)
        digest = self.digests.get(task.id) or await asyncio.to_thread(task.digest)
        if digest != group.task_digest:
            raise InputError(
                f"it was accepted for the task {task.id}, which has another content now: load it as it was, and start "
                "again, or cancel the group"
            )
        self.digests[task.id] = digest
        return task

    async def run(self) -> None:
        """Run the groups until it is cancelled. The recorder is started again after it has died, and the groups go on.

        Raises `InputError` for what no restart mends.
        """
        while True:
            try:
                while problems := (await asyncio.to_thread(self._outside)).problems:
                    self.problem = "; ".join(problems)
                    await asyncio.sleep(AGAIN_SECONDS)
                await self._run()
            except _MENDABLE as error:
                self.problem = f"the recorder is started again: {error}"
                logger.error("%s", self.problem)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _run(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        try:
            async with self.worker, self.worker.runner(_silent, share=self._share, ended=self._note) as schedule:
                self.worker.digests.update(self.digests)
                self._recorded = Recorded(await asyncio.to_thread(self._earlier))
                self._calls = {}
                async with self._changes:
                    for name in list(self._open):
                        await self._start(schedule, name)
                    self.schedule, self.problem = schedule, None
                await self._failure
        finally:
            self.schedule = None
            await asyncio.gather(*self._work, return_exceptions=True)  # they are short, or end with the schedule

    async def submit(self, request: GroupRequest) -> tuple[GroupView, bool]:
        """Accept a group, once; return its view, and True if it is new. It is in the journal then.

        Raises `ConflictError` when another request has its id, `QueueFullError`, `InputError` for a wrong field, and
        `OSError` when the journal cannot be written.
        """
        async with self._changes:
            if (known := self._accepted.get(request.id)) is not None:
                if known.digest != _digest(request):
                    raise ConflictError(f"'id' is {request.id!r}, which another request has: choose another id")
                return self.view(request.id), False
            if request.deadline is not None and _seconds_left(request) <= 0:
                raise InputError(f"'deadline' is {request.deadline.isoformat()}, which is past: give a later time")
            waiting = self.waiting().total()
            if waiting + len(request.sessions) > self._most:
                raise QueueFullError(
                    f"'sessions' are {len(request.sessions)} beside {waiting} that wait or run, and together at most "
                    f"{self._most} may: send it again later, or start the service with a larger --queue"
                )
            task = requested_task(request, self.tasks, self.worker, self._hosts)
            digest = self.digests.get(task.id)
            if digest is None or task.id not in self.tasks:
                digest = await asyncio.to_thread(task.digest)
            if self.digests.setdefault(task.id, digest) != digest:
                raise ConflictError(f"'task.id' is {task.id!r}, which was another task before: choose another id")
            fields = {"task_id": task.id, "task_digest": digest, "request": request.model_dump(mode="json")}
            number = await self.journal.add("accepted", id=request.id, **fields)
            self._accept(number, request, digest)
            self._open[request.id].task = task
            if self.schedule is not None:
                await self._start(self.schedule, request.id)
        return self.view(request.id), True

    async def cancel(self, name: str) -> GroupView:
        """Stop the sessions of a group. One that has ended stays as it is. Raises `KeyError` for an unknown name."""
        accepted = self._accepted[name]
        async with self._changes:
            if name in self._open and not accepted.cancelled:
                await self.journal.add("cancelled", id=name)
                accepted.cancelled = True
                if self.schedule is not None and self._open[name].task is None:
                    await self._start(self.schedule, name)
                elif self.schedule is not None:
                    self.schedule.cancel(name, "its group was cancelled")
        return self.view(name)

    def view(self, name: str) -> GroupView:
        """Return a group. Raises `KeyError` for an unknown name."""
        accepted = self._accepted[name]
        begin = self.journal.get(accepted.number)
        end = self.journal.get(accepted.ended) if accepted.ended else {}
        is_open = self._open.get(name)
        return GroupView(
            id=name,
            task_id=begin["task_id"],
            state=end.get("state", "cancelled" if accepted.cancelled else "open"),
            accepted_at=begin["at"],
            ended_at=end.get("at"),
            session_ids=GroupRequest.model_validate(begin["request"]).session_ids,
            sessions=[SessionView.model_validate(self.journal.get(number)) for number in accepted.sessions],
            run=str(self.path.absolute()),
            shards={table: [path.name for path in run_files(self.path, table)] for table in TABLES} if end else {},
            sampled=end.get("sampled"),
            left_out=end.get("left_out"),
            problem=None if is_open is None else is_open.problem,
        )

    async def wait(self, name: str, seconds: float) -> GroupView:
        """Return a group when it has ended, or after so many seconds. Raises `KeyError` for an unknown name."""
        if name in self._open:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._open[name].over.wait(), seconds)
        return self.view(name)

    async def publish(self, request: PolicyRequest) -> Policy:
        """Make weights that the engines have the policy of sessions that begin from here on, and return it.

        Raises `InputError` when an engine does not serve the adapter, `EngineError`, `RunError` and `OSError`.
        """
        if request.adapter is not None:
            served = await asyncio.to_thread(self.engines.each, lambda engine: (engine.url, engine.models().adapters))
            if without := [url for url, adapters in served if request.adapter not in adapters]:
                raise InputError(
                    f"'adapter' is {request.adapter!r}, which the engine at {some(without)} does not serve: load it "
                    "into every engine first (POST /v1/load_lora_adapter)"
                )
        else:  # engines name the base model's weights themselves
            await asyncio.to_thread(self.engines.each, lambda engine: _name_weights(engine, request.version))
        async with self._changes:
            await asyncio.to_thread(write_policy, self.path, request.adapter, request.version)
            self.policies.setdefault(request.version, len(self.policies))
            await self.journal.add("policy", version=request.version, adapter=request.adapter)
            return self.policy()

    def policy(self) -> Policy:
        """Return the published policy. Raises `OSError` and `RunError` when it cannot be read."""
        return PolicyFile(self.path).read()

    def waiting(self) -> Counter[int]:
        """Return priority -> number of sessions of open groups that have not ended."""
        waiting: Counter[int] = Counter()
        for group in self._open.values():
            if group.problem is not None:
                continue
            ended = {place_of(name) for name in group.known}
            waiting[group.request.priority] += len(set(group.request.session_ids) - ended)
        return waiting

    def health(self) -> Health:
        """Return what keeps sessions from running, and what else is wrong. Asks the engines: call it in a thread."""
        found = self._outside()
        if self.problem is not None and not found.problems:
            found.problems.append(self.problem)
        disk = os.statvfs(self.path)
        if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
            found.problems.append(f"the disk is full: less than {ROOM_BYTES >> 20} MiB are free for {self.path}")
        return found

    def _outside(self) -> Health:
        """Return what the machine and the engines lack. The recorder spreads sessions over the engines that answer."""
        files = too_many_files()
        if files is not None:
            return Health([files])
        silent = self.engines.silent()
        words = [f"the engine at {url} does not answer" for url in silent]
        if len(silent) == len(self.engines.admins):
            return Health(words)
        return Health(warnings=words)

    def _accept(self, number: int, request: GroupRequest, task_digest: str) -> None:
        self._accepted[request.id] = _Accepted(number, _digest(request))
        self._open[request.id] = _Open(request, task_digest)

    def _close(self, name: str, number: int) -> None:
        self._accepted[name].ended = number
        self._open.pop(name).over.set()

    async def _start(self, schedule: GroupRunner, name: str) -> None:
        """Run what is missing of an open group."""
        group, request = self._open[name], self._open[name].request
        if group.task is None:
            if self._accepted[name].cancelled or _seconds_left(request) <= 0:
                nothing = asyncio.get_running_loop().create_future()
                nothing.set_result([])
                self._do(self._end(name, nothing))
            return
        group.writes = []  # the earlier ones have ended; one that failed is done again
        if request.evaluation:
            await asyncio.to_thread(self._share_policy)
        given = Group(group.task, name, request.session_ids, sampling=request.sampling, evaluates=request.evaluation)
        for session in self._recorded.attempts(given):
            if session.session_id not in group.known:  # it ended, and the service before its event
                self._note(replace(session, group_id=name), 0.0)  # somebody may have changed it
        seconds = _seconds_left(request)
        failures = Counter(
            place_of(each.session_id) for each in self._recorded.attempts(given) if each.status == "infrastructure"
        )
        over = self._accepted[name].cancelled or seconds <= 0
        again = [] if over else self._recorded.missing(given).session_ids
        missing = replace(
            given, session_ids=[each for each in again if failures[place_of(each)] <= self.worker.config.retries]
        )
        result = await schedule.submit(missing, priority=request.priority, seconds=seconds, apart=True)
        self._do(self._end(name, result))

    def _note(self, session: Session, judging: float) -> None:
        group = self._open[session.group_id]
        group.writes.append(self._do(self._write(session, judging)))

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do work beside the schedule. If it fails, the recorder is started again, and the work is found again."""

        def over(task: asyncio.Task[None]) -> None:
            self._work.discard(task)
            if not task.cancelled() and (error := task.exception()) and not self._failure.done():
                self._failure.set_exception(error)

        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(over)
        return task

    async def _write(self, session: Session, judging: float) -> None:
        """Write the event of a session that has ended."""
        try:
            ledger = await in_folder_thread(self._ledger, session)
        except OSError:
            raise
        except Exception:  # what one session recorded must not keep others from running
            logger.warning("the tokens of session %s cannot be counted", session.session_id, exc_info=True)
            ledger = Ledger()
        view = SessionView(**{name: getattr(session, name) for name in SessionView.model_fields})
        counts = {"sampled": ledger.sampled, "left_out": dict(ledger.left_out)}
        number = await self.journal.add("session", id=session.group_id, **view.model_dump(), **counts)
        self._accepted[session.group_id].sessions.append(number)
        self._open[session.group_id].known.add(session.session_id)
        self.observe(session, judging, ledger)
        reward = "no reward" if session.reward is None else f"reward {session.reward:g}"
        self.say(f"session {session.session_id}: {session.status}, {reward}")

    async def _end(self, name: str, result: asyncio.Future[list[Session]]) -> None:
        """Write the end of a group, after those of its sessions."""
        await asyncio.wait([result])
        if result.cancelled():
            return  # with the schedule
        group, accepted = self._open[name], self._accepted[name]
        await asyncio.gather(*group.writes)
        events = [self.journal.get(number) for number in accepted.sessions]
        came = {place_of(event["session_id"]) for event in events if event["status"] != "cancelled"}
        async with self._changes:
            late = _seconds_left(group.request) <= 0 and not came.issuperset(group.request.session_ids)
            state: State = "cancelled" if accepted.cancelled else "expired" if late else "ended"
            number = await self.journal.add(
                "ended",
                id=name,
                state=state,
                session_ids=[event["session_id"] for event in events],
                rewards={event["session_id"]: event["reward"] for event in events if event["reward"] is not None},
                sampled=sum(event["sampled"] for event in events),
                left_out=sum((Counter(event["left_out"]) for event in events), Counter()),
            )
            self._close(name, number)
        self.say(f"group {name}: {state}, {len(events)} sessions")

    def _share_policy(self) -> None:
        """Let evaluations begin with the weights of the run."""
        policy = self.path / POLICY_FILE
        if policy.exists():
            (self.path / EVALUATION).mkdir(exist_ok=True)
            write_atomically(self.path / EVALUATION / POLICY_FILE, policy.read_text())

    def _earlier(self) -> list[Session]:
        """Return the sessions that the service has recorded, also interrupted evaluations."""
        sessions = [*load_sessions(self.path).values()]
        evaluation = self.path / EVALUATION
        if (evaluation / RUN_FILE).exists():
            sessions += load_sessions(evaluation).values()
            sessions += interrupted_sessions(evaluation)  # its recorder writes their rows
        return sessions

    def _ledger(self, session: Session) -> Ledger:
        run = self.path
        if self._open[session.group_id].request.evaluation:
            run = self.path / EVALUATION
        with self._reading:
            if run not in self._calls:
                self._calls[run] = SessionIndex(run, "calls")
            with self._calls[run] as calls:
                calls.refresh()
                batches = calls.batches(session.session_id)
                found = rebuild_calls(run, session.session_id, batches, check_digests=False)
        recorded = RecordedSession(session_id=session.session_id, session=session, calls=found)
        return trace_session(recorded, TraceOptions()).rewarded().ledger


def _name_weights(engine: EngineAdmin, version: str) -> None:
    if engine.weight_version() != version:
        engine.set_weight_version(version)


def _digest(request: GroupRequest) -> str:
    return hashlib.sha256(request.model_dump_json().encode()).hexdigest()


def _seconds_left(request: GroupRequest) -> float:
    return math.inf if request.deadline is None else (request.deadline - datetime.now(UTC)).total_seconds()


def _silent(_what: str, _done: int, _total: int) -> None:
    """Show no progress: the service has metrics."""
