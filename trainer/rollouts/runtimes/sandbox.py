"""The runtime that hides the machine: bubblewrap, without rights of root and without images."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.output import written_to
from rolltap.trainer.rollouts.runtimes.relay import Relay
from rolltap.trainer.rollouts.runtimes.runtime import BoxSpec, Ended
from rolltap.trainer.rollouts.runtimes.scratch import scratch_folder
from rolltap.trainer.rollouts.runtimes.seccomp_filter import seccomp_filter
from rolltap.trainer.rollouts.runtimes.supervised import Supervised, end, start
from rolltap.trainer.rollouts.runtimes.tools import require_narrow, tool_folders
from rolltap.trainer.rollouts.runtimes.view import View, write_etc
from rolltap.trainer.rollouts.runtimes.watch import choose_cores, exceeded, rlimits

HOME = "/home/agent"
_COMMON = ("bash", "git", "node", "python", "python3")
"""Programs that tools of agents and judges start: seen in every box, from where the PATH has them."""
_INSTALL = "apt-get install bubblewrap (0.8 or newer), or choose another --runtime"


@dataclass(frozen=True, slots=True)
class SandboxBox:
    """A view of the machine, and the programs that run in it, each in namespaces of its own."""

    spec: BoxSpec
    view: View
    bwrap: str
    workdir: str
    home: str
    proxy: str | None

    async def run(self, command: Sequence[str], *, env: Mapping[str, str], timeout: float, log: Path) -> Ended:
        """Run a program: see `Box.run`."""
        path = env.get("PATH", os.defpath)
        tools = [tool for name in (command[0], *_COMMON) for tool in tool_folders(name, path)]
        with _Pipes() as pipes:
            pipes.write_arguments(self.view.with_tools(tools).arguments(env))
            async with (
                written_to(log) as output,
                start(
                    [self.bwrap, "--args", str(pipes.arguments), "--", *command],
                    env={},
                    output=output.descriptor,
                    descriptors=pipes.theirs,
                    rlimits=rlimits(self.spec.limits),
                    cpus=choose_cores(self.spec.limits),
                ) as program,
            ):
                pipes.close_theirs()
                first = await asyncio.to_thread(pipes.status.readline)
                if first:
                    ended = await self._run(program, json.loads(first)["child-pid"], pipes, timeout, log)
                else:
                    await program.wait()
            if not first:
                raise OSError(f"the sandbox could not be made: {_words(log)}")
            return ended if ended.status is None else _ended(ended.status, pipes.status.read(), command[0], log)

    async def _run(self, program: Supervised, pid: int, pipes: "_Pipes", timeout: float, log: Path) -> Ended:
        """Let the program begin in the box whose first process is `pid`, and wait for its end."""
        async with Relay(pid, self.spec.proxy) if self.spec.proxy else nullcontext():
            pipes.begin()
            written = [mount.source for mount in self.spec.mounts if mount.writable]
            folders = [self.spec.workspace, self.spec.home, log, *written]
            memory = [Path(f"/proc/{pid}/root{folder}") for folder in ("/tmp", "/dev/shm")]
            return await end(program, timeout, exceeded(self.spec.limits, program.process.pid, folders, memory))

    async def settle(self) -> None:
        """Do nothing: a program's end is the end of its namespaces, and of every process in them."""


class _Pipes:
    """The descriptors through which this process and bubblewrap talk. A context manager."""

    def __init__(self) -> None:
        status, status_write = os.pipe()
        block_read, self._block = os.pipe()
        self.arguments = os.memfd_create("arguments")
        self.status = os.fdopen(status, "rb")
        """A line of JSON when the box stands, another when its program has ended."""
        self.filter = os.memfd_create("filter")
        self.theirs = [status_write, block_read, self.arguments, self.filter]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_theirs()
        os.close(self._block)
        self.status.close()

    def write_arguments(self, options: Sequence[str]) -> None:
        """Write bubblewrap's options: not its command line, which every user of the machine can read."""
        status_write, block_read, *_ = self.theirs
        options = [*options, "--json-status-fd", str(status_write), "--block-fd", str(block_read)]
        options += ["--seccomp", str(self.filter)]
        for descriptor, content in (
            (self.arguments, "".join(f"{option}\0" for option in options).encode()),
            (self.filter, seccomp_filter()),
        ):
            os.write(descriptor, content)
            os.lseek(descriptor, 0, os.SEEK_SET)

    def close_theirs(self) -> None:
        """Close the ends that belong to bubblewrap."""
        while self.theirs:
            os.close(self.theirs.pop())

    def begin(self) -> None:
        """Let the program begin: bubblewrap waits for it. One that has failed meanwhile says why by its end."""
        with suppress(BrokenPipeError):
            os.write(self._block, b"\0")


def _ended(status: int, words: bytes, program: str, log: Path) -> Ended:
    """Return how a program ended. bubblewrap tells an exit code only of a program that was started.

    It ends with 128 and the number of the signal that ended the program.
    """
    if b"exit-code" not in words:
        if status < 0:
            return Ended(status)
        # nothing of the session has run: these are bubblewrap's own words
        said = _words(log)
        if "execvp" in said:
            raise FileNotFoundError(errno.ENOENT, f"cannot be started in the sandbox ({said})", program)
        raise OSError(f"the sandbox could not be made: {said}")
    return Ended(128 - status if 128 < status <= 128 + 64 else status)


def _words(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-500:]


class SandboxRuntime:
    """Boxes of bubblewrap: see `View` for what is in them. Images are refused.

    `tools` are further folders that programs need, read-only. The files and folders `hidden` are empty in a box even
    below a tool folder: the run folder, judges' files.
    """

    name = "sandbox"
    isolated = True
    warning: str | None = None

    def __init__(self, tools: Sequence[Path] = (), hidden: Sequence[Path] = ()) -> None:
        self._tools = [Path(os.path.abspath(tool)) for tool in tools]
        self._hidden = tuple(hidden)

    def hide(self, paths: Iterable[Path]) -> None:
        """See `HidingRuntime.hide`."""
        self._hidden = tuple(dict.fromkeys([*self._hidden, *paths]))

    def check(self) -> None:
        """Raise `InputError` when bubblewrap is missing, too old, or may not make namespaces, or without a filter."""
        for tool in self._tools:
            if not tool.exists():
                raise InputError(f"the tool folder {tool} does not exist")
        bwrap = self._bwrap()
        seccomp_filter()
        with scratch_folder() as place:
            view = View(workspace=place, workdir="/workspace", home=place, home_in_box=HOME, etc=write_etc(place))
            command = [bwrap, *view.arguments({}), "--", "/usr/bin/env"]
            done = subprocess.run(command, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip()
            how = _INSTALL if "Unknown option" in said else "allow user namespaces, or choose another --runtime"
            raise InputError(f"bubblewrap cannot make a sandbox here ({said}): {how}")

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[SandboxBox]:
        """Yield a box. Raises `InputError` for an image, and for a tool folder that contains the workspace."""
        spec = replace(spec, limits=spec.limits.of_isolated())
        if spec.image is not None:
            raise InputError(f"the runtime sandbox has no images, and the task needs {spec.image}: --runtime container")
        for tool in self._tools:
            require_narrow(tool, spec.workspace)
        with scratch_folder() as folder:
            view = View(
                workspace=spec.workspace,
                workdir=spec.workdir,
                home=spec.home,
                home_in_box=HOME,
                etc=write_etc(folder),
                tools=tuple(self._tools),
                hidden=self._hidden,
                mounts=tuple(spec.mounts),
                memory=None if spec.limits.memory_gib is None else int(spec.limits.memory_gib * (1 << 30)),
            )
            proxy = None if spec.proxy is None else "127.0.0.1:3128"
            yield SandboxBox(spec, view, self._bwrap(), spec.workdir, HOME, proxy)

    def image_digest(self, image: str) -> str:
        """Return an empty digest: there are no images."""
        return ""

    def _bwrap(self) -> str:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise InputError(f"the runtime sandbox needs bubblewrap, and bwrap is not on the PATH: {_INSTALL}")
        return bwrap
