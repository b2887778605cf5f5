"""The verdict's channel: a named pipe (fifo(7)) that a judge's program writes to and rolltap alone reads.

A launcher of ours opens it and removes its name before any code of the agent's runs (`runtimes/inside/launch.py`); or
it is mounted read-only at a path that a judge writes to, where nobody can read, replace or empty it.
"""

import asyncio
import os
from pathlib import Path
from typing import Self

MAX_BYTES = 72 << 20
_AT_ONCE = 1 << 20
"""Bytes of one read: more than a pipe holds, so that what was written at once is one piece."""


class Channel:
    """The pipe at `path`, and the pieces that come out of it. A context manager of a running event loop.

    `MAX_BYTES` are kept, and the piece that exceeds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pieces: list[bytes] = []
        self._size = 0

    def __enter__(self) -> Self:
        os.mkfifo(self.path, 0o600)
        # a writer's end of its own: without it, the end of a writer is the end of the file
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        os.chmod(self.path, 0o200)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def pieces(self) -> list[bytes]:
        """Return what was written so far, each time that somebody wrote."""
        self._read()
        return self._pieces

    def _read(self) -> None:
        try:
            piece = os.read(self._descriptor, _AT_ONCE)
        except BlockingIOError:
            return
        if self._size <= MAX_BYTES:
            self._pieces.append(piece)
            self._size += len(piece)
