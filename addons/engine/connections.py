"""The connections to one vLLM server: bounded requests, and whether the server is healthy.

The engine is not trusted: it may send any number of bytes, and quote the key.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

import aiohttp
import orjson

from rolltap.addons.engine.key import authorization
from rolltap.addons.errors import EngineError

T = TypeVar("T")
Object = dict[str, Any]

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 10.0
"""Seconds without a byte of a generation after which the engine is asked for its health, as often
as that passes. There is no limit on a generation: its prefill may be long, or it may queue behind a
weight update."""
HEALTH_SECONDS = 5.0
"""Time limit of one such question. It is asked twice, because the recorder itself may have stood
still meanwhile: an engine that says nothing is found out after 20 to 30 s."""
KEEP_ALIVE_SECONDS = 4.0
"""Seconds for which an idle connection is kept for the next request. vLLM closes it after 5."""
MOST_BYTES = 1 << 20
"""Maximum size of an event or an answer of an engine. A token takes 150 bytes: an event has 8 of
them, and more when vLLM joins those that nobody has read. Of JSON it is at most the number of
values that a request may have."""


class Shared(Generic[T]):
    """A question that is asked once at a time: all who ask meanwhile get one answer or error."""

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
        running = self._running
        if running is not None:
            running.cancel()
            await asyncio.wait([running])

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # asyncio logs errors that nobody has seen: the callers may be gone


class Connections:
    """Requests to the vLLM server at `url`, each with `key`. Needs a running event loop."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.healthy = Shared(self._healthy)
        """Returns True when the engine answers `/health`, as vLLM does also while it is paused."""
        self._http = aiohttp.ClientSession(
            headers={"accept-encoding": "identity", **authorization(key)},
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_socket_with_probes
            ),
        )

    async def close(self) -> None:
        """Close the connections. Running requests raise `EngineError`."""
        await self.healthy.close()
        await self._http.close()

    async def ask(self, path: str, body: Object | None = None) -> tuple[int, Object]:
        """Get a path, or post a body to it. Return a status and a JSON object, empty for any other
        answer. Raises `EngineError` without an answer, once the engine is not healthy."""
        method = "GET" if body is None else "POST"
        limit = aiohttp.ClientTimeout(SILENCE_SECONDS)
        while True:
            try:
                async with await self.request(method, path, json=body, timeout=limit) as response:
                    status = response.status
                    text = await self.read(response)
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                # without an answer in time the request may be lost
                if not isinstance(error, TimeoutError) or not await self.healthy():
                    raise self.failed("cannot be reached", error) from error
        answer = None
        if status == 200:
            with suppress(ValueError):
                answer = orjson.loads(text)
        if not isinstance(answer, dict):
            answer = {}
        return status, answer

    async def request(self, method: str, path: str, **how: Any) -> aiohttp.ClientResponse:
        """Return a response, once its headers have arrived. Raises `EngineError` if it is
        compressed."""
        response = await self._http.request(method, self.url + path, allow_redirects=False, **how)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise self.error("sent a compressed reply, which was not asked for")
        return response

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of a response. Raises `EngineError` for more than `MOST_BYTES`."""
        body = bytearray()
        async for received in response.content.iter_any():
            body += received
            self._require(len(body), MOST_BYTES)
        return bytes(body)

    async def events(
        self,
        response: aiohttp.ClientResponse,
        most: int,
        most_in_all: int,
    ) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event.

        Raises `EngineError` for a line of more than `most` bytes, and for more than `most_in_all`.
        """
        line = bytearray()
        total = 0
        async for received in response.content.iter_any():
            total += len(received)
            self._require(total, most_in_all)
            for part in received.splitlines(keepends=True):
                line += part
                self._require(len(line), most)
                if not line.endswith(b"\n"):
                    continue
                if line.startswith(b"data:"):
                    yield bytes(line[5:]).strip()
                line.clear()

    async def watch(self, content: aiohttp.StreamReader) -> None:
        """Make the reader of `content` raise `EngineError` once nothing arrives and the engine is
        not healthy."""
        while True:
            seen = content.total_bytes
            await asyncio.sleep(SILENCE_SECONDS)
            if seen != content.total_bytes or await self.healthy():
                continue
            if seen == content.total_bytes:
                return content.set_exception(self.silent())

    async def end_once_silent(self, limit: asyncio.Timeout) -> None:
        """End `limit` once the engine is not healthy."""
        while True:
            await asyncio.sleep(SILENCE_SECONDS)
            if not await self.healthy():
                return limit.reschedule(asyncio.get_running_loop().time())

    async def _healthy(self) -> bool:
        for _ in range(2):
            with suppress(aiohttp.ClientError, TimeoutError, EngineError):
                limit = aiohttp.ClientTimeout(HEALTH_SECONDS)
                async with await self.request("GET", "/health", timeout=limit) as response:
                    return response.status < 500
        return False

    def _require(self, num_bytes: int, most: int) -> None:
        if num_bytes > most:
            raise self.error(f"sent more than {most:,} bytes at once")

    def silent(self) -> EngineError:
        """Return the error of an engine that is not healthy."""
        words = "says nothing: neither a token nor an answer to /health"
        return self.error(words, status=503, retryable=True)

    def failed(self, why: str, error: Exception) -> EngineError:
        """Return the error of a failed connection. What aiohttp says of a reply quotes it, so it is
        left out. A time limit of ours ends an engine that is not healthy."""
        if type(error) is TimeoutError:
            return self.silent()
        words = str(error) if isinstance(error, OSError) else ""
        return self.error(f"{why}: {words or type(error).__name__}", status=503, retryable=True)

    def error(self, words: str, *, status: int = 502, **fields: Any) -> EngineError:
        """Return an `EngineError` of this engine, with these fields."""
        return EngineError(f"the engine at {self.url} {words}", status=status, **fields)


def _socket_with_probes(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that notices within 40 s that the engine's machine is gone, though nothing is
    sent on it."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return opened
