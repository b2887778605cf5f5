"""Programs under a supervisor: all that they start ends with them, and with this process, by kill
-9 too.

Their output goes through a pipe, which a thread of this process reads into a file.
"""

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from rolltap.addons.concurrency import finished_in
from rolltap.trainer.boxes.runtime import Ended, StopReason
from rolltap.trainer.boxes.watch import ProcessTable, choose_cores, exceeded, rlimits
from rolltap.trainer.concurrency import finished, run_to_end
from rolltap.trainer.tasks.task import Limits

T = TypeVar("T")

LOG_BYTES = 64 << 20
"""Most bytes that are kept of a program's output. What follows is read, slowly, and not kept."""
_CHUNK = 64 << 10
_PIPE_BYTES = 1 << 20
"""Most bytes that a pipe of an ordinary user holds: pipe-max-size in proc(5)."""
_PAUSE_SECONDS = 0.01
_NOBODY = 65534
_WRITE_ONLY = 0o222


class Output:
    """The output of one program in a file. The program can add to it, and change nothing that it
    has written.

    With a `marker` the file has what follows the marker; what came before is in `before`. Where
    rolltap is not root, a program that wants it can read what this process has not read yet, and so
    take it away.

    Attributes:
        descriptor: The end of the pipe for the program.
        before: Bytes before the marker; all of them as long as there was none.
        marked: True when the marker has come; without a marker always.
    """

    def __init__(self, log: Path, *, marker: bytes | None = None, limit: int = LOG_BYTES) -> None:
        self.before = b""
        self.marked = marker is None
        self._marker = marker
        self._limit = limit
        self._left = limit
        self._error: OSError | None = None
        self._file = log.open("wb", buffering=0)
        self._read, self.descriptor = os.pipe()
        self._stopped, self._stop = os.pipe()
        _close_to_readers(self.descriptor)
        self._thread = threading.Thread(target=self._copy, name="rolltap-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is in the pipe and end the thread. Raises the `OSError` of a file that could
        not be written."""
        os.close(self.descriptor)
        os.close(self._stop)
        self._thread.join()
        os.close(self._read)
        os.close(self._stopped)
        self._file.close()
        if self._error is not None:
            raise self._error

    def _copy(self) -> None:
        """Read until no writer is left, or until `close`: a process that got away may hold the pipe
        for good."""
        poll = select.poll()
        for descriptor in (self._read, self._stopped):
            poll.register(descriptor, select.POLLIN)
        while self._stopped not in dict(poll.poll()):
            chunk = os.read(self._read, _CHUNK)
            if not chunk:
                return
            self._take(chunk)
            if not self._left:
                # a program that floods its output takes no core of this process
                time.sleep(_PAUSE_SECONDS)
        os.set_blocking(self._read, False)
        with suppress(BlockingIOError):
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
            self._error = error
            self._left = 0


def _close_to_readers(descriptor: int) -> None:
    """Keep programs from opening the pipe for reading, by which they would take output away.

    They can open it through /proc/self/fd. An owner can undo it: only root has another one to give
    it to.
    """
    os.fchmod(descriptor, _WRITE_ONLY)
    with suppress(OSError):
        os.fchown(descriptor, _NOBODY, _NOBODY)


PROGRAM_THREADS = ThreadPoolExecutor(4, "rolltap-starts")
"""Threads that start programs, and make what they need. A start takes milliseconds, which the event
loop does not have, and mostly of a core, so that more of them at a time would only be slower."""


@asynccontextmanager
async def made(make: Callable[[], T], remove: Callable[[T], None]) -> AsyncIterator[T]:
    """Yield the result of `make`, and `remove` it at the end.

    `make` is called in a thread of `PROGRAM_THREADS`, and `remove` in a thread.

    Raises what `make` raises. A caller that is cancelled meanwhile leaves nothing behind.
    """
    results: list[T] = []

    def call() -> None:
        results.append(make())

    try:
        await finished_in(PROGRAM_THREADS, call)
        yield results[0]
    finally:
        for result in results:
            await run_to_end(remove, result)


@asynccontextmanager
async def written_to(log: Path, *, marker: bytes | None = None) -> AsyncIterator[Output]:
    """Yield the output of a program, see `Output`. The file is complete when the block has been
    left."""
    async with made(partial(Output, log, marker=marker), Output.close) as output:
        yield output


_SCRIPT = Path(__file__).with_name("inside") / "supervise.py"
_GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""


class Supervised:
    """A program, started as the child of a supervisor (`supervise.py`). Without other children than
    its own.

    Every process that the program leaves is killed when it ends, when `close` is called and when
    this process dies; then the supervisor runs `cleanup`, a command. The program gets SIGTERM first
    when `grace` is not 0, and is killed after these seconds. It dies with its supervisor; its own
    children do not if they kill that one before.

    `env` is the program's whole environment. It has an empty stdin, and a process session of its
    own, which Ctrl-C does not reach. `output` is its stdout and stderr. `descriptors` of this
    process stay open in it, and only in it. `rlimits` has names and values of limits of the module
    `resource`, `cpus` the processor cores that it may use.

    Raises `OSError` when the supervisor cannot be started, for instance without the folder `cwd`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        output: int | IO[bytes],
        cwd: Path | None = None,
        grace: float = 0.0,
        cleanup: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        rlimits: Mapping[str, int] | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        request = {
            "command": list(command),
            "parent": os.getpid(),
            "grace": grace,
            "cleanup": list(cleanup),
            "descriptors": list(descriptors),
            "rlimits": dict(rlimits or {}),
            "cpus": list(cpus),
        }
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # the command line would be shown to every user, and a pipe may be too small
        with theirs, os.fdopen(os.memfd_create("request"), "w+b") as stdin:
            stdin.write(json.dumps(request).encode())
            stdin.seek(0)
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SCRIPT), str(theirs.fileno())],
                    cwd=cwd,
                    env=dict(env),
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno(), *descriptors],
                    start_new_session=True,
                )
                """The supervisor. It ends after all others, with the program's status."""
            except BaseException:
                self._control.close()
                raise

    def started(self) -> int:
        """Wait until the program has started, and return its process id. Raises `OSError` when it
        cannot be started."""
        return self._read(self._control.recv(65536))

    async def started_async(self) -> int:
        """Do what `started` does, without blocking the event loop."""
        self._control.setblocking(False)
        return self._read(await asyncio.get_running_loop().sock_recv(self._control, 65536))

    def terminate(self) -> None:
        """Send SIGTERM to the program's process group. Does not wait."""
        with suppress(OSError):
            self._control.send(b"T")

    def close(self) -> None:
        """Tell the supervisor to end the program and all that it left. Does not wait."""
        self._control.close()

    async def wait(self) -> int:
        """Wait until the program and all that it left have ended. Return its status."""
        if self.process.returncode is not None:
            return self.process.returncode
        descriptor = os.pidfd_open(self.process.pid)
        try:
            await readable(descriptor)
        finally:
            os.close(descriptor)
        return await finished_in(PROGRAM_THREADS, self.process.wait)

    def _read(self, message: bytes) -> int:
        if not message:
            return 0  # the supervisor was killed: see its status
        answer: dict[str, Any] = json.loads(message)
        if "pid" in answer:
            return int(answer["pid"])
        raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["filename"])


async def readable(descriptor: int) -> None:
    """Wait until a descriptor can be read, or is at its end."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)


@asynccontextmanager
async def start(command: Sequence[str], **how: Any) -> AsyncIterator[Supervised]:
    """Start a program (see `Supervised`). Leaving the block kills what is left of it, and waits for
    its end.

    Raises `OSError` when it cannot be started.
    """
    started: list[Supervised] = []

    def call() -> None:
        started.append(Supervised(command, **how))

    try:
        await finished_in(PROGRAM_THREADS, call)
        await started[0].started_async()
        yield started[0]
    finally:
        for program in started:  # also one that a cancelled start still made
            program.close()
            await finished(program.wait())


async def run_supervised(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    log: Path,
    limits: Limits | None = None,
    folders: Sequence[Path] = (),
    **how: Any,
) -> Ended:
    """Run a program to its end, with its output in the file `log`, and kill what it leaves. See
    `Supervised`.

    It gets SIGTERM after `timeout` seconds, and is killed 5 s later; at once at a limit of all its
    processes, with `folders` and the log as the files that count, and when the caller is cancelled.
    Raises `OSError` when it cannot be started.
    """
    limits = limits or Limits()
    how = {"rlimits": rlimits(limits), "cpus": choose_cores(limits), **how}
    async with (
        written_to(log) as output,
        start(command, cwd=cwd, env=env, output=output.descriptor, **how) as program,
    ):
        find = partial(ProcessTable.descendants, pid=program.process.pid)
        return await end(program, timeout, exceeded(limits, find, [*folders, log]))


async def end(program: Supervised, timeout: float, limit: Coroutine[Any, Any, StopReason]) -> Ended:
    """Wait for the end of a program. Stop it after `timeout` seconds, and when `limit` returns."""
    ending = asyncio.create_task(program.wait())
    limited = asyncio.create_task(limit)
    try:
        await asyncio.wait([ending, limited], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return Ended(ending.result())
        if limited.done():
            return Ended(None, limited.result())
        program.terminate()
        await asyncio.wait([ending], timeout=_GRACE_SECONDS)
        return Ended(None, "timeout")
    finally:
        ending.cancel()
        limited.cancel()
        await asyncio.gather(ending, limited, return_exceptions=True)
