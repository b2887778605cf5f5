"""The runtime `container`: Podman or Docker, by their command lines.

First images and root folders: their digests, and copies of their folders. Then the engine: its
command lines, and which of their options work on this machine. Then the runtime.
"""

import asyncio
import hashlib
import json
import os
import resource
import secrets
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.engines.box import KEEPER, Engine, EngineBox, call, mount_options
from rolltap.trainer.boxes.hiding import HidingRuntime, require_narrow
from rolltap.trainer.boxes.inside.seccomp_filter import without_namespaces
from rolltap.trainer.boxes.runtime import BoxSpec, Mount
from rolltap.trainer.tasks.task import Build, Limits

_PULL_SECONDS = 3600.0


def is_root_folder(image: str) -> bool:
    """Return True when the image of a task is a root folder of this machine: an absolute path."""
    return image.startswith("/")


def image_id(engine: Sequence[str], image: str) -> str:
    """Return the digest of an image's configuration, which names its layers. An image that is not
    here is pulled.

    `engine` is the beginning of the engine's command line. Raises `InputError` when the image
    cannot be had.
    """
    inspect = [*engine, "image", "inspect", "--format", "{{.Id}}", image]
    try:
        try:
            identity = call(inspect)
        except OSError:
            call([*engine, "pull", "--quiet", image], timeout=_PULL_SECONDS)
            identity = call(inspect)
    except OSError as error:
        raise InputError(f"the image {image} is not here and cannot be pulled: {error}") from error
    return f"sha256:{identity.strip().removeprefix('sha256:')}"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def root_folder_digest(root: Path) -> str:
    """Return the SHA-256 of a root folder: of paths, modes, links and contents. Raises `InputError`
    without it."""
    if not root.is_dir():
        raise InputError(
            f"the image {root} is no folder of this machine; an image name does not begin with /"
        )
    digest = hashlib.sha256()
    for entry in _entries(root):
        status = entry.stat(follow_symlinks=False)
        digest.update(
            f"{os.path.relpath(entry, root)}\0{status.st_mode:o}\0".encode(errors="surrogateescape")
        )
        if entry.is_symlink():
            digest.update(os.fsencode(os.readlink(entry)))
        elif stat.S_ISREG(status.st_mode):
            digest.update(file_digest(Path(entry)).encode())
    return f"sha256:{digest.hexdigest()}"


def _entries(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry)


def copy_from_root_folder(root: Path, workdir: str, dest: Path) -> None:
    """Copy what the folder `workdir` of a root folder holds into `dest`. Raises `InputError`
    without that folder."""
    source = (root / workdir.lstrip("/")).resolve()
    # a link to an absolute path leads to another folder here than in the container
    if not source.is_relative_to(root.resolve()) or not source.is_dir():
        raise InputError(f"the root folder {root} has no folder {workdir}")
    shutil.copytree(source, dest, symlinks=True, dirs_exist_ok=True)


def copy_from_image(engine: Sequence[str], image: str, workdir: str, dest: Path) -> None:
    """Copy what the folder `workdir` of an image holds into `dest`. Raises `InputError` without
    that folder."""
    image_id(engine, image)
    name = f"rolltap-copy-{secrets.token_hex(8)}"
    dest.mkdir(parents=True, exist_ok=True)
    try:
        call(
            [
                *engine,
                "create",
                "--name",
                name,
                "--network",
                "none",
                "--pull",
                "never",
                image,
                "true",
            ]
        )
        call([*engine, "cp", f"{name}:{workdir.rstrip('/')}/.", str(dest)], timeout=_PULL_SECONDS)
    except OSError as error:
        raise InputError(
            f"the folder {workdir} of the image {image} cannot be copied: {error}"
        ) from error
    finally:
        call([*engine, "rm", "--force", "--volumes", name])


LABEL = "rolltap"
"""Label of every container. Its value is the id of the runtime that made it."""

_INSTALL = {
    "podman": "apt-get install podman runc, or choose another runtime",
    "docker": 'see https://docs.docker.com/engine/install, or set container_engine = "podman"',
}
_MAX_FILES = 65536
_MAX_PROCESSES = 32768
"""Podman asks for 2^20 of both otherwise, and raising a limit is a right that not even every root
has."""

_FURTHER_PROCESSES = 64
_USER = "0:0"
"""Root of a box is this user on this machine: without user namespaces only root has containers."""
_NOBODY = "65534:65534"
"""User of the first process in a container of Docker, which has no masks: root of the box has no
rights over it."""
_CLOSED = (
    "--network none --cap-drop all --security-opt no-new-privileges --cgroupns private --log-driver"
    " none"
)
_MASKED = ("/proc/pressure", "/proc/1/mem", "/proc/1/task")
"""Files that root of a container may open for writing: each writer of the first is a thread of the
kernel, and the others are the memory of the first process, whose end is the end of the container.
"""
_PROFILE = "/usr/share/containers/seccomp.json"
"""Podman's profile of system calls. Docker gets it too, where it is; its own one makes no
namespaces either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEngine(Engine):
    """The command lines of Podman and Docker, which are the same up to a few options.

    Attributes:
        controllers: Controllers of control groups that the engine can use: `cpu`, `memory`, `pids`.
        label: Value of the label of each container.
        seccomp: Profile of system calls; None for the engine's own.
        labels: True with AppArmor or SELinux: the engine writes to a box's /proc when it starts a
            program in it.
    """

    command: tuple[str, ...]
    controllers: frozenset[str] = frozenset()
    label: str = ""
    seccomp: dict[str, Any] | None = None
    labels: bool = False

    def create(
        self, name: str, spec: BoxSpec, mounts: Sequence[Mount], folder: Path
    ) -> list[list[str]]:
        """See `Engine.create`."""
        image = str(spec.image)
        podman = self.command[0] == "podman"
        options = [
            *f"--name {name} --label {LABEL}={self.label} --hostname localhost".split(),
            *("--user", _USER if podman else _NOBODY),
            *f"{_CLOSED} --pull never --stop-timeout 0 --no-healthcheck".split(),
            *("--entrypoint", KEEPER[0]),
            *self._limits(spec.limits),
            *mount_options(mounts, "readonly"),
        ]
        if podman:
            # containers get this process's proxy variables otherwise
            options.append("--http-proxy=false")
            options += ["--security-opt", f"mask={':'.join(_MASKED)}"]
        if self.seccomp is not None:
            profile = folder / "seccomp.json"
            profile.write_text(json.dumps(self.seccomp))
            options += ["--security-opt", f"seccomp={profile}"]
        source = ["--rootfs", f"{image}:O"] if is_root_folder(image) else [image]
        return [
            [*self.command, "create", *options, *source, *KEEPER[1:]],
            [*self.command, "start", name],
        ]

    def execute(self, name: str, command: Sequence[str]) -> list[str]:
        """See `Engine.execute`."""
        return [*self.command, "exec", "--user", _USER, name, *command]

    def close(self, pid: int) -> list[list[str]]:
        """See `Engine.close`. In a read-only /proc no program can write to the memory of another
        one, as of a judge."""
        mount = ["mount", "--namespace", str(pid)]
        if os.geteuid():
            return []
        if not self.labels:
            return [[*mount, "--options", "remount,bind,ro,nosuid,nodev,noexec", "/proc"]]
        if self.command[0] == "podman" or not Path(_MASKED[0]).is_dir():
            return []
        return [
            [*mount, "--types", "tmpfs", "--options", "ro", "tmpfs", _MASKED[0]]
        ]  # Docker has no masks

    def _limits(self, limits: Limits) -> Iterator[str]:
        if limits.cpus is not None and "cpu" in self.controllers:
            yield from ("--cpus", f"{limits.cpus:g}")
        if limits.memory_gib is not None and "memory" in self.controllers:
            size = f"{limits.memory_gib * 2**30:.0f}"
            yield from ("--memory", size, "--memory-swap", size)
        if limits.processes is not None and "pids" in self.controllers:
            # the box is stopped above its limit: this is against those that are faster
            yield from ("--pids-limit", str(2 * limits.processes + _FURTHER_PROCESSES))
        yield from ("--ulimit", "core=0:0")
        for name, limit, value in (
            ("nofile", resource.RLIMIT_NOFILE, _MAX_FILES),
            ("nproc", resource.RLIMIT_NPROC, _MAX_PROCESSES),
        ):
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            yield from ("--ulimit", f"{name}={value}:{value}")
        if limits.disk_gib is not None:
            size = f"{limits.disk_gib * 2**30:.0f}"
            yield from ("--ulimit", f"fsize={size}:{size}")


def system_root(folder: Path) -> list[Mount]:
    """Make a root folder of this machine's programs: links in `folder`. Return the mounts that it
    needs."""
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(os.readlink(Path("/", name)))
    return [
        Mount(path, str(path))
        for path in (Path("/", name) for name in ("usr", "bin", "sbin", "lib", "lib64"))
        if path.is_dir() and not path.is_symlink()
    ]


@cache
def find_engine(program: str, arguments: tuple[str, ...]) -> ContainerEngine:
    """Return the engine as it works here. Raises `InputError`, which says what is missing.

    Podman has several OCI runtimes, of which some fail on machines with old control groups: each is
    tried with an empty container, with and without limits by control groups.
    """
    if shutil.which(program) is None:
        raise InputError(f"{program} is not installed: {_INSTALL[program]}")
    command = (program, *arguments)
    try:
        if program == "docker":
            return _docker(command)
        host = json.loads(call([*command, "info", "--format", "json"]))["host"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{program} does not work here: {error}; {_INSTALL[program]}") from error
    controllers = frozenset(host.get("cgroupControllers") or ())
    security = host.get("security") or {}
    seccomp = _profile(security)
    labels = bool(security.get("apparmorEnabled") or security.get("selinuxEnabled"))
    failures: list[str] = []
    for further in _podman_arguments(arguments):
        for usable in dict.fromkeys((controllers, frozenset[str]())):
            engine = ContainerEngine(
                command=(*command, *further), controllers=usable, seccomp=seccomp, labels=labels
            )
            try:
                _try(engine)
            except OSError as error:
                failures.append(str(error))
            else:
                return engine
    raise InputError(
        f"podman cannot start containers here: {failures[0]}. Install runc (apt-get install runc),"
        ' or name what works: container_arguments = ["--runtime", "runc", "--cgroup-manager",'
        ' "cgroupfs"]'
    )


def _profile(security: dict[str, Any]) -> dict[str, Any] | None:
    """Return Podman's profile of system calls, narrowed; None where the kernel or Podman has
    none."""
    path = security.get("seccompProfilePath")
    if not security.get("seccompEnabled") or not path or not Path(path).is_file():
        return None
    return without_namespaces(json.loads(Path(path).read_text()))


def _podman_arguments(given: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the further arguments to try."""
    if any(argument.startswith("--runtime") for argument in given):
        return [()]
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    runtimes = [("--runtime", name) for name in ("runc", "crun") if shutil.which(name, path=path)]
    return [(), *runtimes, *((*runtime, "--cgroup-manager", "cgroupfs") for runtime in runtimes)]


def _try(engine: ContainerEngine) -> None:
    """Make, start and remove a container. Raises `OSError`."""
    name = f"rolltap-trial-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="rolltap-trial-") as folder:
        root = Path(folder)
        mounts = system_root(root)
        limits = Limits(cpus=1, memory_gib=1, processes=1000, disk_gib=1)
        spec = BoxSpec(
            name=name, workspace=root, workdir="/", home=root, image=folder, limits=limits
        )
        try:
            for command in engine.create(name, spec, mounts, root):
                call(command)
        finally:
            call(engine.remove(name))


def _docker(command: tuple[str, ...]) -> ContainerEngine:
    """Return Docker's engine. Raises `InputError` for a daemon whose containers this user cannot
    enter."""
    info = json.loads(call([*command, "info", "--format", "{{json .}}"]))
    options = " ".join(info.get("SecurityOptions") or ())
    if os.geteuid() and "rootless" not in options:
        raise InputError(
            "containers of the system's Docker daemon have networks that only root can enter: run"
            ' rolltap as root, use rootless Docker, or set container_engine = "podman"'
        )
    known = {"cpu": "CpuCfsQuota", "memory": "MemoryLimit", "pids": "PidsLimit"}
    controllers = frozenset(name for name, key in known.items() if info.get(key))
    security = {"seccompEnabled": "seccomp" in options, "seccompProfilePath": _PROFILE}
    labels = "apparmor" in options or "selinux" in options
    return ContainerEngine(
        command=command, controllers=controllers, seccomp=_profile(security), labels=labels
    )


class ContainerRuntime(HidingRuntime):
    """Boxes that are containers: of an image, or of a root folder, of which each gets a copy on
    write.

    `engine` is `podman` or `docker`; `arguments` stand before its commands. With `build` it builds
    tasks' images.
    """

    name = "container"
    isolated = True
    warning: str | None = None

    def __init__(
        self,
        engine: str = "podman",
        arguments: Sequence[str] = (),
        *,
        tools: Sequence[Path] = (),
        build: bool = False,
    ) -> None:
        super().__init__(tools)
        self.builds = build
        self._program, self._arguments = engine, tuple(arguments)
        self.id = secrets.token_hex(4)
        """Value of the label `rolltap` of the runtime's containers."""

    def check(self) -> None:
        """Start a container as a trial. Raises `InputError` when the engine is missing, or does not
        work."""
        self._engine()

    def _engine(self) -> ContainerEngine:
        return replace(find_engine(self._program, self._arguments), label=self.id)

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[EngineBox]:
        """Yield a container. Raises `InputError` for an image that is not here, and `OSError` when
        the engine fails."""
        for tool in self.tools:
            require_narrow(tool, spec.workspace)
        engine = await asyncio.to_thread(self._ready, str(spec.image), spec.workspace)
        async with EngineBox(self, engine, spec, f"rolltap-{self.id}-{spec.name}").alive() as box:
            yield box

    def _ready(self, image: str, workspace: Path) -> ContainerEngine:
        """Return the engine, with an image that is here. Raises `InputError` when one of them
        cannot be had."""
        if not is_root_folder(image):
            engine = self._engine()
            image_id(engine.command, image)
            return engine
        if not Path(image).is_dir():
            raise InputError(f"the image {image} is no folder of this machine")
        if workspace.resolve().is_relative_to(Path(image).resolve()):
            raise InputError(
                f"the root folder {image} contains the workspace {workspace}, so a session would"
                " see others"
            )
        if ":" in image:
            raise InputError(
                f"the root folder {image} has a colon in its name, which Podman does not take:"
                " rename it"
            )
        if self._program == "docker":
            raise InputError(
                f"Docker has no containers of a root folder, and the image is {image}: set"
                " container_engine = "
                f'"podman", or make an image: tar -C {image} -c . | docker import - NAME'
            )
        return self._engine()

    async def build(self, image: str, build: Build, log: Path) -> None:
        """Build an image, unless it is there. See `build_image`."""
        # a machine that only has boxes builds none, and lacks what this imports
        from rolltap.trainer.boxes.engines.build import build_image

        await build_image((await asyncio.to_thread(self._engine)).command, image, build, log)

    def image_digest(self, image: str) -> str:
        """Return the SHA-256 of an image's configuration or of a root folder's content. It may pull
        the image.

        Raises `InputError` when there is no such image.
        """
        if is_root_folder(image):
            return root_folder_digest(Path(image))
        return image_id(self._engine().command, image)

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image holds into the folder `dest`. Raises
        `InputError` without it."""
        if is_root_folder(image):
            copy_from_root_folder(Path(image), workdir, dest)
        else:
            copy_from_image(self._engine().command, image, workdir, dest)
