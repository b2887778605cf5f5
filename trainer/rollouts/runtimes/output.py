"""The output of a program: a pipe, which a thread of this process reads into a file."""

import contextlib
import os
import select
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.trainer.blocking import run_to_end

LOG_BYTES = 64 << 20
"""Most bytes that are kept of a program's output. What follows is read, slowly, and not kept."""
_CHUNK = 64 << 10
_PIPE_BYTES = 1 << 20
"""Most bytes that a pipe of an ordinary user holds: pipe-max-size in proc(5)."""
_PAUSE_SECONDS = 0.01
_NOBODY = 65534
_WRITE_ONLY = 0o222


class Output:
    """The output of one program in a file. The program can add to it, and change nothing that it has written.

    With a `marker` the file has what follows the marker; what came before is in `before`. Where rolltap is not root, a
    program that wants it can read what this process has not read yet, and so take it away.

    Attributes:
        descriptor: The end of the pipe for the program.
        before: Bytes before the marker; all of them as long as there was none.
        marked: True when the marker has come; without a marker always.
    """

    def __init__(self, log: Path, *, marker: bytes | None = None, limit: int = LOG_BYTES) -> None:
        self.before, self.marked = b"", marker is None
        self._marker, self._limit, self._left = marker, limit, limit
        self._error: OSError | None = None
        self._file = log.open("wb", buffering=0)
        self._read, self.descriptor = os.pipe()
        self._stopped, self._stop = os.pipe()
        _close_to_readers(self.descriptor)
        self._thread = threading.Thread(target=self._copy, name="rolltap-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is in the pipe and end the thread. Raises the `OSError` of a file that could not be written."""
        os.close(self.descriptor)
        os.close(self._stop)
        self._thread.join()
        os.close(self._read)
        os.close(self._stopped)
        self._file.close()
        if self._error is not None:
            raise self._error

    def _copy(self) -> None:
        """Read until no writer is left, or until `close`: a process that got away may hold the pipe for good."""
        poll = select.poll()
        for descriptor in (self._read, self._stopped):
            poll.register(descriptor, select.POLLIN)
        while self._stopped not in {descriptor for descriptor, _ in poll.poll()}:
            chunk = os.read(self._read, _CHUNK)
            if not chunk:
                return
            self._take(chunk)
            if not self._left:
                time.sleep(_PAUSE_SECONDS)  # a program that floods its output takes no core of this process
        os.set_blocking(self._read, False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PIPE_BYTES // _CHUNK):
                self._take(os.read(self._read, _CHUNK))

    def _take(self, chunk: bytes) -> None:
        if not self.marked and self._marker is not None:
            self.before, marker, chunk = (self.before + chunk).partition(self._marker)
            self.marked = bool(marker)
            self.before = self.before[-_PIPE_BYTES:]
        if not self._left:
            return
        text = chunk[: self._left]
        self._left -= len(text)
        if len(text) < len(chunk):
            text += f"\n[rolltap: the output is cut here, at {self._limit} bytes]\n".encode()
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError as error:
            self._error, self._left = error, 0


def _close_to_readers(descriptor: int) -> None:
    """Keep programs from opening the pipe for reading, by which they would take output away.

    They can open it through /proc/self/fd. An owner can undo it: only root has another one to give it to.
    """
    os.fchmod(descriptor, _WRITE_ONLY)
    with contextlib.suppress(OSError):
        os.fchown(descriptor, _NOBODY, _NOBODY)


@asynccontextmanager
async def written_to(log: Path, *, marker: bytes | None = None) -> AsyncIterator[Output]:
    """Yield the output of a program, see `Output`. The file is complete when the block has been left."""
    output = Output(log, marker=marker)
    try:
        yield output
    finally:
        await run_to_end(output.close)
