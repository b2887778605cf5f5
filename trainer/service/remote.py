"""Sessions of a training that a rollout service runs: what the training has instead of a `Worker`.

The service records into the training's run folder, so traces, policy and sessions are read and written there as ever.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rolltap.addons.errors import InputError, ServiceError
from rolltap.addons.store.records import Session
from rolltap.trainer.concurrency import backoff
from rolltap.trainer.console import Advance
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.resume import Group, place_of
from rolltap.trainer.service.client import PAUSES, AsyncClient, Client
from rolltap.trainer.service.serve import TOKEN_FILE
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionTable


class RemoteWorker:
    """Runs groups of sessions on the service at `url`, as `Worker` runs them in this process.

    `out` is the training's run folder and the service's; `options` are the recorder's that the training needs. The
    methods raise `ServiceError` when the service refuses a group or does not answer.
    """

    def __init__(self, url: str, *, harness: str, engine: str, out: Path, options: Mapping[str, Any]) -> None:
        self.harness = Harness.load(harness)
        self._client = Client(url, token_file=out / TOKEN_FILE)
        self._engine, self._out, self._options = engine, out, dict(options)
        self._sampling: dict[str, float] = json.loads(self._options.pop("rolltap_sampling"))
        self._sessions = SessionTable(out)

    def fit(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks. Raises `InputError` when the service runs others, elsewhere, or with another program."""
        service = self._client.service()
        sampling = json.loads(service["options"].get("rolltap_sampling", "{}"))  # all but a seed is replaced
        known, own = service["tasks"], {task.id: task.digest() for task in tasks}
        if differing := sorted(name for name, digest in own.items() if known.get(name) != digest):
            raise InputError(
                f"the service at {self._client.url} has not the task {differing[0]!r} as it is: restart it"
            )
        for name, theirs, ours in (
            ("run folder", str(Path(service["run"]).resolve()), str(self._out.resolve())),
            ("harness", service["harness"], self.harness.name),
            ("engines", sorted(service["engine"].split(",")), sorted(self._engine.split(","))),
            ("seed", sampling.get("seed"), None),
            ("options", {name: service["options"].get(name) for name in self._options}, self._options),
        ):
            if theirs != ours:
                what = f"the service at {self._client.url} has the {name} {theirs}, and the training {ours}"
                raise InputError(f"{what}: start both with the same")
        return list(tasks)

    async def build(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks: the service has built their images."""
        return list(tasks)

    def __enter__(self) -> Self:
        """Wait until the service can run sessions: its recorder makes the run folder. Raises `ServiceError`."""
        for pause in backoff(*PAUSES):
            if not (problems := self._client.health()["problems"]):
                return self
            if pause is not None:
                time.sleep(pause)
        raise ServiceError(f"the service at {self._client.url} cannot run sessions: {'; '.join(problems)}")

    def __exit__(self, *error: object) -> None:
        """Leave the groups that run: the next start finds them at the service."""

    def runner(self, advance: Advance, **_: Any) -> "RemoteSchedule":
        """Return a schedule for groups that come one after the other."""
        return RemoteSchedule(self._client.asynchronous, self._sessions, self._sampling, advance)


class RemoteSchedule:
    """Groups that run on a service beside each other, as a `GroupRunner` runs them. An async context manager."""

    def __init__(
        self,
        client: AsyncClient,
        sessions: SessionTable,
        sampling: dict[str, float],
        advance: Advance,
    ) -> None:
        self._client = client
        self._sessions = sessions
        self._sampling = sampling
        self._advance = advance
        self._waiting: set[asyncio.Task[list[Session]]] = set()
        self._ended = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for waiting in self._waiting:
            waiting.cancel()

    async def submit(self, group: Group, *_: Any, **__: Any) -> asyncio.Future[list[Session]]:
        """Take a group. The result are its sessions, all attempts. One that an earlier start sent is taken up."""
        names = [place_of(name).removeprefix(f"{group.group_id}-") for name in group.session_ids]
        try:
            if names:
                await self._client.submit(group.task.id, sessions=names, id=group.group_id, sampling=self._sampling)
        except ServiceError as error:
            if error.status != 409:  # sent with other names
                raise
        waiting = asyncio.create_task(self._result(group.group_id if names else None))
        self._waiting.add(waiting)
        waiting.add_done_callback(self._over)
        self._tell()
        return waiting

    def cancel_running(self, too_old: Callable[[str], bool], why: str) -> None:
        """Leave them: their tokens are `stale` when they end."""

    @property
    def running(self) -> int:
        """Number of groups that have not ended."""
        return len(self._waiting)

    async def _result(self, name: str | None) -> list[Session]:
        if name is None:
            return []
        view = await self._client.wait(name)
        rows = await asyncio.to_thread(self._sessions.refresh)
        return [rows[session.session_id] for session in view.sessions]

    def _over(self, waiting: asyncio.Task[list[Session]]) -> None:
        self._waiting.discard(waiting)
        self._ended += 1
        self._tell()

    def _tell(self) -> None:
        self._advance("groups of the service", self._ended, self._ended + len(self._waiting))
