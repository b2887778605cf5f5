"""Programs under a supervisor: all that they start ends with them, and with this process, by kill -9 too."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from rolltap.trainer.blocking import wait_for_end
from rolltap.trainer.rollouts.runtimes.output import written_to
from rolltap.trainer.rollouts.runtimes.runtime import Ended, StopReason
from rolltap.trainer.rollouts.runtimes.watch import choose_cores, exceeded, rlimits
from rolltap.trainer.rollouts.tasks.limits import Limits

_SCRIPT = Path(__file__).with_name("supervise.py")
_GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""


class Supervised:
    """A program, started as the child of a supervisor (`supervise.py`). Without other children than its own.

    Every process that the program leaves is killed when it ends, when `close` is called and when this process dies;
    then the supervisor runs `cleanup`, a command. The program gets SIGTERM first when `grace` is not 0, and is killed
    after these seconds. It dies with its supervisor; its own children do not if they kill that one before.

    `env` is the program's whole environment. It has an empty stdin, and a process session of its own, which Ctrl-C does
    not reach. `output` is its stdout and stderr. `descriptors` of this process stay open in it, and only in it.
    `rlimits` has names and values of limits of the module `resource`, `cpus` the processor cores that it may use.

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
        """Wait until the program has started, and return its process id. Raises `OSError` when it cannot be started."""
        return self._read(self._control.recv(65536))

    async def started_async(self) -> int:
        """Do what `started` does, without blocking the event loop."""
        self._control.setblocking(False)
        return self._read(await asyncio.get_running_loop().sock_recv(self._control, 65536))

    def terminate(self) -> None:
        """Send SIGTERM to the program's process group. Does not wait."""
        with contextlib.suppress(OSError):
            self._control.send(b"T")

    def close(self) -> None:
        """Tell the supervisor to end the program and all that it left. Does not wait."""
        self._control.close()

    async def wait(self) -> int:
        """Wait until the program and all that it left have ended. Return its status."""
        if self.process.poll() is not None:
            return self.process.returncode
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self.process.pid)
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self.process.wait()

    def _read(self, message: bytes) -> int:
        answer: dict[str, Any] = json.loads(message or b'{"pid": 0}')  # the supervisor was killed: see its status
        if "pid" in answer:
            return int(answer["pid"])
        raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["filename"])


@asynccontextmanager
async def start(command: Sequence[str], **how: Any) -> AsyncIterator[Supervised]:
    """Start a program (see `Supervised`). Leaving the block kills what is left of it, and waits for its end.

    Raises `OSError` when it cannot be started.
    """
    program = Supervised(command, **how)
    try:
        await program.started_async()
        yield program
    finally:
        program.close()
        if await wait_for_end(asyncio.ensure_future(program.wait())):
            raise asyncio.CancelledError


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
    """Run a program to its end, with its output in the file `log`, and kill what it leaves. See `Supervised`.

    It gets SIGTERM after `timeout` seconds, and is killed 5 s later; at once at a limit of all its processes, with
    `folders` and the log as the files that count, and when the caller is cancelled. Raises `OSError` when it cannot be
    started.
    """
    limits = limits or Limits()
    how = {"rlimits": rlimits(limits), "cpus": choose_cores(limits), **how}
    async with (
        written_to(log) as output,
        start(command, cwd=cwd, env=env, output=output.descriptor, **how) as program,
    ):
        return await end(program, timeout, exceeded(limits, program.process.pid, [*folders, log]))


async def end(program: Supervised, timeout: float, limit: Coroutine[Any, Any, StopReason]) -> Ended:
    """Wait for the end of a program. Stop it after `timeout` seconds, and when `limit` returns."""
    ending, limited = asyncio.create_task(program.wait()), asyncio.create_task(limit)
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
        for task in (ending, limited):
            task.cancel()
        await asyncio.gather(ending, limited, return_exceptions=True)
