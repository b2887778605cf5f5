"""Many conversations over one pair of pipes. With the standard library only.

A frame is its stream's number, its kind, its length (big-endian, 4, 1 and 4 bytes) and its content.
One side opens streams, the other side serves each of them in a task. To close a stream ends its
task, and the answer says that the task has ended. Each side says that it is alive; one that is
silent for too long is lost.
"""

import asyncio
import json
import struct
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import IO, Any

CHUNK = 64 << 10
STARTED = b"rolltap: boxes can be made\n"
"""First line of the side that serves. Lines before it are of the user's shell."""
ALIVE_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""Time without a byte after which the other side is lost."""
END_SECONDS = 600.0
"""Longest wait for the end of a stream's task. One that hangs ends with the connection."""
_LOOK_SECONDS = 1.0
_HEADER = struct.Struct(">IBI")
_OPEN = 0
_MESSAGE = 1
_DATA = 2
_CLOSE = 3
_ALIVE = 4
_MAX_BYTES = 256 << 20
"""Most bytes of a frame. The longest has the paths of a workspace."""
_QUEUED = 64
"""Most frames that wait for the reader of a stream. Then all streams wait for it."""

Received = dict[str, Any] | bytes
"""A message; or bytes, none at the end of what is sent together."""


class LostError(ConnectionError):
    """The connection, or the stream, has ended."""


class Stream:
    """One conversation: messages and bytes, which arrive in order."""

    def __init__(self, connection: "Connection", number: int) -> None:
        self._connection = connection
        self._number = number
        self._frames: asyncio.Queue[Received] = asyncio.Queue(_QUEUED)
        self._is_leaving = False
        self._ended = asyncio.Event()
        self.patience: float | None = None
        """Longest wait for a frame, in seconds. A side may be alive and not answer."""

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, which is JSON. Raises `LostError`."""
        await self._connection.write(_MESSAGE, self._number, json.dumps(message).encode())

    async def send_bytes(self, content: bytes) -> None:
        """Send bytes. Raises `LostError`."""
        for begin in range(0, len(content), CHUNK):
            await self._connection.write(_DATA, self._number, content[begin : begin + CHUNK])

    async def send_end(self) -> None:
        """Say that all bytes were sent. Raises `LostError`."""
        await self._connection.write(_DATA, self._number, b"")

    async def send_file(self, file: IO[bytes]) -> None:
        """Send what follows in a file, and its end. Raises `LostError`."""
        while chunk := file.read(CHUNK):
            await self.send_bytes(chunk)
        await self.send_end()

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises `LostError`."""
        received = await self._next()
        if not isinstance(received, dict):
            raise LostError("bytes came in place of a message")
        return received

    async def receive_bytes(self) -> bytes:
        """Return the next bytes, none at their end. Raises `LostError`."""
        received = await self._next()
        if not isinstance(received, bytes):
            raise LostError("a message came in place of bytes")
        return received

    async def close(self) -> None:
        """End the stream, and wait until the other side's task has ended, is lost or hangs."""
        self._is_leaving = True
        while not self._frames.empty():  # the reader of all streams may wait for room
            self._frames.get_nowait()
        with suppress(LostError, TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._connection.write(_CLOSE, self._number, b"")
                await self._ended.wait()
        self._connection.forget(self._number)

    async def take(self, received: Received) -> None:
        """Let the stream have a frame."""
        if not self._is_leaving:
            await self._frames.put(received)

    def end(self) -> None:
        """Let the stream end: nothing more comes."""
        self._ended.set()

    async def _next(self) -> Received:
        if self._frames.empty() and not self._ended.is_set():
            coming = asyncio.ensure_future(self._frames.get())
            ended = asyncio.ensure_future(self._ended.wait())
            first = asyncio.FIRST_COMPLETED
            try:
                await asyncio.wait([coming, ended], timeout=self.patience, return_when=first)
                if coming.done():
                    return coming.result()
                if not ended.done():
                    raise LostError(f"it is alive, and sent nothing for {self.patience:g} s")
            finally:
                coming.cancel()
                ended.cancel()
        if self._frames.empty():
            raise LostError(self._connection.why or "the other side has ended it")
        return self._frames.get_nowait()


class Connection:
    """One side of a pair of pipes. `serve` is called for each stream that the other side opens."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        serve: Callable[[Stream], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._serve = serve
        self._streams: dict[int, Stream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._opened = 0
        self._turn = asyncio.Lock()
        self.why = ""
        """Why the connection is lost; empty as long as it is not."""

    async def run(self) -> None:
        """Take frames until the connection is lost. Then all tasks of its streams end."""
        alive = asyncio.create_task(self._stay_alive())
        try:
            await self._take_frames()
        except (OSError, ValueError) as error:
            self.why = str(error)
        finally:
            self.why = self.why or "it was closed"
            if not self._writer.is_closing():  # asyncio cannot abort what is closed
                self._writer.transport.abort()  # a side that takes nothing keeps no writer waiting
            alive.cancel()
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            for stream in self._streams.values():
                stream.end()
            await asyncio.gather(alive, *tasks, return_exceptions=True)

    async def open(self, message: Mapping[str, Any]) -> Stream:
        """Return a new stream, which begins with a message. Raises `LostError`."""
        self._opened += 1
        stream = Stream(self, self._opened)
        self._streams[self._opened] = stream
        await self.write(_OPEN, self._opened, json.dumps(message).encode())
        return stream

    async def write(self, kind: int, number: int, content: bytes) -> None:
        """Write a frame. Raises `LostError`."""
        if self.why:
            raise LostError(self.why)
        try:
            async with self._turn:
                self._writer.write(_HEADER.pack(number, kind, len(content)) + content)
                await self._writer.drain()
        except OSError as error:
            raise LostError(str(error)) from error

    def forget(self, number: int) -> None:
        """Forget a stream that has ended."""
        self._streams.pop(number, None)

    async def _stay_alive(self) -> None:
        with suppress(LostError):
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                await self.write(_ALIVE, 0, b"")

    async def _take_frames(self) -> None:
        while True:
            number, kind, length = _HEADER.unpack(await self._read(_HEADER.size))
            most = CHUNK if kind == _DATA else _MAX_BYTES
            if length > most:
                raise LostError("it sends no frames")
            content = await self._read(length)
            if kind == _OPEN and self._serve is not None:
                self._begin(number, _message(content))
                continue
            stream = self._streams.get(number)
            task = self._tasks.get(number)
            if stream is None:
                continue  # it has ended meanwhile
            if kind == _CLOSE and task is not None:
                task.cancel()
            elif kind == _CLOSE:
                stream.end()
            elif kind == _MESSAGE:
                await stream.take(_message(content))
            elif kind == _DATA:
                await stream.take(content)

    async def _read(self, length: int) -> bytes:
        content = bytearray()
        silent = 0.0
        while len(content) < length:
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    chunk = await self._reader.read(length - len(content))
            except TimeoutError:
                silent += _LOOK_SECONDS  # not by the clock: this process may have slept
                if silent >= SILENT_SECONDS:
                    raise LostError(f"it was silent for {SILENT_SECONDS:g} s") from None
                continue
            if not chunk:
                raise LostError("the other side has closed it")
            content += chunk
            silent = 0.0
        return bytes(content)

    def _begin(self, number: int, message: dict[str, Any]) -> None:
        assert self._serve is not None
        stream = Stream(self, number)
        stream._frames.put_nowait(message)
        task = asyncio.create_task(self._serve(stream))
        task.add_done_callback(partial(self._served, number))
        self._streams[number] = stream
        self._tasks[number] = task

    def _served(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self.forget(number)
        if not task.cancelled():
            task.exception()  # the task has told it
        if not self.why:
            self._writer.write(_HEADER.pack(number, _CLOSE, 0))


def _message(content: bytes) -> dict[str, Any]:
    """Return the message of a frame. Raises `LostError` for what is none, and `ValueError`."""
    try:
        message = json.loads(content)
    except RecursionError as error:
        raise LostError("it sends no messages") from error
    if not isinstance(message, dict):
        raise LostError("it sends no messages")
    return message
