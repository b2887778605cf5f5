"""Choosing a runtime by its name and settings."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.apptainer import ApptainerRuntime
from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.remote.connection import Machine
from rolltap.trainer.boxes.remote.harbor import HarborRuntime, read_environment
from rolltap.trainer.boxes.remote.ssh import SshImageRuntime, SshRuntime
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.boxes.sandbox import SandboxRuntime

RuntimeName = Literal["process", "sandbox", "container", "apptainer", "ssh", "harbor"]
KindBehindSsh = Literal["sandbox", "container", "apptainer"]

_TAKES: dict[RuntimeName, str] = {
    "process": "",
    "sandbox": "tools",
    "container": "tools container_engine container_arguments build",
    "apptainer": "tools",
    "ssh": "ssh ssh_kind ssh_python ssh_arguments",
    "harbor": "tools build harbor_python harbor_environment recorder_address",
}
"""Settings of each runtime. `ssh` has those of its kind too, but builds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a runtime: the fields of `RolloutConfig` of these names, which has checked them.

    With `ssh`, the tools and the container engine are those of that machine.
    """

    tools: Sequence[str | Path] = ()
    container_engine: str | None = None
    container_arguments: Sequence[str] = ()
    build: bool = False
    ssh: str | None = None
    ssh_kind: KindBehindSsh | None = None
    ssh_python: str | None = None
    ssh_arguments: Sequence[str] = ()
    harbor_python: str | None = None
    harbor_environment: str | None = None
    recorder_address: str | None = None


def make_runtime(name: RuntimeName, **settings: Any) -> Runtime:
    """Return a runtime with `Settings`. `Runtime.check` says whether it works here.

    Raises `InputError` for a setting that is wrong, or that the runtime does not have.
    """
    given = Settings(**settings)
    _refuse_foreign(name, given)
    if name == "ssh":
        return _behind_ssh(given)
    tools = [_folder(tool) for tool in given.tools]
    match name:
        case "process":
            return ProcessRuntime()
        case "sandbox":
            return SandboxRuntime(tools=tools)
        case "apptainer":
            return ApptainerRuntime(tools=tools)
        case "harbor":
            return _of_harbor(given, tools)
        case "container":
            return _of_containers(given, tools)
        case _:
            assert_never(name)


def _refuse_foreign(name: RuntimeName, given: Settings) -> None:
    """Raise `InputError` for a setting that a runtime does not have."""
    known = _TAKES[name].split()
    where = f'runtime = "{name}"'
    if name == "ssh":
        kind = given.ssh_kind or "sandbox"
        known += _TAKES[kind].replace("build", "").split()
        where += f' and ssh_kind = "{kind}"'
    for key, value in asdict(given).items():
        if value and key not in known:
            raise InputError(f"{key} = {value!r} has no meaning with {where}: remove it")


def _behind_ssh(given: Settings) -> Runtime:
    how = "--ssh USER@HOST (ssh in a recipe), or a Host of ~/.ssh/config"
    if given.ssh is None:
        raise InputError(f'runtime = "ssh" needs a machine: {how}')
    if not given.ssh.strip() or given.ssh.startswith("-"):
        raise InputError(f"ssh = {given.ssh!r} is no machine: {how}")
    python = given.ssh_python or "python3"
    machine = Machine(given.ssh, python, tuple(given.ssh_arguments))
    kind = given.ssh_kind or "sandbox"
    there = {
        "name": kind,
        "tools": [str(tool) for tool in given.tools],
        "container_engine": given.container_engine,
        "container_arguments": list(given.container_arguments),
    }
    if kind == "sandbox":
        return SshRuntime(machine, there)
    return SshImageRuntime(machine, there)


def _of_containers(given: Settings, tools: Sequence[Path]) -> Runtime:
    engine = given.container_engine
    if engine is None:
        engine = next(filter(shutil.which, ("podman", "docker")), "podman")
    return ContainerRuntime(engine, given.container_arguments, tools=tools, build=given.build)


def _of_harbor(given: Settings, tools: Sequence[Path]) -> Runtime:
    if given.harbor_python is None or given.harbor_environment is None:
        raise InputError(
            'runtime = "harbor" needs harbor_python (--harbor-python), the Python of an '
            "environment with Harbor, and harbor_environment (--harbor-environment), such as "
            "daytona"
        )
    return HarborRuntime(
        Path(given.harbor_python).expanduser(),
        read_environment(given.harbor_environment),
        given.recorder_address,
        tools=tools,
        builds=given.build,
    )


def _folder(tool: str | Path) -> Path:
    folder = Path(tool).expanduser().absolute()
    if not folder.is_dir():
        fix = "write the folder of an installed program"
        raise InputError(f'tools names "{tool}", which is no folder: {fix}')
    return folder
