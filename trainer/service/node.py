"""A rollout service as a node of a training's runner, and the worker that has it.

The service records into the training's run folder, so traces, policy and rows are read and written
there as ever. The sessions of a group are one request. The service retries them, and goes on with
them when the training ends: the next start finds them by the group's id.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rolltap.addons.errors import InputError, RunError, ServiceError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.records import Session
from rolltap.trainer.concurrency import backoff
from rolltap.trainer.console import Advance
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.node import Enter, SessionAttempt
from rolltap.trainer.rollouts.queue import Slots
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.rollouts.runner import GroupRunner, OnEnd, OnLost
from rolltap.trainer.runs.views.training import EVALUATION
from rolltap.trainer.service.client import PAUSES, AsyncClient, Client
from rolltap.trainer.service.requests import GroupView
from rolltap.trainer.service.serve import TOKEN_FILE
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.facts import Facts
from rolltap.trainer.traces.reader import SessionRows, SessionTable

_UNBOUNDED = sys.maxsize


@dataclass(frozen=True, slots=True)
class _SentGroup:
    """A group that the service has."""

    sent: asyncio.Task[dict[int | None, str]]
    """Its result: index of a session -> the session's id there, of its first attempt."""
    ended: asyncio.Task[dict[int | None, Session]]
    """Its result: index of a session -> its row, of its last attempt."""


class ServiceNode:
    """Runs sessions on a service. A node of one runner.

    `run` is the training's run folder and the service's, `sampling` what its sessions sample with.
    """

    def __init__(self, client: AsyncClient, run: Path, sampling: Mapping[str, float]) -> None:
        self.name = client.url
        self.slots = Slots(_UNBOUNDED, _UNBOUNDED, _UNBOUNDED, _UNBOUNDED, _UNBOUNDED)
        self.leaves = False
        """True to leave sessions that are stopped to the service: the training ends."""
        self._client = client
        self._sampling = sampling
        self._run = run
        self._rows = SessionRows(run)
        self._tables = {
            False: SessionTable(run),
            True: SessionTable(run / EVALUATION),
        }
        self._groups: dict[str, _SentGroup] = {}
        self._places: dict[str, str] = {}
        """Session that runs, and does not evaluate -> its id at the service."""

    async def run(self, attempt: SessionAttempt, enter: Enter) -> Facts:
        """Run a session until its group has ended there: see `Node`. Raises `ServiceError` too."""
        group = attempt.group
        if group.group_id not in self._groups:
            sent = asyncio.create_task(self._send(group))
            ended = asyncio.create_task(self._result(group, sent))
            ended.add_done_callback(_look_at)
            self._groups[group.group_id] = _SentGroup(sent, ended)
        there = self._groups[group.group_id]
        index = _index(attempt.session_id)
        try:
            places = await asyncio.shield(there.sent)
            if not group.evaluates and index in places:
                self._places[attempt.session_id] = places[index]
            await enter("running")
            rows = await asyncio.shield(there.ended)
        except asyncio.CancelledError:
            if self.leaves:
                there.ended.cancel()
                there.sent.cancel()
            else:
                attempt.row = await self._stop(there, group.group_id, index)
            raise
        finally:
            self._places.pop(attempt.session_id, None)
            if there.ended.done():
                self._groups.pop(group.group_id, None)
        attempt.row = rows.get(index)
        return Facts()

    def first_version(self, session_id: str) -> str | None:
        """Return the version of the weights of a session's first call: see `Node`."""
        place = self._places.get(session_id)
        if place is None:
            return None
        name = SessionName(place)
        while self._rows.of("sessions", str(name), ("status",)):  # the service tried again
            name = name.next
        return self._rows.first_version(str(name))

    async def _send(self, group: Group) -> dict[int | None, str]:
        names = []
        for session_id in group.session_ids:
            place = SessionName.parse(session_id).place
            names.append(place.removeprefix(f"{group.group_id}-"))
        fork = None
        if group.fork is not None:
            fork = await asyncio.to_thread(self._forked, group.fork)
        try:
            view = await self._client.submit(
                group.task.id,
                sessions=names,
                id=group.group_id,
                sampling={**self._sampling, **group.sampling},
                evaluation=group.evaluates,
                fork=fork,
            )
        except ServiceError as error:
            if error.status != 409:
                raise
            view = await self._client.get(group.group_id)  # an earlier start sent it
        return {_index(name): name for name in view.session_ids}

    def _forked(self, source: RecordedFrom) -> tuple[str, str]:
        """Return the session and the call that a group forks. Raises `RunError` and `OSError`."""
        calls = self._rows.of("calls", source.session, ("call_id", "started_at"))
        for call, started in calls:
            if started == source.until:
                return source.session, call
        raise RunError(f"{self._run} has no call of {source.session} at {source.until}")

    async def _result(
        self, group: Group, sent: asyncio.Task[dict[int | None, str]]
    ) -> dict[int | None, Session]:
        await sent
        view: GroupView = await self._client.wait(group.group_id)
        if not view.sessions:  # none began, and the folder may have no run yet
            return {}
        table = self._tables[group.evaluates]
        rows = await asyncio.to_thread(table.refresh)
        found = {}
        for session in view.sessions:
            if session.session_id in rows:  # one that a kill interrupted gets its row later
                index = _index(session.session_id)
                found[index] = rows[session.session_id]
        return found

    async def _stop(self, there: _SentGroup, group_id: str, index: int | None) -> Session | None:
        """Stop a session. Return its row when its group has ended; None when it did not begin."""
        places = await asyncio.shield(there.sent)
        if index in places:
            await self._client.cancel_session(group_id, places[index])
        rows = await asyncio.shield(there.ended)
        return rows.get(index)


def _look_at(ended: asyncio.Task[dict[int | None, Session]]) -> None:
    """Take the error of a group that could not be sent: its sessions raise it."""
    if not ended.cancelled():
        ended.exception()


def _index(session_id: str) -> int | None:
    """Return a session's index in its group; None for a session that no training named."""
    seat = SessionName.parse(session_id).seat
    if seat is None:
        return None
    return seat.index


class ServiceWorker:
    """Runs groups of sessions on the service at `url`, as `Worker` runs them in this process.

    `out` is the training's run folder and the service's; `options` are the recorder's that the
    training needs. The methods raise `ServiceError` when the service refuses a group or does not
    answer.
    """

    def __init__(
        self,
        url: str,
        *,
        harness: str,
        engine: str,
        out: Path,
        options: Mapping[str, Any],
    ) -> None:
        self.harness = Harness.load(harness)
        self._client = Client(url, token_file=out / TOKEN_FILE)
        self._engine = engine
        self._out = out
        self._options = dict(options)
        self._sampling: dict[str, float] = json.loads(self._options.pop("rolltap_sampling"))

    def fit(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks.

        Raises `InputError` when the service runs others, elsewhere, or with another program.
        """
        service = self._client.service()
        where = f"the service at {self._client.url}"
        for name, digest in sorted((task.id, task.digest()) for task in tasks):
            if service["tasks"].get(name) != digest:
                raise InputError(f"{where} has not the task {name!r} as it is: restart it")
        theirs = service["options"]
        # all of the sampling but a seed is replaced
        seed = json.loads(theirs.get("rolltap_sampling", "{}")).get("seed")
        run = str(Path(service["run"]).resolve())
        engines = sorted(service["engine"].split(","))
        options = {name: theirs.get(name) for name in self._options}
        for what, there, here in (
            ("run folder", run, str(self._out.resolve())),
            ("harness", service["harness"], self.harness.name),
            ("engines", engines, sorted(self._engine.split(","))),
            ("seed", seed, None),
            ("options", options, self._options),
        ):
            if there != here:
                differs = f"has the {what} {there}, and the training {here}"
                raise InputError(f"{where} {differs}: start both with the same")
        return list(tasks)

    async def build(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks: the service has built their images."""
        return list(tasks)

    def __enter__(self) -> Self:
        """Wait until the service can run sessions: its recorder makes the run folder.

        Raises `ServiceError`.
        """
        problems: list[str] = []
        for pause in backoff(*PAUSES):
            problems = self._client.health()["problems"]
            if not problems:
                return self
            if pause is not None:
                time.sleep(pause)
        what = f"the service at {self._client.url} cannot run sessions"
        raise ServiceError(f"{what}: {'; '.join(problems)}")

    def __exit__(self, *error: object) -> None:
        """Leave the groups that run: the next start finds them at the service."""

    def runner(
        self,
        advance: Advance,
        *,
        share: float = 0.0,
        ended: OnEnd = lambda *_: None,
        lost: OnLost | None = None,
    ) -> GroupRunner:
        """Return a runner for groups that come one after the other: see `Worker.runner`.

        The service has the retries and the share of groups that evaluate.
        """
        node = ServiceNode(self._client.asynchronous, self._out, self._sampling)
        return _ServiceRunner(node, advance, ended=ended, lost=lost)


class _ServiceRunner(GroupRunner):
    """A runner whose end is not that of its sessions."""

    def __init__(
        self,
        node: ServiceNode,
        advance: Advance,
        *,
        ended: OnEnd,
        lost: OnLost | None,
    ) -> None:
        never = sys.maxsize
        super().__init__(
            [node],
            advance,
            retries=0,
            give_up_after=never,
            ended=ended,
            lost=lost,
        )
        self._node = node

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._node.leaves = kind is not None
        await super().__aexit__(kind, value, traceback)
