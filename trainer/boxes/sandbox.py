"""The runtime `sandbox`: bubblewrap (bwrap(1)), without rights of root and without images.

Its boxes have this machine's system folders and the tools of their programs, read-only.
"""

import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
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
    STARTS,
    Supervised,
    end,
    made,
    readable,
    start,
    written_to,
)
from rolltap.trainer.boxes.watch import ProcessTable, choose_cores, exceeded, rlimits
from rolltap.trainer.boxes.way_out import PORT, way_out
from rolltap.trainer.folders import remove_folder, scratch_folder
from rolltap.trainer.tasks.box_paths import HOME

_USER = 1000
"""User and group in the box. Not 0: programs that unpack files as root try to give them to other
users."""
_ETC = {
    "passwd": (
        f"agent:x:{_USER}:{_USER}::/home/agent:/bin/bash\nnobody:x:65534:65534::/:/usr/sbin/nologin\n"
    ),
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
        memory = self.spec.limits.memory_gib
        size = _GIB if memory is None else max(int(memory * _GIB) // 2, 1 << 20)
        options = (
            f"--unshare-all --unshare-user --disable-userns --uid {_USER} --gid {_USER} --cap-drop"
            f" ALL --new-session --die-with-parent --hostname box --clearenv --size {size} --perms"
            " 1777 --tmpfs /tmp --dir /run --dir /var --symlink ../tmp /var/tmp --proc /proc --dev"
            f" /dev --size {size} --perms 1777 --tmpfs /dev/shm --remount-ro /dev"
        ).split()
        for name in _SYSTEM_ETC.split():
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name in _ETC:
            options += ["--ro-bind", str(self.etc / name), f"/etc/{name}"]
        for path, seen in self.layers.items():
            options += _same(path) if seen else _empty(path)
        for path, seen in self.layers.items():
            options += [] if seen or not path.is_dir() else ["--remount-ro", str(path)]
        spec = self.spec
        options += ["--bind", str(spec.home), HOME, "--bind", str(spec.workspace), spec.workdir]
        for mount in spec.mounts:
            options += [
                "--bind" if mount.writable else "--ro-bind",
                str(mount.source),
                mount.target,
            ]
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


def _empty(path: Path) -> list[str]:
    return ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]


def _require_no_link(spec: BoxSpec) -> None:
    """Raise `OSError` for a mount on whose way there is a link in a folder that programs of the box
    write to.

    bubblewrap follows such a link while the machine's own files are still there, below /oldroot.
    """
    written = {PurePosixPath(spec.workdir): spec.workspace, PurePosixPath(HOME): spec.home}
    targets = {PurePosixPath(spec.workdir)}
    for mount in spec.mounts:
        target = PurePosixPath(mount.target)
        targets.add(target)
        if mount.writable:
            written[target] = mount.source
    for place in {way for target in targets for way in (target, *target.parents)}:
        for top in place.parents:
            if top in written and (written[top] / place.relative_to(top)).is_symlink():
                raise OSError(f"{place} is a link, and the box has a mount there: remove the link")


_COMMON = ("bash", "git", "node", "python", "python3")
"""Programs that tools of agents and judges start: seen in every box, from where the PATH has them.
"""
_INSTALL = "apt-get install bubblewrap (0.8 or newer), or choose another --runtime"


class SandboxBox:
    """A view of the machine, and the programs that run in it, each in namespaces of its own."""

    def __init__(self, runtime: HidingRuntime, spec: BoxSpec, etc: Path, bwrap: str) -> None:
        self._runtime, self._spec = runtime, spec
        self._etc, self._bwrap = etc, bwrap
        self.workdir = spec.workdir
        self.home = HOME
        self.proxy = None if spec.accept is None else f"127.0.0.1:{PORT}"

    async def run(
        self, command: Sequence[str], *, env: Mapping[str, str], timeout: float, log: Path
    ) -> Ended:
        """Run a program: see `Box.run`."""
        arguments = await finished_in(STARTS, self._arguments, command, env)
        with _Pipes() as pipes:
            pipes.write_arguments(arguments)
            async with (
                written_to(log) as output,
                start(
                    [self._bwrap, "--args", str(pipes.arguments), "--", *command],
                    env={},
                    output=output.descriptor,
                    descriptors=pipes.theirs,
                    rlimits=rlimits(self._spec.limits),
                    cpus=choose_cores(self._spec.limits),
                ) as program,
            ):
                pipes.close_theirs()
                await readable(pipes.status.fileno())
                first = pipes.status.readline()
                if first:
                    ended = await self._run(
                        program, json.loads(first)["child-pid"], pipes, timeout, log
                    )
                else:
                    await program.wait()
            if not first:
                raise OSError(f"the sandbox could not be made: {_last_words(log)}")
            return (
                ended
                if ended.status is None
                else _as_ended(ended.status, pipes.status.read(), command[0], log)
            )

    def _arguments(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return the options of bwrap, for which many files are looked at. Raises `OSError`, and as
        `layers`."""
        _require_no_link(self._spec)
        return View(self._spec, self._etc, self._runtime.layers(command)).arguments(env)

    async def _run(
        self, program: Supervised, pid: int, pipes: "_Pipes", timeout: float, log: Path
    ) -> Ended:
        """Let the program begin in the box whose first process is `pid`, and wait for its end."""
        spec = self._spec
        async with way_out(pid, spec.accept) if spec.accept else nullcontext():
            pipes.begin()
            find = partial(ProcessTable.descendants, pid=program.process.pid)
            return await end(program, timeout, exceeded(spec.limits, find, [*spec.written(), log]))

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_theirs()
        os.close(self._block)
        self.status.close()

    def write_arguments(self, options: Sequence[str]) -> None:
        """Write bubblewrap's options: not its command line, which every user of the machine can
        read."""
        status_write, block_read, *_ = self.theirs
        options = [*options, "--json-status-fd", str(status_write), "--block-fd", str(block_read)]
        options += ["--seccomp", str(self.filter)]
        if any("\0" in option for option in options):
            raise OSError(
                "a variable or a path has a NUL, after which bubblewrap reads an option: remove it"
            )
        for descriptor, content in (
            (self.arguments, os.fsencode("".join(f"{option}\0" for option in options))),
            (self.filter, seccomp_filter()),
        ):
            os.write(descriptor, content)
            os.lseek(descriptor, 0, os.SEEK_SET)

    def close_theirs(self) -> None:
        """Close the ends that belong to bubblewrap."""
        while self.theirs:
            os.close(self.theirs.pop())

    def begin(self) -> None:
        """Let the program begin: bubblewrap waits for it. One that has failed meanwhile says why by
        its end."""
        with suppress(BrokenPipeError):
            os.write(self._block, b"\0")


def _as_ended(status: int, words: bytes, program: str, log: Path) -> Ended:
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
    return Ended(128 - status if 128 < status <= 128 + 64 else status)


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
            spec = BoxSpec(name="check", workspace=place, workdir="/workspace", home=place)
            view = View(spec, write_etc(place), self.layers())
            command = [bwrap, *view.arguments({}), "--", "/usr/bin/env"]
            done = subprocess.run(
                command, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
        if done.returncode:
            said = done.stderr.strip()
            how = (
                _INSTALL
                if "Unknown option" in said
                else "allow user namespaces, or choose another --runtime"
            )
            raise InputError(f"bubblewrap cannot make a sandbox here ({said}): {how}")

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[SandboxBox]:
        """Yield a box. Raises `InputError` for an image, and for a tool folder that contains the
        workspace."""
        if spec.image is not None:
            raise InputError(
                f"the runtime sandbox has no images, and the task needs {spec.image}: --runtime"
                " container"
            )
        for tool in self.tools:
            require_narrow(tool, spec.workspace)
        spec = replace(spec, limits=spec.limits.of_isolated())
        bwrap = await finished_in(STARTS, _find_bwrap)
        async with made(
            lambda: write_etc(Path(tempfile.mkdtemp(prefix="rolltap-"))), remove_folder
        ) as etc:
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
        names = [word for word in command if "/" not in word and word.split() == [word]]
        names += sorted(self.programs)
        needed = [part for name in (*names, *_COMMON) for part in tool_folders(name, path)]
        shown = [*SYSTEM, *self.tools, *(tool.resolve() for tool in self.tools), *needed]
        # what a link leads to is seen under its own path only
        hidden = self.hidden_in(place for place in shown if not place.is_symlink())
        layers = layered(shown, [*hidden, *projects_around(needed)])
        for file in (
            Path(found) for found in (shutil.which(name, path=path) for name in names) if found
        ):
            for top, seen in (nearest(file, layers), nearest(file.resolve(), layers)):
                if seen is False:
                    raise InputError(
                        f"the program {file} is in {top}, which sessions must not see: install it"
                        " elsewhere, or move what is private out of that folder"
                    )
        return layers

    def image_digest(self, image: str) -> str:
        """Return an empty digest: there are no images."""
        return ""


def _find_bwrap() -> str:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError(
            f"the runtime sandbox needs bubblewrap, and bwrap is not on the PATH: {_INSTALL}"
        )
    return bwrap
