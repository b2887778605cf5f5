"""The service without HTTP: groups are accepted, run, cancelled and ended, once each.

The journal says which groups were accepted, cancelled and ended; the rows of the run say which of
their sessions have ended. Nothing else is known, so a start after a kill goes on from them:

    accepted    session    session    cancelled    session    ended: `ended`, `cancelled`, `expired`

`recording` runs them.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from rolltap.addons.engine.policy import Policy, PolicyFile
from rolltap.addons.errors import InputError, RunError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.weights import write_policy
from rolltap.trainer.names import SessionName, some
from rolltap.trainer.rollouts.resume import Group, Recorded
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.book import GroupBook, OpenGroup, request_digest
from rolltap.trainer.service.journal import Journal
from rolltap.trainer.service.recording import RecordedGroups
from rolltap.trainer.service.requests import (
    GroupRequest,
    GroupView,
    PolicyRequest,
)
from rolltap.trainer.service.tasks import ConflictError, requested_fork, requested_task
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows

logger = logging.getLogger(__name__)


class QueueFullError(InputError):
    """As many sessions as may wait do."""


class Groups:
    """The groups of a service. `run` runs them; other methods are for the same event loop.

    `worker` has not started; `tasks` are as it runs them. At most `most` sessions wait or run.
    `share` is that of the slots which groups that evaluate have, see `GroupRunner`. `hosts` are
    those of `require_portable`.

    The constructor raises as `Journal`.
    """

    def __init__(
        self,
        worker: Worker,
        tasks: Sequence[Task],
        *,
        most: int,
        share: float,
        hosts: Sequence[str] = (),
    ) -> None:
        self.worker = worker
        self.path = worker.recorder.path
        self.tasks = {task.id: task for task in tasks}
        self.digests: dict[str, str] = {}
        """Id -> digest, of the tasks that were loaded or came with requests."""
        self.journal = Journal(self.path)
        self.book = GroupBook(self.journal, self.path)
        self.recorded = RecordedGroups(worker, self.book, self.digests, share)
        self._most = most
        self._hosts = {host.lower() for host in hosts}
        self._rows = SessionRows(self.path)

    async def load(self) -> None:
        """Read the journal. Call it once, first."""
        for task in self.tasks.values():
            self.digests[task.id] = await asyncio.to_thread(task.digest)
        self.book.load()
        for name, group in self.book.open.items():
            try:
                group.group = await self._group_of(group)
            except (RunError, InputError, OSError) as error:
                group.problem = str(error)
                logger.warning("the group %s is not run: %s", name, error)

    async def _group_of(self, group: OpenGroup) -> Group:
        """Return an open group as it was accepted. Raises `InputError`, `RunError`, `OSError`."""
        task = requested_task(group.request, self.tasks, self.worker, self._hosts)
        digest = self.digests.get(task.id) or await asyncio.to_thread(task.digest)
        if digest != group.task_digest:
            raise InputError(
                f"it was accepted for the task {task.id}, which has another content now: load it "
                "as it was, and start again, or cancel the group"
            )
        self.digests[task.id] = digest
        return await self._as_run(group.request, task)

    async def _as_run(self, request: GroupRequest, task: Task) -> Group:
        """Return the group of a request. Raises `InputError`, `RunError` and `OSError`."""
        fork = None
        if request.fork is not None:
            rows = self._rows
            fork = await asyncio.to_thread(requested_fork, request.fork, task, rows, self.path)
        return Group(
            task,
            request.id,
            request.session_ids,
            sampling=request.sampling,
            fork=fork,
            evaluates=request.evaluation,
        )

    async def submit(self, request: GroupRequest) -> tuple[GroupView, bool]:
        """Accept a group, once; return its view, and True if it is new. It is in the journal then.

        Raises `ConflictError` when another request has its id, `QueueFullError`, `InputError` for a
        wrong field, `RunError` when a session to fork cannot be read, and `OSError` when the
        journal cannot be written.
        """
        async with self.book.changes:
            known = self.book.accepted.get(request.id)
            if known is not None:
                if known.digest != request_digest(request):
                    what = f"'id' is {request.id!r}, which another request has"
                    raise ConflictError(f"{what}: choose another id")
                return self.view(request.id), False
            self._require_room(request)
            task = requested_task(request, self.tasks, self.worker, self._hosts)
            group = await self._as_run(request, task)
            digest = self.digests.get(task.id)
            if digest is None or task.id not in self.tasks:
                digest = await asyncio.to_thread(task.digest)
            if self.digests.setdefault(task.id, digest) != digest:
                what = f"'task.id' is {task.id!r}, which was another task before"
                raise ConflictError(f"{what}: choose another id")
            number = await self.journal.add(
                "accepted",
                id=request.id,
                task_id=task.id,
                task_digest=digest,
                request=request.model_dump(mode="json"),
            )
            self.book.accept(number, request, digest).group = group
            await self.recorded.start(request.id, Recorded([]))
        return self.view(request.id), True

    def _require_room(self, request: GroupRequest) -> None:
        """Refuse a request that is too late, or one too many. Raises `InputError`."""
        if request.deadline is not None and request.seconds_left() <= 0:
            at = request.deadline.isoformat()
            raise InputError(f"'deadline' is {at}, which is past: give a later time")
        waiting = self.book.waiting().total()
        if waiting + len(request.sessions) > self._most:
            raise QueueFullError(
                f"'sessions' are {len(request.sessions)} beside {waiting} that wait or run, and "
                f"together at most {self._most} may: send it again later, or start the service "
                "with a larger --queue"
            )

    async def cancel(self, name: str) -> GroupView:
        """Stop the sessions of a group. One that has ended stays as it is.

        Raises `KeyError` for an unknown name, and `OSError`.
        """
        accepted = self.book.accepted[name]
        async with self.book.changes:
            if name in self.book.open and not accepted.cancelled:
                await self.journal.add("cancelled", id=name)
                accepted.cancelled = True
                if self.book.open[name].group is None:
                    await self.recorded.start(name, Recorded([]))
                elif self.recorded.runner is not None:
                    self.recorded.runner.cancel(name, "its group was cancelled")
        return self.view(name)

    async def cancel_session(self, name: str, session_id: str) -> GroupView:
        """Stop one session of a group, of whatever attempt. One that has ended stays as it is.

        Raises `KeyError` for an unknown group or session, and `OSError`.
        """
        view = self.view(name)
        place = SessionName.parse(session_id).place
        if place not in view.session_ids:
            raise KeyError(session_id)
        async with self.book.changes:
            group = self.book.open.get(name)
            if group is not None and place in group.unfinished():
                await self.journal.add("cancelled", id=name, session_id=place)
                group.stopped.add(place)
                self.recorded.cancel_session(group, place)
        return self.view(name)

    def view(self, name: str) -> GroupView:
        """Return a group. Raises `KeyError` for an unknown name."""
        return self.book.view(name)

    async def wait(self, name: str, seconds: float) -> GroupView:
        """Return a group when it has ended, or after so many seconds; at once, when it is not run
        because of its `problem`.

        Raises `KeyError` for an unknown name.
        """
        group = self.book.open.get(name)
        if group is not None and (group.problem is None or self.book.accepted[name].cancelled):
            with suppress(TimeoutError):
                await asyncio.wait_for(group.over.wait(), seconds)
        return self.view(name)

    async def publish(self, request: PolicyRequest) -> Policy:
        """Make weights that the engines have the policy of sessions that begin from here on.

        Returns the policy. Raises `InputError` when an engine does not serve the adapter,
        `EngineError`, `RunError` and `OSError`.
        """
        if request.adapter is not None:
            served = await asyncio.to_thread(self.recorded.engines.each, _adapters)
            without = [url for url, adapters in served if request.adapter not in adapters]
            if without:
                raise InputError(
                    f"'adapter' is {request.adapter!r}, which the engine at {some(without)} does "
                    "not serve: load it into every engine first (POST /v1/load_lora_adapter)"
                )
        else:  # engines name the base model's weights themselves
            name = partial(_name_weights, request.version)
            await asyncio.to_thread(self.recorded.engines.each, name)
        async with self.book.changes:
            await asyncio.to_thread(self._write_policy, request)
            self.book.policies.setdefault(request.version, len(self.book.policies))
            await self.journal.add("policy", version=request.version, adapter=request.adapter)
            return self.policy()

    def _write_policy(self, request: PolicyRequest) -> None:
        write_policy(self.path, request.adapter, request.version)
        if (self.path / EVALUATION).is_dir():
            write_policy(self.path / EVALUATION, request.adapter, request.version)

    def policy(self) -> Policy:
        """Return the published policy. Raises `OSError` and `RunError` if it cannot be read."""
        return PolicyFile(self.path).read()


def _adapters(engine: EngineAdmin) -> tuple[str, frozenset[str]]:
    return engine.url, engine.models().adapters


def _name_weights(version: str, engine: EngineAdmin) -> None:
    if engine.weight_version() != version:
        engine.set_weight_version(version)
