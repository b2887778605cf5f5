"""The load: concurrent connections. Each plays one session whose conversation grows, as a harness
does."""

import asyncio
import contextlib
import itertools
import json
import re
import time
from dataclasses import dataclass, field

import aiohttp

from tests.bench.engines import FIRST_PACED
from tests.bench.processes import Mitmdump

URL = "https://api.openai.com/v1/chat/completions"
_TEXT = re.compile(rb'"content": ?"[^"]')
_numbers = itertools.count(FIRST_PACED)
_sessions = itertools.count()


@dataclass
class Timings:
    """Times as the clients measured them, in seconds."""

    wall: float = 0.0
    cpu: float = 0.0
    requests: list[float] = field(default_factory=list)
    headers: list[float] = field(default_factory=list)
    first_deltas: dict[int, float] = field(default_factory=dict)
    """Request number -> time of the first text, by the clock of the engine's `/times`."""


class Client:
    """One connection and session. `opening` is the body of its first request."""

    def __init__(self, proxy: Mitmdump, opening: dict, timings: Timings) -> None:
        self._timings = timings
        self._body = {**opening, "messages": list(opening["messages"])}
        self._options = proxy.options(f"s{next(_sessions)}", proxy.context())

    async def __aenter__(self):
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        return self

    async def __aexit__(self, *_):
        await self._session.close()

    async def turn(self) -> None:
        """Send the conversation and append the reply and the next message to it."""
        started = time.perf_counter()
        async with self.post(self._body) as response:
            answer = await response.read()
        self._timings.requests.append(time.perf_counter() - started)
        assert response.status == 200, answer
        reply = json.loads(answer)["choices"][0]["message"]
        self._body["messages"] += [reply, {"role": "user", "content": "Go on."}]

    async def streamed(self) -> None:
        """Send the conversation and read the streamed reply. The conversation is not changed."""
        number = next(_numbers)
        received = b""
        started = time.perf_counter()
        async with self.post({**self._body, "stream": True, "max_tokens": number}) as response:
            self._timings.headers.append(time.perf_counter() - started)
            async for data in response.content.iter_any():
                received += data
                if number not in self._timings.first_deltas and _TEXT.search(received):
                    self._timings.first_deltas[number] = time.monotonic()
        self._timings.requests.append(time.perf_counter() - started)
        assert received.endswith(b"data: [DONE]\n\n"), received[-500:]

    def post(self, body: dict):
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer x"}
        return self._session.post(URL, data=data, headers=headers, **self._options)


async def play(
    proxy: Mitmdump, opening: dict, *, connections: int, turns: int, paced_seconds: float = 0.0
) -> Timings:
    """Open `connections` sessions and play `turns` requests on each, concurrently.

    The first request of each session is not measured: no proxy knows its prefix. With
    `paced_seconds` the replies are streamed and the starts are spread over that time.
    """
    timings = Timings()

    async def take_turns(client: Client, start: float) -> None:
        await asyncio.sleep(start)
        for _ in range(turns):
            await (client.streamed() if paced_seconds else client.turn())

    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(connections):
            client = Client(proxy, opening, timings)
            clients.append(await stack.enter_async_context(client))
        await asyncio.gather(*(client.turn() for client in clients))
        timings.requests.clear()
        started = time.perf_counter()
        cpu = proxy.cpu_seconds()
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(take_turns(client, paced_seconds * number / connections))
        timings.wall = time.perf_counter() - started
        timings.cpu = proxy.cpu_seconds() - cpu
    return timings
