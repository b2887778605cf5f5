"""The verdict's channel: a named pipe (fifo(7)) that a judge's program writes to and rolltap alone reads.

A launcher of ours opens it before any code of the agent's runs (`runtimes/inside/launch.py`); or it is mounted
read-only at a path that a judge writes to, where nobody can read, replace or empty it. Who opens it is counted, by
inotify(7): what two programs wrote may be a number that neither meant.
"""

import asyncio
import ctypes
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Self

MAX_BYTES = 72 << 20
_AT_ONCE = 1 << 20
_OPENED, _MODIFIED, _CLOSED = 0x20, 0x2, 0x8
"""IN_OPEN, and IN_MODIFY and IN_CLOSE_WRITE, without which two openings could be told as one."""


_LOST = 0x4000
"""IN_Q_OVERFLOW: there were more events than the kernel keeps."""


class Channel:
    """The pipe at `path`. A context manager of a running event loop. Entering raises `OSError`.

    After `read`, `content` has the first `MAX_BYTES` that were written so far, and `opened` counts who opened the pipe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = bytearray()
        self.opened = 0

    def __enter__(self) -> Self:
        os.mkfifo(self.path, 0o600)
        with ExitStack() as stack:
            # a writer's end of its own: without it, the end of a writer is the end of the file
            self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, self._pipe)
            os.chmod(self.path, 0o200)
            loop = asyncio.get_running_loop()
            self._watches = _watches.get(loop) or _Watches(loop)
            stack.callback(self._watches.remove, self._watches.add(self))
            loop.add_reader(self._pipe, self.read)
            stack.callback(loop.remove_reader, self._pipe)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def read(self) -> None:
        """Take what was written, and who opened the pipe, until now."""
        self.content += _read(self._pipe)[: max(0, MAX_BYTES - len(self.content))]
        self._watches.read()


class _Watches:
    """The inotify instance of an event loop, while it has channels. They share it: a user has few, by default 128."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._libc = loop, ctypes.CDLL(None, use_errno=True)
        self._channels: dict[int, Channel] = {}
        self._events: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._events < 0:
            raise _failed("raise fs.inotify.max_user_instances (sysctl)")
        loop.add_reader(self._events, self.read)
        _watches[loop] = self

    def add(self, channel: Channel) -> int:
        """Watch a channel's pipe, and return the number of the watch."""
        number: int = self._libc.inotify_add_watch(
            self._events, os.fsencode(channel.path), _OPENED | _MODIFIED | _CLOSED
        )
        if number < 0:
            error = _failed("raise fs.inotify.max_user_watches (sysctl)")
            self._close_unused()
            raise error
        self._channels[number] = channel
        return number

    def remove(self, number: int) -> None:
        self._libc.inotify_rm_watch(self._events, number)
        del self._channels[number]
        self._close_unused()

    def read(self) -> None:
        """Count who opened the pipes until now. When events were lost, all were opened too often to be trusted."""
        events = _read(self._events)  # 16 bytes each, without a name: number of the watch, and mask
        for at in range(0, len(events), 16):
            number, mask = (int.from_bytes(events[at + first : at + first + 4], "little") for first in (0, 4))
            for channel in self._channels.values() if mask & _LOST else ():
                channel.opened += 2
            if mask & _OPENED and number in self._channels:
                self._channels[number].opened += 1

    def _close_unused(self) -> None:
        if not self._channels:
            del _watches[self._loop]
            self._loop.remove_reader(self._events)
            os.close(self._events)


_watches: dict[asyncio.AbstractEventLoop, _Watches] = {}


def _failed(advice: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"the verdict's pipe cannot be watched ({os.strerror(number)}): {advice}")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _AT_ONCE)
    except BlockingIOError:
        return b""
