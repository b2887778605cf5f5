"""The connections to one vLLM server: its health and short questions, asked once for all who wait; and the pauses
between the retries of a call.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import aiohttp
import orjson

from rolltap.addons.concurrency import backoff
from rolltap.addons.engine.key import authorization
from rolltap.addons.errors import EngineError

T = TypeVar("T")

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 10.0
"""Seconds without a byte of a generation after which the engine is asked for its health, as often as that passes. There
is no limit on a generation: its prefill may be long, or it may queue behind a weight update."""
HEALTH_SECONDS = 5.0
"""Time limit of one such question. It is asked twice, because the recorder itself may have stood still meanwhile: an
engine that says nothing is found out after 20 to 30 s."""
KEEP_ALIVE_SECONDS = 4.0
"""Seconds for which an idle connection is kept for the next request. vLLM closes it after 5."""
MOST_BYTES = 1 << 20
"""Maximum size of an event or an answer of an engine. A token takes 150 bytes: an event has 8 of them, and more when
vLLM joins those that nobody has read. Of JSON it is at most the number of values that a request may have."""
MOST_ROUTED_BYTES = 1 << 30
"""Maximum size of an event with the experts of all tokens of a request: some 500 bytes for each."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
"""Bounds in seconds of the pauses between the retries of a call."""


class Connections:
    """The connections to the vLLM server at `url`. `key` is sent with each request. Needs a running event loop.

    The engine is not trusted: it may send any number of bytes, and quote the key.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self.session = aiohttp.ClientSession(
            headers={"accept-encoding": "identity", **authorization(key)},
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_socket_with_probes
            ),
        )
        self.healthy = Shared(self._healthy)
        """Returns True when the engine answers `/health`, which vLLM does also while it is paused."""
        self.resumed = Shared(self._resumed)
        """Returns when the engine is not paused, or does not say that it is: the next request finds out."""

    async def close(self) -> None:
        """Close them. What runs raises `EngineError`."""
        await self.healthy.close()
        await self.resumed.close()
        await self.session.close()

    async def request(self, method: str, path: str, **how: Any) -> aiohttp.ClientResponse:
        """Return a response whose headers have arrived. Raises `EngineError` for one that is compressed."""
        response = await self.session.request(method, self.url + path, allow_redirects=False, **how)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise EngineError(f"the engine at {self.url} sent a compressed reply, which was not asked for", status=502)
        return response

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of a response. Raises `EngineError` when it has more than `MOST_BYTES`."""
        body = bytearray()
        async for received in response.content.iter_any():
            body += received
            self._require(len(body), MOST_BYTES)
        return bytes(body)

    async def events(
        self, response: aiohttp.ClientResponse, num_tokens: int, *, routed: bool = False
    ) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event of a generation of at most `num_tokens`.

        Raises `EngineError` for a line of more than `MOST_BYTES`, `MOST_ROUTED_BYTES` with `routed`, and for more than
        that and 1 KiB a token in all.
        """
        most = MOST_ROUTED_BYTES if routed else MOST_BYTES
        line, total = bytearray(), 0
        async for received in response.content.iter_any():
            total += len(received)
            self._require(total, most + 1024 * num_tokens)
            end, *others = received.split(b"\n")
            line += end
            self._require(len(line), most)
            if others:
                for whole in (bytes(line), *others[:-1]):
                    if whole.startswith(b"data:"):
                        yield whole[5:].strip()
                line = bytearray(others[-1])

    def _require(self, num_bytes: int, most: int) -> None:
        if num_bytes > most:
            raise EngineError(f"the engine at {self.url} sent more than {most:,} bytes at once", status=502)

    def failed(self, why: str, error: Exception) -> EngineError:
        """Return the error of a failed connection. What aiohttp says of a reply quotes it, so it is left out."""
        words = str(error) if isinstance(error, OSError) else ""
        return EngineError(f"the engine at {self.url} {why}: {words or type(error).__name__}", retryable=True)

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Get a path, or post a body to it. Return a status and a JSON object, empty for any other answer.

        Raises `EngineError` without an answer, once the engine is not healthy.
        """
        method, limit = "GET" if body is None else "POST", aiohttp.ClientTimeout(SILENCE_SECONDS)
        while True:
            try:
                async with await self.request(method, path, json=body, timeout=limit) as response:
                    status, text = response.status, await self.read(response)
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                if isinstance(error, TimeoutError) and await self.healthy():
                    continue  # the request may be lost
                raise self.failed("cannot be reached", error) from error
        try:
            answer = orjson.loads(text) if status == 200 else {}
        except ValueError:
            answer = {}
        return status, answer if isinstance(answer, dict) else {}

    @asynccontextmanager
    async def while_healthy(self) -> AsyncIterator[None]:
        """End what runs inside with an `EngineError` once it takes long and the engine is not healthy."""
        try:
            async with asyncio.timeout(None) as limit:
                watch = asyncio.create_task(self._expire(limit))
                try:
                    yield
                finally:
                    watch.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.silent() from None

    async def _expire(self, limit: asyncio.Timeout) -> None:
        while True:
            await asyncio.sleep(SILENCE_SECONDS)
            if not await self.healthy():
                return limit.reschedule(asyncio.get_running_loop().time())

    def silent(self) -> EngineError:
        """Return the error of an engine that is not healthy."""
        why = "says nothing: neither a token nor an answer to /health"
        return EngineError(f"the engine at {self.url} {why}", retryable=True)

    async def _healthy(self) -> bool:
        for _ in range(2):
            with suppress(aiohttp.ClientError, TimeoutError, EngineError):
                timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
                async with await self.request("GET", "/health", timeout=timeout) as response:
                    return response.status < 500
        return False

    async def _resumed(self) -> None:
        paused = True
        while paused:
            await asyncio.sleep(FIRST_PAUSE_SECONDS)
            paused = False
            with suppress(EngineError):
                _, answer = await self.ask("/is_paused")
                paused = answer.get("is_paused") is True


class Shared(Generic[T]):
    """A question that is asked once at a time: all who ask meanwhile get the same answer or error."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._running: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """Return the answer. Cancelling one caller does not cancel the question."""
        if self._running is None:
            self._running = asyncio.create_task(self._ask())
            self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """Cancel the question that is being asked."""
        if (running := self._running) is not None:
            running.cancel()
            await asyncio.wait([running])

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # asyncio logs errors that nobody has seen: the callers may be gone


class Patience:
    """The pauses of one call between its retries, until `seconds` have passed since its first failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Begin anew, because the call went on."""
        self._pauses = backoff(None, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._failed_at: float | None = None

    async def wait(self) -> bool:
        """Pause. Returns False, without a pause, when the time would be used up at its end."""
        now = asyncio.get_running_loop().time()
        if self._failed_at is None:
            self._failed_at = now
        pause = next(self._pauses)
        if pause is None or now - self._failed_at + pause > self._seconds:
            return False
        await asyncio.sleep(pause)
        return True


def _socket_with_probes(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that notices within 40 s that the engine's machine is gone, though nothing is sent on it."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened
