"""Clients of the rollout service: `AsyncClient` for event loops, and `Client` for blocking code.

Every request may be sent twice: a group has a key, and the other requests say what shall be. So a
request whose answer is lost is sent again, and a stream of events that breaks is opened again where
it broke.
"""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx

from rolltap.addons.engine.key import authorization
from rolltap.addons.engine.policy import Policy
from rolltap.addons.errors import InputError, ServiceError
from rolltap.addons.store.records import VersionSpan
from rolltap.trainer.concurrency import backoff
from rolltap.trainer.service.requests import GroupView
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.build import KindSpan, Strategy, Trace
from rolltap.trainer.traces.ledger import Ledger

P = ParamSpec("P")
T = TypeVar("T")

PAUSES = (8, 0.25, 8.0)
"""Arguments of `backoff`: a service that is not reached is given up after half a minute."""
_TIMEOUT = httpx.Timeout(120.0, connect=10.0)
"""Timeouts of a request. A service that accepts requests and answers none is given up after nine
of them. In a stream of events a silent service sends a comment every 15 seconds."""
_WAIT_SECONDS = 60
"""Time for which the service waits for the end of a group before it answers: its longest."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a service.

    `kind` is `accepted`, `session`, `cancelled` or `ended`, of the group `data["id"]`; or `policy`.
    `cancelled` with a `session_id` is of this session alone.
    """

    cursor: str
    """Place in the stream: `events(after=cursor)` begins after it."""
    kind: str
    data: dict[str, Any]


class AsyncClient:
    """Client of a rollout service (`rolltap service`), for event loops.

    `token` is the service's token; `token_file` is the file that holds it. Raises `InputError` for
    a URL without a scheme, and for a file that cannot be read. Methods raise `ServiceError` when
    the service refuses a request, with its message and HTTP status, when it is not reached for half
    a minute, and when it answers none of nine requests in two minutes each.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"the service's URL is {url!r}: begin it with http:// or https://")
        if token_file is not None:
            token = _read_token(Path(token_file))
        self.url = url.rstrip("/")
        # Without keep-alive nothing is left to close. No environment: the service is reached
        # directly.
        self._http = httpx.AsyncClient(
            headers=authorization(token),
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def submit(
        self,
        task: str | Task | Mapping[str, Any],
        *,
        sessions: int | Sequence[str] = 8,
        id: str | None = None,
        priority: int = 50,
        deadline: datetime | None = None,
        sampling: Mapping[str, float] | None = None,
        evaluation: bool = False,
        fork: tuple[str, str] | None = None,
    ) -> GroupView:
        """Let the service roll out a task several times, and return the group as it was accepted.

        `task` is the id of a task that the service has loaded, or a task. `fork` is the id of a
        recorded session of the service's run and the id of one of its calls: the sessions repeat
        the recorded one up to this call. The other arguments are the fields of `GroupRequest`. By
        default `id` is new: two calls are two groups, and the same `id` again is the same group.
        """
        body: dict[str, Any] = {
            "task": task,
            "sessions": sessions,
            "id": id or uuid4().hex,
            "priority": priority,
            "sampling": sampling or {},
            "evaluation": evaluation,
        }
        if isinstance(task, Task):
            body["task"] = task.model_dump(mode="json", exclude_none=True)
        if not isinstance(sessions, int):
            body["sessions"] = list(sessions)
        if deadline is not None:
            body["deadline"] = deadline.isoformat()
        if fork is not None:
            session, call = fork
            body["fork"] = {"session": session, "call": call}
        return GroupView.model_validate(await self._ask("POST", "/groups", body))

    async def get(self, id: str) -> GroupView:
        """Return a group."""
        return GroupView.model_validate(await self._ask("GET", _group_path(id)))

    async def cancel(self, id: str) -> GroupView:
        """Stop a group's sessions, and let no further one begin.

        Returns the group, whose sessions may be ending.
        """
        return GroupView.model_validate(await self._ask("DELETE", _group_path(id)))

    async def cancel_session(self, id: str, session_id: str) -> GroupView:
        """Stop one session of a group, and let no further attempt at it begin.

        Returns the group. The session may be ending.
        """
        path = f"{_group_path(id)}/sessions/{quote(session_id, safe='')}"
        return GroupView.model_validate(await self._ask("DELETE", path))

    async def wait(self, id: str, timeout: float | None = None) -> GroupView:
        """Return a group when all its sessions have ended.

        Raises `TimeoutError` after `timeout` seconds, and `ServiceError` for a group that is not
        run: its message has the group's `problem`.
        """
        path = f"{_group_path(id)}?wait={_WAIT_SECONDS}"
        async with asyncio.timeout(timeout):
            while True:
                view = GroupView.model_validate(await self._ask("GET", path))
                if view.ended_at is not None:
                    return view
                if view.problem is not None and view.state == "open":
                    raise ServiceError(f"the group {id} is not run: {view.problem}")

    async def events(self, after: str | None = None) -> AsyncIterator[Event]:
        """Yield the service's events after a cursor, without end.

        By default they begin with the first one of the run.
        """
        pauses = backoff(*PAUSES)
        while True:
            error: Exception | None = None
            params: dict[str, str] = {}
            if after:
                params["after"] = after
            url = f"{self.url}/events"
            try:
                async with self._http.stream("GET", url, params=params) as response:
                    await _check(response)
                    rest = b""
                    async for chunk in response.aiter_bytes():
                        pauses = backoff(*PAUSES)
                        *blocks, rest = (rest + chunk).split(b"\n\n")
                        for block in blocks:
                            event = _event(block)
                            if event is not None:
                                after = event.cursor
                                yield event
            except httpx.TransportError as broken:
                error = broken
            await self._pause(pauses, error)

    async def policy(self, version: str | None = None, adapter: str | None = None) -> Policy:
        """Let sessions that begin from now on use an adapter of the engines, and return the policy.

        None is the base model. Their tokens are named by `version`. Without a version, the policy
        is only returned.
        """
        if version is None:
            return Policy(**await self._ask("GET", "/policy"))
        body = {"version": version, "adapter": adapter}
        return Policy(**await self._ask("POST", "/policy", body))

    async def service(self) -> dict[str, Any]:
        """Return what the service rolls out with.

        The keys are `run`, `harness`, `model`, `engine`, `tasks`, `policy` and more.
        """
        return dict(await self._ask("GET", "/service"))

    async def health(self) -> dict[str, Any]:
        """Return `ok`, whether the service can roll out; `problems`, what keeps it from it; and
        `warnings`, what is wrong beside that, as one silent engine of several. Needs no token."""
        return dict(await self._ask("GET", "/health", expected=503))

    async def traces(
        self,
        id: str,
        strategy: Strategy = "prefix_merging",
    ) -> tuple[list[Trace], Ledger]:
        """Return the traces of a small group and the ledger of its tokens, over HTTP.

        Those of more than 200,000 tokens are refused with status 413: read them in the run folder
        that the view names.
        """
        answer = await self._ask("GET", f"{_group_path(id)}/traces?strategy={strategy}")
        traces = []
        for fields in answer["traces"]:
            fields["weight_versions"] = [VersionSpan(**span) for span in fields["weight_versions"]]
            fields["continuity"] = [KindSpan(**span) for span in fields["continuity"]]
            traces.append(Trace(**fields))
        return traces, Ledger(**answer["ledger"])

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        expected: int = 200,
    ) -> Any:
        """Send a request until it is answered, and return the JSON of the answer."""
        pauses = backoff(*PAUSES)
        while True:
            try:
                response = await self._http.request(method, self.url + path, json=body)
            except httpx.TransportError as error:
                await self._pause(pauses, error)
            else:
                if response.status_code != expected:
                    await _check(response)
                return response.json()

    async def _pause(self, pauses: Iterator[float | None], error: Exception | None) -> None:
        pause = next(pauses)
        if pause is None:
            what = f"no rollout service answers at {self.url} ({error!r})"
            advice = "start it with `rolltap service`, or correct the URL"
            raise ServiceError(f"{what}; {advice}") from error
        await asyncio.sleep(pause)


def _read_token(file: Path) -> str:
    try:
        return file.expanduser().read_text().strip()
    except OSError as error:
        what = f"the token file {file} cannot be read: {error.strerror}"
        raise InputError(f"{what}; give the file that `rolltap service` names") from error


def _group_path(id: str) -> str:
    return f"/groups/{quote(id, safe='')}"


_loops: dict[str, asyncio.AbstractEventLoop] = {}
"""The event loop of all `Client`s of this process, by the name of its thread."""
os.register_at_fork(after_in_child=_loops.clear)


def _loop() -> asyncio.AbstractEventLoop:
    """Return that loop. It runs in a thread until the process ends.

    Of threads that ask first at the same moment, one makes it: a pool of connections has one loop.
    """
    name = "rolltap-clients"
    if name not in _loops:
        made = asyncio.new_event_loop()
        if _loops.setdefault(name, made) is made:
            threading.Thread(target=made.run_forever, name=name, daemon=True).start()
        else:
            made.close()
    return _loops[name]


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in that loop, and return its result. An interruption cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    finally:
        future.cancel()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    @wraps(method)
    def call(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(method(client.asynchronous, *args, **kwargs))

    return call


class Client:
    """Client of a rollout service (`rolltap service`), for blocking code.

    Methods, arguments and errors are those of `AsyncClient`. It may be used by several threads, and
    needs no closing.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        self.asynchronous = AsyncClient(url, token, token_file)
        self.url = self.asynchronous.url

    submit = _blocking(AsyncClient.submit)
    get = _blocking(AsyncClient.get)
    cancel = _blocking(AsyncClient.cancel)
    cancel_session = _blocking(AsyncClient.cancel_session)
    wait = _blocking(AsyncClient.wait)
    policy = _blocking(AsyncClient.policy)
    service = _blocking(AsyncClient.service)
    health = _blocking(AsyncClient.health)
    traces = _blocking(AsyncClient.traces)

    def events(self, after: str | None = None) -> Iterator[Event]:
        """Yield the service's events after a cursor, without end.

        By default they begin with the first one of the run.
        """
        events = self.asynchronous.events(after)

        async def following() -> Event:
            return await anext(events)

        while True:
            yield finish(following())


async def _check(response: httpx.Response) -> None:
    """Raise `ServiceError` for an answer that is no success, with the service's message."""
    if response.is_success:
        return
    try:
        message = str(json.loads(await response.aread())["error"])
    except (ValueError, LookupError, TypeError):
        answer = response.text[:200]
        message = f"{response.url} answers {answer!r}: is it a rollout service?"
    raise ServiceError(f"{message} ({response.status_code})", status=response.status_code)


def _event(block: bytes) -> Event | None:
    """Return the event of a block of the stream, None for a comment."""
    fields: dict[str, str] = {}
    for line in block.decode().split("\n"):
        name, _, value = line.partition(": ")
        fields[name] = value
    if "data" not in fields:
        return None
    return Event(fields["id"], fields["event"], json.loads(fields["data"]))
