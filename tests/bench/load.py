"""The load of the soak: sessions whose conversations grow, each with a client that repeats requests
as SDKs do."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.bench.frame import prose
from tests.bench.processes import Mitmdump
from tests.bench.wire import APIS, Answer, Failure

ATTEMPTS = 12
"""Attempts of a turn. SDKs make 3, and harnesses repeat those."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0
"""Bounds of the pause before another attempt. They are those of the OpenAI and Anthropic SDKs."""
SPREAD_SECONDS = 3.0
"""Time over which the sessions begin."""
HANG_UPS = 0.15
"""Share of streamed attempts that the client ends by closing the connection, during chaos."""
_RETRYABLE = {408, 409, 429}


@dataclass
class Received:
    """A whole reply as a client received it."""

    session_id: str
    call_id: str
    text: str
    calls: list[tuple[str, Any]]
    """Name and arguments of each tool call."""
    at: float
    """When its last byte arrived, by `time.time`."""
    headers_seconds: float | None
    """From the request to the headers of a streamed reply."""


@dataclass
class Load:
    """A load, and its log. Times are `time.time`, as those of the rows are."""

    proxy: Mitmdump
    chaos: float
    """When chaos begins."""
    end: float
    """When no more turns begin."""
    replies: list[Received] = field(default_factory=list)
    errors: Counter[tuple[bool, str]] = field(default_factory=Counter)
    """(during chaos, kind of error) -> attempts that ended so."""

    async def play(self, sessions: int) -> None:
        context = self.proxy.context()
        async with asyncio.TaskGroup() as group:
            for number in range(sessions):
                options = self.proxy.options(f"soak-{number:05}", context)
                group.create_task(Session(self, number, options).play())

    def count(self, kind: str) -> None:
        self.errors[time.time() >= self.chaos, kind] += 1


class Session:
    """One session. Its number decides its API, and whether its replies are streamed."""

    def __init__(self, load: Load, number: int, options: dict[str, Any]) -> None:
        self._load = load
        self._options = options
        self._id = options["proxy_auth"].login
        self._api = APIS[number % len(APIS)]
        self._streamed = number // len(APIS) % 2 == 0
        self._rng = random.Random(number)
        opening = f"Fix the program of session {self._id}. {prose(self._rng, 300)}"
        self._items = self._api.said(opening)

    async def play(self) -> None:
        """Take turns until the end of the load, or until a turn failed for good."""
        await asyncio.sleep(self._rng.uniform(0, SPREAD_SECONDS))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
        async with aiohttp.ClientSession(timeout=timeout) as self._http:
            while time.time() < self._load.end:
                answer = await self._reply()
                if answer is None:
                    return self._load.count("a turn without a reply")
                text = prose(self._rng, self._rng.randint(10, 150))
                self._items = [*self._items, *answer.items, *self._api.next(answer, text)]
                await asyncio.sleep(self._rng.uniform(0, 1))

    async def _reply(self) -> Answer | None:
        """Return a reply, or None when no attempt succeeded."""
        retries = 0
        """The count of SDKs: repetitions of a request that got no headers."""
        for attempt in range(ATTEMPTS):
            self._begun = False
            try:
                return await self._attempt(retries)
            except Failure as error:
                failure = error
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = Failure(type(error).__name__)
            self._load.count(failure.kind)
            if not failure.retryable:
                return None
            retries = 0 if self._begun else retries + 1
            pause = min(FIRST_PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS)
            await asyncio.sleep(max(failure.after, pause * self._rng.uniform(0.75, 1)))
        return None

    async def _attempt(self, retries: int) -> Answer:
        api = self._api
        streamed = self._streamed
        data = json.dumps(api.body(self._items, streamed)).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer x", **api.headers}
        if api.name != "google":
            headers["x-stainless-retry-count"] = str(retries)
        in_chaos = streamed and time.time() >= self._load.chaos
        hang_up = in_chaos and self._rng.random() < HANG_UPS
        started = time.monotonic()
        asked = self._http.post(api.url(streamed), data=data, headers=headers, **self._options)
        async with asked as response:
            waited = time.monotonic() - started
            if response.status != 200:
                await response.read()
                after = float(response.headers.get("retry-after", 0))
                retryable = response.status >= 500 or response.status in _RETRYABLE
                raise Failure(f"status {response.status}", retryable=retryable, after=after)
            self._begun = True
            if hang_up:
                await self._hang_up(response)
            body = await response.read()
        answer = api.read(body, streamed)
        received = Received(
            session_id=self._id,
            call_id=response.headers["x-request-id"],
            text=answer.text,
            calls=[(name, arguments) for _, name, arguments in answer.calls],
            at=time.time(),
            headers_seconds=waited if streamed else None,
        )
        self._load.replies.append(received)
        return answer

    async def _hang_up(self, response: aiohttp.ClientResponse) -> None:
        """Close the connection in the middle of the stream. Raises `Failure`, also when the stream
        ends before."""
        for _ in range(self._rng.randint(1, 10)):
            if not await response.content.readany():
                raise Failure("a stream without an end")
        response.close()
        raise Failure("hung up on purpose")
