"""The command lines of Podman and Docker."""

import json
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltap.trainer.boxes.containers.engine import KEEPER, Engine, mount_options
from rolltap.trainer.boxes.containers.images import is_root_folder
from rolltap.trainer.boxes.runtime import BoxSpec, Mount
from rolltap.trainer.tasks.task import Limits

LABEL = "rolltap"
"""Label of every container. Its value is the id of the runtime that made it."""
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
    " none --hostname localhost --pull never --stop-timeout 0 --no-healthcheck"
)
_MASKED = ("/proc/pressure", "/proc/1/mem", "/proc/1/task")
"""Files that root of a container may open for writing: each writer of the first is a thread of the
kernel, and the others are the memory of the first process, whose end is the end of the container.
"""


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
        self,
        name: str,
        spec: BoxSpec,
        mounts: Sequence[Mount],
        folder: Path,
    ) -> list[list[str]]:
        """See `Engine.create`."""
        options = ["--name", name, "--label", f"{LABEL}={self.label}", *_CLOSED.split()]
        options += ["--entrypoint", KEEPER[0]]
        options += self._limits(spec.limits)
        options += mount_options(mounts, "readonly")
        if self.command[0] == "podman":
            # containers get this process's proxy variables otherwise
            options += ["--user", _USER, "--http-proxy=false"]
            options += ["--security-opt", f"mask={':'.join(_MASKED)}"]
        else:
            options += ["--user", _NOBODY]
        if self.seccomp is not None:
            profile = folder / "seccomp.json"
            profile.write_text(json.dumps(self.seccomp))
            options += ["--security-opt", f"seccomp={profile}"]
        image = [str(spec.image)]
        if is_root_folder(image[0]):
            image = ["--rootfs", f"{image[0]}:O"]
        making = [*self.command, "create", *options, *image, *KEEPER[1:]]
        return [making, [*self.command, "start", name]]

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
        # Docker has no masks
        return [[*mount, "--types", "tmpfs", "--options", "ro", "tmpfs", _MASKED[0]]]

    def _limits(self, limits: Limits) -> list[str]:
        options = ["--ulimit", "core=0:0"]
        if limits.cpus is not None and "cpu" in self.controllers:
            options += ["--cpus", f"{limits.cpus:g}"]
        if limits.memory_gib is not None and "memory" in self.controllers:
            size = f"{limits.memory_gib * 2**30:.0f}"
            options += ["--memory", size, "--memory-swap", size]
        if limits.processes is not None and "pids" in self.controllers:
            # the box is stopped above its limit: this is against those that are faster
            options += ["--pids-limit", str(2 * limits.processes + _FURTHER_PROCESSES)]
        files = _at_most(resource.RLIMIT_NOFILE, _MAX_FILES)
        processes = _at_most(resource.RLIMIT_NPROC, _MAX_PROCESSES)
        options += ["--ulimit", f"nofile={files}:{files}"]
        options += ["--ulimit", f"nproc={processes}:{processes}"]
        if limits.disk_gib is not None:
            size = f"{limits.disk_gib * 2**30:.0f}"
            options += ["--ulimit", f"fsize={size}:{size}"]
        return options


def _at_most(limit: int, value: int) -> int:
    """Return a value that this process may give as a limit."""
    hard = resource.getrlimit(limit)[1]
    if hard == resource.RLIM_INFINITY:
        return value
    return min(value, hard)
