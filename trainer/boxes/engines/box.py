"""The life of a box that a container engine makes by its command line, and the command lines that
it needs for it."""

import asyncio
import csv
import errno
import io
import os
import re
import secrets
import shlex
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from rolltap.addons.concurrency import finished_in
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.runtime import BoxSpec, Ended, Mount
from rolltap.trainer.boxes.supervised import Output, Supervised, readable, start, written_to
from rolltap.trainer.boxes.watch import ProcessTable, exceeded, out_of_memory_kills, written_folders
from rolltap.trainer.boxes.way_out import PORT, way_out
from rolltap.trainer.concurrency import run_to_end, wait_for_end
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.tasks.box_paths import HOME

KEEPER = ("/bin/sh", "-c", "while :; do sleep 86400; done")
"""First process of a box. It collects the processes that end; no signal from inside ends it
(pid_namespaces(7))."""

_SECONDS = 300.0
"""Time for one command of an engine: its storage may be slow."""


class Engine(ABC):
    """The command lines of a container engine: those of Podman, which the others have as far as
    they say nothing else.

    Nothing here runs them. `command` is the program and its arguments before a command.
    """

    command: tuple[str, ...]

    @abstractmethod
    def create(
        self, name: str, spec: BoxSpec, mounts: Sequence[Mount], folder: Path
    ) -> list[list[str]]:
        """Return the commands that make and start the box `name` with the process `KEEPER`, without
        network.

        The files that they read are written into `folder`.
        """

    def restart(self, name: str, spec: BoxSpec, mounts: Sequence[Mount]) -> list[str]:
        """Return the command that starts a stopped box again."""
        return [*self.command, "start", name]

    def stop(self, name: str) -> list[str]:
        """Return the command that kills all processes of a box and waits for their end."""
        return [*self.command, "stop", "-t", "0", name]

    def remove(self, name: str) -> list[str]:
        """Return the command that kills and removes a box. It may not exist."""
        return [*self.command, "rm", "--force", "--volumes", name]

    def execute(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs a program in a box, with the program's output and exit
        status."""
        return [*self.command, "exec", name, *command]

    def state(self, name: str) -> list[str]:
        """Return the command that prints the state of a box."""
        return [*self.command, "inspect", "--type", "container", "--format", "{{.State.Pid}}", name]

    def close(self, pid: int) -> list[list[str]]:
        """Return the commands that close the box of the first process `pid` before a program runs
        in it."""
        return []

    def pid(self, state: str) -> int:
        """Return the id that the first process of a box has on this machine; 0 when it does not
        run."""
        return int(state)


def call(command: Sequence[str], *, timeout: float = _SECONDS) -> str:
    """Run a short command and return its stdout. Raises `OSError` with its message when it
    fails."""
    shown = shlex.join(command[:4])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"`{shown} ...` does not end within {timeout:g} s") from error
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise OSError(f"`{shown} ...` fails with status {done.returncode}: {message}")
    return done.stdout


_CALLS = ThreadPoolExecutor(8, "rolltap-engines")
"""Threads that wait for engines' commands. Other work in threads does not wait for them."""


async def _call_to_end(command: Sequence[str]) -> str:
    """Do what `call` does in a thread, to its end, even when the caller is cancelled meanwhile."""
    calling = asyncio.ensure_future(finished_in(_CALLS, call, command))
    if await wait_for_end(calling):
        raise asyncio.CancelledError from calling.exception()
    return calling.result()


def mount_options(mounts: Iterable[Mount], readonly: str) -> Iterator[str]:
    """Yield an engine's options `--mount`. The value is a row of CSV: paths may have commas and
    colons."""
    for mount in mounts:
        row = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow(row if mount.writable else [*row, readonly])
        yield from ("--mount", text.getvalue())


_SCRIPTS = "/.rolltap"
"""Folder in a box, read-only, with the scripts that start its programs."""
_STARTS, _ABSENT = "rolltap starts", "rolltap finds nothing"
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

    def __init__(self, runtime: HidingRuntime, engine: Engine, spec: BoxSpec, name: str) -> None:
        spec = replace(spec, limits=spec.limits.of_isolated())
        self.workdir = spec.workdir
        self.home = HOME
        self.proxy = None if spec.accept is None else f"127.0.0.1:{PORT}"
        self._engine, self._spec, self._name = engine, spec, name
        self._layers = runtime.layers()
        self._folder = Path()
        self._mounts: list[Mount] = []
        self._running = AsyncExitStack()
        self._pid = 0

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[Self]:
        """Make and start the box, and yield it. It is removed when the block is left, and when this
        process dies.

        Raises `OSError` when the engine cannot make it.
        """
        # only its owner can enter it: the environment of programs is in it
        self._folder = Path(tempfile.mkdtemp(prefix="rolltap-box-"))
        try:
            (self._folder / "scripts").mkdir()
            (self._folder / "hosts").write_text(_HOSTS)
            self._mounts = [
                Mount(self._spec.workspace, self.workdir, writable=True),
                Mount(self._spec.home, HOME, writable=True),
                *(
                    Mount(path if seen else self._empty(path), str(path))
                    for path, seen in self._layers.items()
                ),
                *self._spec.mounts,
                Mount(self._folder / "scripts", _SCRIPTS),
                Mount(self._folder / "hosts", "/etc/hosts"),
            ]
            async with self._made(), self._running:
                await self._join()
                yield self
        finally:
            await run_to_end(remove_folder, self._folder)

    def _empty(self, path: Path) -> Path:
        """Return an empty file or folder for a hidden one, with the places of what is shown in
        it."""
        top = self._folder / "hidden"
        for place in (path, *(each for each in self._layers if each.is_relative_to(path))):
            made = top / place.relative_to("/")
            (made if place.is_dir() else made.parent).mkdir(parents=True, exist_ok=True)
            if not place.is_dir():
                made.touch()
        return top / path.relative_to("/")

    @asynccontextmanager
    async def _made(self) -> AsyncIterator[None]:
        """Start the program that makes the box. Its end removes the box, and it ends when this
        process does."""
        fifo = self._folder / "started"
        os.mkfifo(fifo)
        commands = self._engine.create(self._name, self._spec, self._mounts, self._folder)
        making = [f"{shlex.join(command)} >&2" for command in commands]
        removing = (
            f"{shlex.join(self._engine.remove(self._name))}; rm -rf"
            f" {shlex.quote(str(self._folder))}"
        )
        with (
            os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb") as started,
            tempfile.TemporaryFile() as output,
        ):
            async with start(
                [
                    "/bin/sh",
                    "-c",
                    " && ".join([*making, f"echo >{fifo.name}", "exec sleep infinity"]),
                ],
                cwd=self._folder,
                env=os.environ,
                output=output,
                cleanup=["/bin/sh", "-c", f"exec >/dev/null 2>&1; {removing}"],
            ) as keeper:
                await _said_or_ended(started.fileno(), keeper)
                if not started.read():
                    output.seek(0)
                    said = output.read().decode(errors="replace").strip()
                    raise OSError(f"the container of {self._spec.name} cannot be made: {said}")
                yield

    async def _join(self) -> None:
        """Find the first process of the box, and open the way to the recorder."""
        self._pid = self._engine.pid(await _call_to_end(self._engine.state(self._name)))
        if not self._pid:
            raise OSError(
                f"the container of {self._spec.name} has ended by itself: has its image /bin/sh and"
                " sleep?"
            )
        for command in self._engine.close(self._pid):
            await _call_to_end(command)
        if self._spec.accept is not None:
            await self._running.enter_async_context(way_out(self._pid, self._spec.accept))

    async def run(
        self, command: Sequence[str], *, env: Mapping[str, str], timeout: float, log: Path
    ) -> Ended:
        """Run a program: see `Box.run`. The image's own variables stay, and the folders of its PATH
        come first.

        Processes that the program leaves in the background run until `settle`; all are killed when
        it is stopped.
        """
        for _ in range(2):  # again when the box has ended as the program was to begin
            if self._pid and not self._runs():  # the last program has ended it
                await self.settle()
            if not self._pid:
                await _call_to_end(self._engine.restart(self._name, self._spec, self._mounts))
                await self._join()
            token = secrets.token_hex(16)
            script = self._folder / "scripts" / secrets.token_hex(8)
            script.write_text(_script(command, env, self.workdir))
            inside = ["/bin/sh", f"{_SCRIPTS}/{script.name}", token]
            try:
                async with written_to(log, marker=f"{_STARTS} {token}\n".encode()) as output:
                    ended = await self._execute(
                        self._engine.execute(self._name, inside), timeout, log, output
                    )
            finally:
                script.unlink()
            if output.marked or ended.status is None:
                return ended  # also when the program has ended its box: that is its own doing
            if f"{_ABSENT} {token}\n".encode() in output.before:
                raise FileNotFoundError(
                    errno.ENOENT, "there is no such program in the container", command[0]
                )
            if self._runs():
                break
        said = output.before.decode(errors="replace").strip()[-500:]
        raise OSError(
            f"{command[0]} could not be started in the container of {self._spec.name}: {said}"
        )

    def _runs(self) -> bool:
        try:
            return bool(psutil.Process(self._pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    async def _execute(
        self, command: Sequence[str], timeout: float, log: Path, output: Output
    ) -> Ended:
        """Run a program of the engine. Stopping it stops the box, whose programs are no children of
        that one."""
        killed_before = out_of_memory_kills(self._pid)
        folders = [*self._spec.written(), log, *written_folders(self._pid)]
        find = partial(ProcessTable.in_namespace_of, pid=self._pid)
        # Podman writes files into its working folder
        async with start(
            command, cwd=self._folder, env=os.environ, output=output.descriptor
        ) as client:
            ending = asyncio.create_task(client.wait())
            limit = asyncio.create_task(exceeded(self._spec.limits, find, folders))
            try:
                await asyncio.wait(
                    [ending, limit], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if ending.done():
                    status = ending.result()
                    killed = status and out_of_memory_kills(self._pid) > killed_before
                    return Ended(None, "memory") if killed else _as_ended(status)
                return Ended(None, limit.result() if limit.done() else "timeout")
            finally:
                limit.cancel()
                if not ending.done():
                    await self.settle()
                    await wait_for_end(ending)

    async def settle(self) -> None:
        """Kill all processes of the box. The next program starts it again, with its files."""
        if self._pid:
            self._pid = 0
            await self._running.aclose()
            await _call_to_end(self._engine.stop(self._name))


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
        before = '"${PATH:+$PATH:}"' if name == "PATH" else ""
        lines.append(f"export {name}={before}{shlex.quote(value)}")
    program = shlex.quote(command[0])
    lines.append(f'command -v {program} >/dev/null || {{ echo "{_ABSENT} $1"; exit 127; }}')
    lines += [f'echo "{_STARTS} $1"', f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def _as_ended(status: int) -> Ended:
    """Return the end of a program: engines report a signal as 128 and its number."""
    return Ended(128 - status if 128 < status < 128 + signal.NSIG else status)
