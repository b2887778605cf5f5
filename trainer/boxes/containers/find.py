"""Podman and Docker as they work on this machine."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.engine import call
from rolltap.trainer.boxes.containers.podman import ContainerEngine
from rolltap.trainer.boxes.inside.seccomp_filter import without_namespaces
from rolltap.trainer.boxes.runtime import BoxSpec, Mount
from rolltap.trainer.tasks.task import Limits

_INSTALL = {
    "podman": "apt-get install podman runc, or choose another runtime",
    "docker": 'see https://docs.docker.com/engine/install, or set container_engine = "podman"',
}
_PROFILE = "/usr/share/containers/seccomp.json"
"""Podman's profile of system calls. Docker gets it too, where it is; its own one makes no
namespaces either."""
_CONTROLLERS = {"cpu": "CpuCfsQuota", "memory": "MemoryLimit", "pids": "PidsLimit"}
"""Controllers of control groups, and the names that Docker has for them."""


@cache
def find_engine(program: str, arguments: tuple[str, ...]) -> ContainerEngine:
    """Return the engine as it works here. Raises `InputError`, which says what is missing."""
    if shutil.which(program) is None:
        raise InputError(f"{program} is not installed: {_INSTALL[program]}")
    command = (program, *arguments)
    try:
        if program == "docker":
            return _docker(command)
        host = json.loads(call([*command, "info", "--format", "json"]))["host"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{program} does not work here: {error}; {_INSTALL[program]}") from error
    return _podman(command, host)


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
    security = {"seccompEnabled": "seccomp" in options, "seccompProfilePath": _PROFILE}
    return ContainerEngine(
        command=command,
        controllers=frozenset(name for name, key in _CONTROLLERS.items() if info.get(key)),
        seccomp=_profile(security),
        labels="apparmor" in options or "selinux" in options,
    )


def _podman(command: tuple[str, ...], host: Mapping[str, Any]) -> ContainerEngine:
    """Return Podman's engine. `host` is what it says of this machine.

    Podman has several OCI runtimes, of which some fail on machines with old control groups: each is
    tried with an empty container, with and without limits by control groups.
    """
    security = host.get("security") or {}
    controllers = frozenset[str](host.get("cgroupControllers") or ())
    failures: list[str] = []
    for further in _podman_arguments(command):
        for usable in {controllers: None, frozenset[str](): None}:
            engine = ContainerEngine(
                command=(*command, *further),
                controllers=usable,
                seccomp=_profile(security),
                labels=bool(security.get("apparmorEnabled") or security.get("selinuxEnabled")),
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


def _profile(security: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Podman's profile of system calls, narrowed; None where the kernel or Podman has
    none."""
    path = security.get("seccompProfilePath")
    if not security.get("seccompEnabled") or not path or not Path(path).is_file():
        return None
    return without_namespaces(json.loads(Path(path).read_text()))


def _podman_arguments(given: Sequence[str]) -> list[list[str]]:
    """Return the further arguments to try."""
    found: list[list[str]] = [[]]
    if any(argument.startswith("--runtime") for argument in given):
        return found
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    runtimes = [["--runtime", name] for name in ("runc", "crun") if shutil.which(name, path=path)]
    found += runtimes
    found += [[*runtime, "--cgroup-manager", "cgroupfs"] for runtime in runtimes]
    return found


def _try(engine: ContainerEngine) -> None:
    """Make, start and remove a container. Raises `OSError`."""
    name = f"rolltap-trial-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="rolltap-trial-") as folder:
        root = Path(folder)
        spec = BoxSpec(
            name=name,
            workspace=root,
            workdir="/",
            home=root,
            image=folder,
            limits=Limits(
                cpus=1,
                memory_gib=1,
                processes=1000,
                disk_gib=1,
            ),
        )
        try:
            for command in engine.create(name, spec, system_root(root), root):
                call(command)
        finally:
            call(engine.remove(name))


def system_root(folder: Path) -> list[Mount]:
    """Make a root folder of this machine's programs: links in `folder`. Return the mounts that it
    needs."""
    mounts = []
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            (folder / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            mounts.append(Mount(path, str(path)))
    return mounts
