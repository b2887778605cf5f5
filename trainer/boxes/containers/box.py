"""The life of a box that a container engine makes by its command line."""

import asyncio
import errno
import os
import re
import secrets
import shlex
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from rolltap.addons.concurrency import finished_in
from rolltap.trainer.boxes.containers.engine import Engine, call
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.runtime import BoxSpec, Ended, Mount, StopReason
from rolltap.trainer.boxes.supervised import Output, Supervised, readable, start, written_to
from rolltap.trainer.boxes.watch import ProcessTable, exceeded, out_of_memory_kills, written_folders
from rolltap.trainer.boxes.way_out import PORT, way_out
from rolltap.trainer.concurrency import finished, run_to_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.tasks.box_paths import HOME

_CALLS = ThreadPoolExecutor(8, "rolltap-engines")
"""Threads that wait for engines' commands. Other work in threads does not wait for them."""
_SCRIPTS = "/.rolltap"
"""Folder in a box, read-only, with the scripts that start its programs."""
_STARTS = "rolltap starts"
_ABSENT = "rolltap finds nothing"
"""First words of a box's program, before a token that it does not know: the program begins, or is
not there."""
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
"""`/etc/hosts` of a box. Engines copy names of this machine and its network into theirs."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class EngineBox:
    """A box of a container engine. Its first process lives until the box ends, and its programs
    beside it.

    It has the tools of its runtime, and what that hides in them is empty. Its programs have one
    user: where the engine leaves /proc writable, a program can write to the memory of the others,
    but not of the first process.
    """

    def __init__(
        self,
        runtime: HidingRuntime,
        engine: Engine,
        spec: BoxSpec,
        name: str,
    ) -> None:
        self.workdir = spec.workdir
        self.home = HOME
        self.proxy: str | None = None
        if spec.accept is not None:
            self.proxy = f"127.0.0.1:{PORT}"
        self._engine = engine
        self._spec = replace(spec, limits=spec.limits.of_isolated())
        self._name = name
        self._layers = runtime.layers()
        self._folder = Path()
        """Has what is mounted besides, and the environment of programs."""
        self._mounts: list[Mount] = []
        self._way_out = AsyncExitStack()
        self._pid = 0
        """The first process; 0 when the box is stopped."""

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[Self]:
        """Make and start the box, and yield it. It is removed when the block is left, and when this
        process dies.

        Raises `OSError` when the engine cannot make it.
        """
        # only its owner can enter it
        self._folder = Path(tempfile.mkdtemp(prefix="rolltap-box-"))
        try:
            self._mounts = self._all_mounts()
            async with self._made(), self._way_out:
                await self._join()
                yield self
        finally:
            await run_to_end(remove_folder, self._folder)

    def _all_mounts(self) -> list[Mount]:
        scripts = self._folder / "scripts"
        scripts.mkdir()
        hosts = self._folder / "hosts"
        hosts.write_text(_HOSTS)
        mounts = [
            Mount(self._spec.workspace, self.workdir, writable=True),
            Mount(self._spec.home, HOME, writable=True),
        ]
        for path, is_shown in self._layers.items():
            source = path if is_shown else self._empty(path)
            mounts.append(Mount(source, str(path)))
        mounts += self._spec.mounts
        mounts.append(Mount(scripts, _SCRIPTS))
        mounts.append(Mount(hosts, "/etc/hosts"))
        return mounts

    def _empty(self, path: Path) -> Path:
        """Return an empty file or folder for a hidden one, with the places of what is shown in
        it."""
        top = self._folder / "hidden"
        below = [each for each in self._layers if each.is_relative_to(path)]
        for place in (path, *below):
            stand_in = top / place.relative_to("/")
            if place.is_dir():
                stand_in.mkdir(parents=True, exist_ok=True)
            else:
                stand_in.parent.mkdir(parents=True, exist_ok=True)
                stand_in.touch()
        return top / path.relative_to("/")

    @asynccontextmanager
    async def _made(self) -> AsyncIterator[None]:
        """Start the program that makes the box. Its end removes the box, and it ends when this
        process does."""
        fifo = self._folder / "started"
        os.mkfifo(fifo)
        commands = self._engine.create(self._name, self._spec, self._mounts, self._folder)
        making = [f"{shlex.join(command)} >&2" for command in commands]
        steps = [*making, f"echo >{fifo}", "exec sleep infinity"]
        remove_box = shlex.join(self._engine.remove(self._name))
        remove_files = shlex.join(["rm", "-rf", str(self._folder)])
        cleanup = f"exec >/dev/null 2>&1; {remove_box}; {remove_files}"
        with (
            os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb") as started,
            tempfile.TemporaryFile() as output,
        ):
            async with start(
                ["/bin/sh", "-c", " && ".join(steps)],
                cwd=self._folder,
                env=os.environ,
                output=output,
                cleanup=["/bin/sh", "-c", cleanup],
            ) as keeper:
                await _said_or_ended(started.fileno(), keeper)
                if not started.read():
                    output.seek(0)
                    said = output.read().decode(errors="replace").strip()
                    raise OSError(f"the container of {self._spec.name} cannot be made: {said}")
                yield

    async def _join(self) -> None:
        """Find the first process of the box, and open the way to the recorder."""
        self._pid = await finished(finished_in(_CALLS, self._engine.first_process, self._name))
        if not self._pid:
            raise OSError(
                f"the container of {self._spec.name} has ended by itself: has its image /bin/sh and"
                " sleep?"
            )
        for command in self._engine.close(self._pid):
            await _call(command)
        if self._spec.accept is not None:
            await self._way_out.enter_async_context(way_out(self._pid, self._spec.accept))

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        """Run a program: see `Box.run`. The image's own variables stay, and the folders of its PATH
        come first.

        Processes that the program leaves in the background run until `settle`; all are killed when
        it is stopped.
        """
        script = _script(command, env, self.workdir)
        for _ in range(2):  # again when the box has ended as the program was to begin
            await self._revive()
            token = secrets.token_hex(16)
            file = self._folder / "scripts" / secrets.token_hex(8)
            file.write_text(script)
            inside = self._engine.execute(self._name, ["/bin/sh", f"{_SCRIPTS}/{file.name}", token])
            try:
                async with written_to(log, marker=f"{_STARTS} {token}\n".encode()) as output:
                    ended = await self._execute(inside, timeout, log, output)
            finally:
                file.unlink()
            if output.marked or ended.status is None:
                return ended  # also when the program has ended its box: that is its own doing
            if f"{_ABSENT} {token}\n".encode() in output.before:
                what = "there is no such program in the container"
                raise FileNotFoundError(errno.ENOENT, what, command[0])
            if self._runs():
                break
        said = output.before.decode(errors="replace").strip()[-500:]
        raise OSError(
            f"{command[0]} could not be started in the container of {self._spec.name}: {said}"
        )

    async def _revive(self) -> None:
        """Start the box again if it was stopped, or has ended with its last program."""
        if self._pid and self._runs():
            return
        await self.settle()
        await _call(self._engine.restart(self._name, self._spec, self._mounts))
        await self._join()

    def _runs(self) -> bool:
        try:
            return bool(psutil.Process(self._pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    async def _execute(
        self,
        command: Sequence[str],
        timeout: float,
        log: Path,
        output: Output,
    ) -> Ended:
        """Run a program of the engine. Stopping it stops the box, whose programs are no children of
        that one."""
        killed_before = out_of_memory_kills(self._pid)
        folders = [*self._spec.written(), log, *written_folders(self._pid)]
        find = partial(ProcessTable.in_namespace_of, pid=self._pid)
        stopped: StopReason | None = None
        # Podman writes files into its working folder
        async with start(
            command, cwd=self._folder, env=os.environ, output=output.descriptor
        ) as client:
            ending = asyncio.create_task(client.wait())
            limit = asyncio.create_task(exceeded(self._spec.limits, find, folders))
            both = (ending, limit)
            try:
                await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not ending.done():
                    stopped = limit.result() if limit.done() else "timeout"
            finally:
                limit.cancel()
                if not ending.done():
                    await self.settle()  # Podman cannot stop a box whose client was killed
                status = await finished(ending)
        if stopped is not None:
            return Ended(None, stopped)
        if status and out_of_memory_kills(self._pid) > killed_before:
            return Ended(None, "memory")
        if 128 < status < 128 + signal.NSIG:
            return Ended(128 - status)  # engines report a signal as 128 and its number
        return Ended(status)

    async def settle(self) -> None:
        """Kill all processes of the box. The next program starts it again, with its files."""
        if self._pid:
            self._pid = 0
            await self._way_out.aclose()
            await _call(self._engine.stop(self._name))


async def _call(command: Sequence[str]) -> None:
    """Do what `call` does in a thread, to its end, even when the caller is cancelled meanwhile."""
    await finished(finished_in(_CALLS, call, command))


async def _said_or_ended(descriptor: int, keeper: Supervised) -> None:
    """Wait until a descriptor can be read, or a program has ended."""
    waiting = [asyncio.create_task(readable(descriptor)), asyncio.create_task(keeper.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _script(command: Sequence[str], env: Mapping[str, str], workdir: str) -> str:
    """Return the script for /bin/sh that becomes a program: command lines are shown to all users of
    this machine.

    Its last words, with its first argument, say whether the program begins or is not there.
    """
    lines = [
        "exec 2>&1",  # engines read two pipes, and lose the order of their lines
        f"cd {shlex.quote(workdir)} || exit",
        "export TAR_OPTIONS=--no-same-owner",  # root of a box may give no file to another user
    ]
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise OSError(
                f"the environment variable {name!r} has no name that a shell knows: rename it"
            )
        before = ""
        if name == "PATH":
            before = '"${PATH:+$PATH:}"'
        lines.append(f"export {name}={before}{shlex.quote(value)}")
    program = shlex.quote(command[0])
    lines += [
        f'command -v {program} >/dev/null || {{ echo "{_ABSENT} $1"; exit 127; }}',
        f'echo "{_STARTS} $1"',
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"
