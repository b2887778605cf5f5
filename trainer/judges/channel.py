"""The verdict's channel: a named pipe (fifo(7)) that a judge's program writes to and rolltap alone
reads.

A launcher of ours opens it before any code of the agent's runs (`boxes/inside/launch.py`); or it is
mounted read-only at a path that a judge writes to, where nobody can read, replace or empty it. Who
opens it is counted, by inotify(7): what two programs wrote may be a number that neither meant.
"""

import asyncio
import ctypes
import errno
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from rolltap.trainer.concurrency import run_to_end

MAX_BYTES = 72 << 20
_AT_ONCE = 1 << 20
_EVENT_BYTES = 16
"""Of an event without a name: the number of its watch, its mask, two numbers more."""
_OPENED = 0x20
"""IN_OPEN."""
_WATCHED = _OPENED | 0x2 | 0x8
"""Also IN_MODIFY and IN_CLOSE_WRITE, without which two openings could be told as one."""
_LOST = 0x4000
"""IN_Q_OVERFLOW: there were more events than the kernel keeps."""
_PAUSE_SECONDS = 0.05

_libc = ctypes.CDLL(None, use_errno=True)


class Channel:
    """The pipe at `path`. An async context manager. Entering raises `OSError`.

    After `read`, `content` has the first `MAX_BYTES` that were written so far, and `opened` counts
    who opened the pipe. Each channel has an inotify instance of its own: who opens a pipe again and
    again spoils that one alone. A user has few instances, by default 128; where none is left, a
    channel waits for the end of another one of this process.
    """

    _instances = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = bytearray()
        self.opened = 0

    async def __aenter__(self) -> Self:
        os.mkfifo(self.path, 0o600)
        async with AsyncExitStack() as stack:
            # a writer's end of its own: without it, the end of a writer is the end of the file
            self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, self._pipe)
            self._events = await self._new_instance()
            stack.push_async_callback(self._close_instance)
            self._watch()
            os.chmod(self.path, 0o200)  # after the watch, which asks for the right to read
            loop = asyncio.get_running_loop()
            for descriptor in (self._pipe, self._events):
                loop.add_reader(descriptor, self.read)
                stack.callback(loop.remove_reader, descriptor)
            self._cleanup = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._cleanup.aclose()

    def read(self) -> None:
        """Take what was written, and count who opened the pipe, until now."""
        self.content += _read(self._pipe)[: max(0, MAX_BYTES - len(self.content))]
        events = _read(self._events)
        for at in range(0, len(events), _EVENT_BYTES):
            mask = int.from_bytes(events[at + 4 : at + 8], "little")
            if mask & _LOST:
                self.opened += 2  # too often to be trusted
            elif mask & _OPENED:
                self.opened += 1

    async def _new_instance(self) -> int:
        while True:
            events: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if events >= 0:
                Channel._instances += 1
                return events
            error = _failed("raise fs.inotify.max_user_instances (sysctl)")
            if error.errno != errno.EMFILE or not Channel._instances:
                raise error
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _close_instance(self) -> None:
        try:
            await run_to_end(os.close, self._events)  # the kernel first waits for its readers
        finally:
            Channel._instances -= 1

    def _watch(self) -> None:
        if _libc.inotify_add_watch(self._events, os.fsencode(self.path), _WATCHED) < 0:
            raise _failed("raise fs.inotify.max_user_watches (sysctl)")


def _failed(advice: str) -> OSError:
    number = ctypes.get_errno()
    why = f"the verdict's pipe cannot be watched ({os.strerror(number)})"
    if number in (errno.EMFILE, errno.ENOSPC):
        why += f": {advice}"
    return OSError(number, why)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _AT_ONCE)
    except BlockingIOError:
        return b""
