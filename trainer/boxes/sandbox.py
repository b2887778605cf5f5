"""The runtime `sandbox`: bubblewrap (bwrap(1)), without rights of root and without images.

Its boxes have this machine's system folders and the tools of their programs, read-only.
"""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Self

from rolltap.addons.concurrency import finished_in
from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.hiding import HidingRuntime, layered, nearest, require_narrow
from rolltap.trainer.boxes.inside.seccomp_filter import seccomp_filter
from rolltap.trainer.boxes.programs import SYSTEM, projects_around, tool_folders
from rolltap.trainer.boxes.runtime import BoxSpec, Ended
from rolltap.trainer.boxes.supervised import (
    PROGRAM_THREADS,
    Supervised,
    end,
    made,
    readable,
    start,
    written_to,
)
from rolltap.trainer.boxes.watch import ProcessTable, choose_cores, exceeded, rlimits
from rolltap.trainer.boxes.way_out import PORT, way_out
from rolltap.trainer.folders import new_folder, remove_folder, scratch_folder
from rolltap.trainer.tasks.box_paths import HOME

_USER = 1000
"""User and group in the box. Not 0: programs that unpack files as root try to give them to other
users."""
_ETC = {
    "passwd": f"""\
agent:x:{_USER}:{_USER}::/home/agent:/bin/bash
nobody:x:65534:65534::/:/usr/sbin/nologin
""",
    "group": f"agent:x:{_USER}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
    "hostname": "box\n",
}
"""Files of /etc that are the box's own."""
_SYSTEM_ETC = (
    "alternatives bash.bashrc ca-certificates ca-certificates.conf crypto-policies debian_version"
    " fonts inputrc ld.so.cache ld.so.conf ld.so.conf.d locale.alias localtime magic mime.types"
    " os-release pki/ca-trust pki/tls/certs profile protocols services shells ssl/certs"
    " ssl/openssl.cnf terminfo timezone"
)
"""Files and folders of /etc that programs need, as this machine has them. None holds a secret."""
_GIB = 1 << 30
"""Size of /tmp and of /dev/shm when memory has no limit. With one each has half of it, which does
not count as used."""


_OPTIONS = """
--unshare-all --unshare-user --disable-userns --uid {user} --gid {user} --cap-drop ALL
--new-session --die-with-parent --hostname box --clearenv
--size {size} --perms 1777 --tmpfs /tmp
--dir /run --dir /var --symlink ../tmp /var/tmp --proc /proc --dev /dev
--size {size} --perms 1777 --tmpfs /dev/shm --remount-ro /dev
"""


@dataclass(frozen=True, slots=True)
class View:
    """Everything that programs in a sandbox see.

    Nothing of this machine but `layers` is seen, read-only. The workspace and the home folder can
    be written, and /tmp and /dev/shm, which are in memory and empty for each program. /proc has the
    box's own processes, /dev the harmless devices. There is no other network than the box's own
    loopback.

    Attributes:
        etc: Folder with the files that `write_etc` wrote.
        layers: Files, folders and symbolic links under their own path, outer ones first: True for
            what is seen, False for what is empty.
    """

    spec: BoxSpec
    etc: Path
    layers: Mapping[Path, bool]

    def arguments(self, env: Mapping[str, str]) -> list[str]:
        """Return the options of bwrap, all but the command and what passes descriptors. `env` is
        the environment."""
        spec = self.spec
        size = _GIB
        if spec.limits.memory_gib is not None:
            size = max(int(spec.limits.memory_gib * _GIB) // 2, 1 << 20)
        options = _OPTIONS.format(user=_USER, size=size).split()
        for name in _SYSTEM_ETC.split():
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name in _ETC:
            options += ["--ro-bind", str(self.etc / name), f"/etc/{name}"]
        empty_folders = []
        for path, is_seen in self.layers.items():
            if is_seen:
                options += _same(path)
            elif path.is_dir():
                options += ["--tmpfs", str(path)]
                empty_folders.append(path)
            else:
                options += ["--ro-bind", "/dev/null", str(path)]
        for path in empty_folders:  # all that is mounted in them is there now
            options += ["--remount-ro", str(path)]
        options += ["--bind", str(spec.home), HOME, "--bind", str(spec.workspace), spec.workdir]
        for mount in spec.mounts:
            bind = "--bind" if mount.writable else "--ro-bind"
            options += [bind, str(mount.source), mount.target]
        # as root the box's user is the owner of /proc/sys, whose core_pattern names a program for
        # root
        options += ["--remount-ro", "/proc", "--remount-ro", "/", "--chdir", spec.workdir]
        for name, value in env.items():
            options += ["--setenv", name, value]
        return options


def write_etc(folder: Path) -> Path:
    """Write the files of /etc that are the box's own into a folder, and return the folder."""
    for name, text in _ETC.items():
        (folder / name).write_text(text)
    return folder


def _same(path: Path) -> list[str]:
    """Return the options that show a file or folder read-only under its own path, and a link as a
    link."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind-try", str(path), str(path)]


def _require_no_link(spec: BoxSpec) -> None:
    """Raise `OSError` for a mount on whose way there is a link in a folder that programs of the box
    write to.

    bubblewrap follows such a link while the machine's own files are still there, below /oldroot.
    """
    workdir = PurePosixPath(spec.workdir)
    written = {workdir: spec.workspace, PurePosixPath(HOME): spec.home}
    places = {workdir, *workdir.parents}
    for mount in spec.mounts:
        target = PurePosixPath(mount.target)
        places |= {target, *target.parents}
        if mount.writable:
            written[target] = mount.source
    for place in places:
        for top in place.parents:
            if top in written and (written[top] / place.relative_to(top)).is_symlink():
                raise OSError(f"{place} is a link, and the box has a mount there: remove the link")


_COMMON = ("bash", "git", "node", "python", "python3")
"""Programs that tools of agents and judges start: seen in every box, from where the PATH has them.
"""
_INSTALL = (
    "install bubblewrap 0.8 or newer (apt-get install bubblewrap), or choose another --runtime"
)


class SandboxBox:
    """A view of the machine, and the programs that run in it, each in namespaces of its own."""

    def __init__(
        self,
        runtime: HidingRuntime,
        spec: BoxSpec,
        etc: Path,
        bwrap: str,
    ) -> None:
        self._runtime = runtime
        self._spec = spec
        self._etc = etc
        self._bwrap = bwrap
        self.workdir = spec.workdir
        self.home = HOME
        self.proxy = None if spec.accept is None else f"127.0.0.1:{PORT}"

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        """Run a program: see `Box.run`."""
        limits = self._spec.limits
        arguments = await finished_in(PROGRAM_THREADS, self._arguments, command, env)
        with _Pipes() as pipes:
            pipes.write_arguments(arguments)
            async with (
                written_to(log) as output,
                start(
                    [self._bwrap, "--args", str(pipes.arguments), "--", *command],
                    env={},
                    output=output.descriptor,
                    descriptors=pipes.theirs,
                    rlimits=rlimits(limits),
                    cpus=choose_cores(limits),
                ) as program,
            ):
                pipes.close_theirs()
                await readable(pipes.status.fileno())
                first = pipes.status.readline()
                if first:
                    pid = json.loads(first)["child-pid"]
                    ended = await self._run(program, pid, pipes, timeout, log)
                else:
                    await program.wait()
            if not first:
                raise OSError(f"the sandbox could not be made: {_last_words(log)}")
            if ended.status is None:
                return ended
            return _as_ended(ended.status, pipes.status.read(), command[0], log)

    def _arguments(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return the options of bwrap, for which many files are looked at. Raises `OSError`, and as
        `layers`."""
        _require_no_link(self._spec)
        return View(self._spec, self._etc, self._runtime.layers(command)).arguments(env)

    async def _run(
        self,
        program: Supervised,
        pid: int,
        pipes: "_Pipes",
        timeout: float,
        log: Path,
    ) -> Ended:
        """Let the program begin in the box whose first process is `pid`, and wait for its end."""
        spec = self._spec
        async with AsyncExitStack() as stack:
            if spec.accept is not None:
                await stack.enter_async_context(way_out(pid, spec.accept))
            pipes.begin()
            find = partial(ProcessTable.descendants, pid=program.process.pid)
            limit = exceeded(spec.limits, find, [*spec.written(), log])
            return await end(program, timeout, limit)

    async def settle(self) -> None:
        """Do nothing: a program's end is the end of its namespaces, and of every process in
        them."""


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
        self._options = ["--json-status-fd", str(status_write), "--block-fd", str(block_read)]
        self._options += ["--seccomp", str(self.filter)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_theirs()
        os.close(self._block)
        self.status.close()

    def write_arguments(self, options: Sequence[str]) -> None:
        """Write bubblewrap's options: not its command line, which every user of the machine can
        read."""
        content = ""
        for option in [*options, *self._options]:
            if "\0" in option:
                raise OSError(
                    "a variable or a path has a NUL, after which bubblewrap reads an option: remove"
                    " it"
                )
            content += f"{option}\0"
        os.pwrite(self.arguments, os.fsencode(content), 0)
        os.pwrite(self.filter, seccomp_filter(), 0)

    def close_theirs(self) -> None:
        """Close the ends that belong to bubblewrap."""
        while self.theirs:
            os.close(self.theirs.pop())

    def begin(self) -> None:
        """Let the program begin: bubblewrap waits for it. One that has failed meanwhile says why by
        its end."""
        with suppress(BrokenPipeError):
            os.write(self._block, b"\0")


def _as_ended(
    status: int,
    words: bytes,
    program: str,
    log: Path,
) -> Ended:
    """Return how a program ended. bubblewrap tells an exit code only of a program that was started.

    It ends with 128 and the number of the signal that ended the program.
    """
    if b"exit-code" not in words:
        if status < 0:
            return Ended(status)
        # nothing of the session has run: these are bubblewrap's own words
        said = _last_words(log)
        if "execvp" in said:
            raise FileNotFoundError(
                errno.ENOENT, f"cannot be started in the sandbox ({said})", program
            )
        raise OSError(f"the sandbox could not be made: {said}")
    if 128 < status <= 128 + 64:
        status = 128 - status
    return Ended(status)


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-500:]


class SandboxRuntime(HidingRuntime):
    """Boxes of bubblewrap: see `View` for what is in them. Images are refused."""

    name = "sandbox"
    isolated = True
    warning: str | None = None

    def check(self) -> None:
        """Raise `InputError` when bubblewrap is missing, too old, or may not make namespaces, or
        without a filter."""
        for tool in self.tools:
            if not tool.exists():
                raise InputError(f"the tool folder {tool} does not exist")
        bwrap = _find_bwrap()
        seccomp_filter()
        with scratch_folder() as place:
            spec = BoxSpec(
                name="check",
                workspace=place,
                workdir="/workspace",
                home=place,
            )
            view = View(spec, write_etc(place), self.layers())
            command = [bwrap, *view.arguments({}), "--", "/usr/bin/env"]
            done = subprocess.run(
                command,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        if done.returncode:
            said = done.stderr.strip()
            how = "allow user namespaces, or choose another --runtime"
            if "Unknown option" in said:
                how = _INSTALL
            raise InputError(f"bubblewrap cannot make a sandbox here ({said}): {how}")

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[SandboxBox]:
        """Yield a box. Raises `InputError` for an image, and for a tool folder that contains the
        workspace."""
        if spec.image is not None:
            raise InputError(
                f"the runtime sandbox has no images, and the task needs {spec.image}: use --runtime"
                " container"
            )
        for tool in self.tools:
            require_narrow(tool, spec.workspace)
        spec = replace(spec, limits=spec.limits.of_isolated())
        bwrap = await finished_in(PROGRAM_THREADS, _find_bwrap)
        async with made(new_folder, remove_folder) as etc:
            await finished_in(PROGRAM_THREADS, write_etc, etc)
            yield SandboxBox(self, spec, etc, bwrap)

    def layers(self, command: Sequence[str] = ()) -> dict[Path, bool]:
        """See `HidingRuntime.layers`. Shown are the system, the tools, and what programs of the
        operator need.

        These are `_COMMON`, those of `show`, and each word of `command` that is a name on this
        process's PATH: a program may start another one. A path in a command shows nothing, because
        a task may have written it.
        """
        super().layers()
        path = os.environ.get("PATH", os.defpath)
        names = sorted(self.programs)
        for word in command:
            if "/" not in word and word.split() == [word]:
                names.append(word)
        needed: list[Path] = []
        for name in [*names, *_COMMON]:
            needed += tool_folders(name, path)
        shown = [*SYSTEM, *self.tools, *(tool.resolve() for tool in self.tools), *needed]
        # what a link leads to is seen under its own path only
        hidden = self.hidden_in(place for place in shown if not place.is_symlink())
        layers = layered(shown, [*hidden, *projects_around(needed)])
        for name in names:
            found = shutil.which(name, path=path)
            if found is not None:
                _require_seen(Path(found), layers)
        return layers

    def image_digest(self, image: str) -> str:
        """Return an empty digest: there are no images."""
        return ""


def _require_seen(program: Path, layers: Mapping[Path, bool]) -> None:
    for file in (program, program.resolve()):
        top, is_seen = nearest(file, layers)
        if is_seen is False:
            raise InputError(
                f"the program {program} is in {top}, which sessions must not see: install it"
                " elsewhere, or move what is private out of that folder"
            )


def _find_bwrap() -> str:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError(
            f"the runtime sandbox needs bubblewrap, and bwrap is not on the PATH: {_INSTALL}"
        )
    return bwrap
