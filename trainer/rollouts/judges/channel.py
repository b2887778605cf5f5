"""The verdict's channel: a named pipe (fifo(7)) that a judge's program writes to and rolltap alone reads.

A launcher of ours opens it before any code of the agent's runs (`runtimes/inside/launch.py`); or it is mounted
read-only at a path that a judge writes to, where nobody can read, replace or empty it. Who opens it is counted, by
inotify(7): what two programs wrote may be a number that neither meant.
"""

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Self

MAX_BYTES = 72 << 20
_AT_ONCE = 1 << 20
_OPENED, _MODIFIED, _CLOSED = 0x20, 0x2, 0x8
"""IN_OPEN, and IN_MODIFY and IN_CLOSE_WRITE, without which two openings could be told as one."""


class Channel:
    """The pipe at `path`. A context manager of a running event loop.

    After `read`, `content` has the first `MAX_BYTES` that were written so far, and `opened` counts who opened the pipe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = bytearray()
        self.opened = 0

    def __enter__(self) -> Self:
        os.mkfifo(self.path, 0o600)
        # a writer's end of its own: without it, the end of a writer is the end of the file
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.chmod(self.path, 0o200)
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if libc.inotify_add_watch(self._events, os.fsencode(self.path), _OPENED | _MODIFIED | _CLOSED) < 0:
            raise OSError(ctypes.get_errno(), "the verdict's pipe cannot be watched")
        for descriptor in (self._pipe, self._events):
            asyncio.get_running_loop().add_reader(descriptor, self.read)
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (self._pipe, self._events):
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def read(self) -> None:
        """Take what was written, and who opened the pipe, until now."""
        self.content += _read(self._pipe)[: max(0, MAX_BYTES - len(self.content))]
        events = _read(self._events)  # 16 bytes each, without a name: the second number is the mask
        masks = (int.from_bytes(events[at + 4 : at + 8], "little") for at in range(0, len(events), 16))
        self.opened += sum(mask & _OPENED > 0 for mask in masks)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _AT_ONCE)
    except BlockingIOError:
        return b""
