"""The runtime that hides the machine: bubblewrap, without rights of root and without images.

Files and folders of this machine that no box shows, also where a tool folder contains them.

The files that a sandbox sees, as arguments of bubblewrap (bwrap(1)).

The system calls of programs in containers.
"""

import asyncio
import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes.inside.seccomp_filter import DENIED, seccomp_filter
from rolltap.trainer.rollouts.runtimes.relay import Relay
from rolltap.trainer.rollouts.runtimes.runtime import (
    BoxSpec,
    Ended,
    Mount,
    Runtime,
    require_narrow,
    scratch_folder,
    tool_folders,
)
from rolltap.trainer.rollouts.runtimes.supervised import Supervised, end, start, written_to
from rolltap.trainer.rollouts.runtimes.watch import choose_cores, exceeded, rlimits
from rolltap.trainer.tasks.task import Task

_ROW = re.compile(r"(:|, )[^/]*$")
"""The place in a file at the end of a task's `source`."""


@runtime_checkable
class HidingRuntime(Runtime, Protocol):
    """A runtime whose boxes show tool folders of this machine, and hide what is in them."""

    def hide(self, paths: Iterable[Path]) -> None:
        """Hide files and folders in the boxes that are made from now on, besides those that are hidden already."""


def covered(hidden: Iterable[Path], tools: Sequence[Path]) -> list[Path]:
    """Return where hidden files and folders are below tool folders, as a box sees them.

    A tool folder inside of a hidden one is not hidden: a program needs it. Paths that do not exist are left out.
    """
    found: list[Path] = []
    for tool in tools:
        place = tool.resolve()
        for path in hidden:
            real = path.resolve()
            if real.exists() and real.is_relative_to(place):
                found.append(tool / real.relative_to(place))
    return list(dict.fromkeys(found))


def private_paths(run: Path, work: Path, tasks: Iterable[Task]) -> list[Path]:
    """Return what sessions must not see: the run folder, the folder that the rollout works in, and the tasks' files.

    These are all paths that a task names, and the file or folder that its `source` names. An image is none of them: its
    sessions see it.
    """
    found = [run, work]
    for task in tasks:
        found += _paths(task.model_dump(exclude={"image"}))
        found.append(Path(_ROW.sub("", task.source)))
    return [path for path in dict.fromkeys(map(Path.absolute, found)) if path.exists()]


def _paths(value: object) -> list[Path]:
    if isinstance(value, Path):
        return [value]
    if isinstance(value, dict):
        return [path for part in value.values() for path in _paths(part)]
    if isinstance(value, list | tuple):
        return [path for part in value for path in _paths(part)]
    return []


_USER = 1000
"""User and group in the box. Not 0: programs that unpack files as root try to give them to other users."""
_ETC = {
    "passwd": f"agent:x:{_USER}:{_USER}::/home/agent:/bin/bash\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "group": f"agent:x:{_USER}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
    "hostname": "box\n",
}
"""Files of /etc that are the box's own."""
_SYSTEM_ETC = (
    *("alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version"),
    *("fonts", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime", "magic"),
    *("mime.types", "os-release", "pki/ca-trust", "pki/tls/certs", "profile", "protocols", "services", "shells"),
    *("ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone"),
)
"""Files and folders of /etc that programs need, as this machine has them. None holds a secret."""
_TMP_BYTES = 1 << 30
"""Size of /tmp and of /dev/shm, which are in memory, when memory has no limit. With one it is half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that programs in a sandbox see.

    /usr and what belongs to it, and tools are read-only; the workspace and the home folder can be written, and /tmp and
    /dev/shm, which are empty for each program. /proc has the box's own processes, /dev the harmless devices. There is
    no other network than the box's own loopback.

    Attributes:
        workspace: Folder of this machine that is `workdir` in the box.
        home: Folder of this machine that is `home_in_box` in the box.
        etc: Folder with the files that `write_etc` wrote.
        tools: Files, folders and symbolic links that are seen read-only under their own path.
        hidden: Files and folders that are empty in the box where a tool's folder contains them.
        mounts: Further files and folders.
        memory: Bytes that the box may use; None is no limit.
    """

    workspace: Path
    workdir: str
    home: Path
    home_in_box: str
    etc: Path
    tools: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    mounts: tuple[Mount, ...] = ()
    memory: int | None = None

    def with_tools(self, tools: Sequence[Path]) -> Self:
        """Return this view with further tools."""
        return dataclasses.replace(self, tools=tuple(dict.fromkeys([*self.tools, *tools])))

    def arguments(self, env: Mapping[str, str]) -> list[str]:
        """Return the options of bwrap, all but the command and what passes descriptors. `env` is the environment."""
        size = str(_TMP_BYTES if self.memory is None else max(self.memory // 2, 1 << 20))
        options = [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(_USER), "--gid", str(_USER)),
            *("--cap-drop", "ALL", "--new-session", "--die-with-parent", "--hostname", "box", "--clearenv"),
            *("--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--dir", "/run"),
            *("--dir", "/var", "--symlink", "../tmp", "/var/tmp", "--proc", "/proc", "--dev", "/dev"),
            *("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--ro-bind", "/usr", "/usr"),
        ]
        for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
            options += _same(Path(folder))
        for name in _SYSTEM_ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name in _ETC:
            options += ["--ro-bind", str(self.etc / name), f"/etc/{name}"]
        for tool in self._outermost():
            options += _same(tool)
        for path in covered(self.hidden, self.tools):
            options += _empty(path)
        options += ["--bind", str(self.home), self.home_in_box, "--bind", str(self.workspace), self.workdir]
        for mount in self.mounts:
            options += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target]
        # as root the box's user is the owner of /proc/sys, whose core_pattern names a program for root
        options += ["--remount-ro", "/proc", "--remount-ro", "/", "--chdir", self.workdir]
        for name, value in env.items():
            options += ["--setenv", name, value]
        return options

    def _outermost(self) -> list[Path]:
        """Return the tools that lie in no folder of another one, links last: they are made, not mounted."""
        folders = [tool for tool in self.tools if not tool.is_symlink()]
        outer = [tool for tool in self.tools if not any(tool != top and tool.is_relative_to(top) for top in folders)]
        return sorted(outer, key=lambda tool: tool.is_symlink())


def write_etc(folder: Path) -> Path:
    """Write the files of /etc that are the box's own into a folder, and return the folder."""
    for name, text in _ETC.items():
        (folder / name).write_text(text)
    return folder


def _same(path: Path) -> list[str]:
    """Return the options that show a file or folder read-only under its own path, and a link as a link."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind-try", str(path), str(path)]


def _empty(path: Path) -> list[str]:
    return ["--tmpfs", str(path), "--remount-ro", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]


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


_NAMESPACES = frozenset({"clone", "clone3", "unshare", "setns", "mount", "umount", "umount2", "pivot_root"})
"""Calls with which a program without rights makes namespaces, and in them has rights over parts of the kernel."""
_CLONE_FLAGS = 0x7E020000
"""Flags of clone(2) that make namespaces."""
_ENOSYS = 38


def without_namespaces(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a profile of system calls that allows no program to make namespaces, and none of the calls in `DENIED`.

    Podman's own profile allows it, Docker's does not. Processes and threads can be made as ever: clone3(2) hides its
    flags from a filter, so it is called unknown, and the C library takes clone(2).
    """
    rules = [
        {**rule, "names": [name for name in rule["names"] if name not in _NAMESPACES and name not in DENIED]}
        for rule in profile.get("syscalls", [])
    ]
    no_flags = {"index": 0, "value": _CLONE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    rules += [
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [no_flags]},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
    ]
    return {**profile, "syscalls": [rule for rule in rules if rule["names"]]}
