"""Choosing a runtime by its name and settings."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.engines.apptainer import ApptainerRuntime
from rolltap.trainer.boxes.engines.container import ContainerRuntime
from rolltap.trainer.boxes.harbor import HarborRuntime, read_environment
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.remote.connection import Machine
from rolltap.trainer.boxes.remote.ssh import SshImageRuntime, SshRuntime
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.boxes.sandbox import SandboxRuntime


def make_runtime(
    name: str,
    *,
    tools: Sequence[str | Path] = (),
    container_engine: str | None = None,
    container_arguments: Sequence[str] = (),
    build: bool = False,
    ssh: str | None = None,
    ssh_kind: str | None = None,
    ssh_python: str | None = None,
    ssh_arguments: Sequence[str] = (),
    harbor_python: str | None = None,
    harbor_environment: str | None = None,
    recorder_address: str | None = None,
) -> Runtime:
    """Return a runtime. `Runtime.check` says whether it works here. `RolloutConfig` has checked the
    names.

    `tools` are folders of this machine that boxes have read-only, under the same path.
    `container_engine` is `podman` or `docker`; by default the first that is installed.
    `container_arguments` stand between the engine's name and its commands. `build` lets the
    runtimes `container` and `harbor` build images of tasks. Raises `InputError` for a setting that
    is wrong, or that the runtime does not have.

    With the runtime `ssh`, `tools` and container engine are those of the machine `ssh`, `ssh_kind`
    is the runtime there (by default `sandbox`), `ssh_python` a Python there with psutil and
    pydantic, and `ssh_arguments` stand before the machine in the command line of ssh(1).

    With the runtime `harbor`, `harbor_python` is a Python that has Harbor, `harbor_environment` is
    read by `read_environment`, and `recorder_address` is the recorder as its boxes reach it, if
    there is one.
    """
    arguments = list(container_arguments)
    if name != "harbor":
        _refuse(
            name,
            harbor_python=harbor_python,
            harbor_environment=harbor_environment,
            recorder_address=recorder_address,
        )
    if name == "ssh":
        how = "--ssh USER@HOST (ssh in a recipe), or a Host of ~/.ssh/config"
        if ssh is None:
            raise InputError(f'runtime = "ssh" needs a machine: {how}')
        if not ssh.strip() or ssh.startswith("-"):
            raise InputError(f"ssh = {ssh!r} is no machine: {how}")
        kind = ssh_kind or "sandbox"
        settings: dict[str, Any] = {
            "tools": [str(tool) for tool in tools],
            "container_engine": container_engine,
            "container_arguments": arguments,
        }
        _refuse("ssh", build=build)
        if kind != "container":
            _refuse(
                "ssh",
                f' and ssh_kind = "{kind}"',
                container_engine=container_engine,
                container_arguments=arguments,
            )
        machine = Machine(ssh, ssh_python or "python3", tuple(ssh_arguments))
        if kind == "sandbox":
            return SshRuntime(machine, {"name": kind, **settings})
        return SshImageRuntime(machine, {"name": kind, **settings})
    _refuse(name, ssh=ssh, ssh_kind=ssh_kind, ssh_python=ssh_python, ssh_arguments=[*ssh_arguments])
    if name == "process":
        _refuse(name, ", which sees all folders", tools=[str(tool) for tool in tools])
    if name != "container":
        _refuse(name, container_engine=container_engine, container_arguments=arguments)
    folders = [_folder(tool) for tool in tools]
    if name == "harbor":
        if harbor_python is None or harbor_environment is None:
            raise InputError(
                'runtime = "harbor" needs harbor_python (--harbor-python), the Python of an '
                "environment with Harbor, and harbor_environment (--harbor-environment), such as "
                "daytona"
            )
        return HarborRuntime(
            Path(harbor_python).expanduser(),
            read_environment(harbor_environment),
            recorder_address,
            tools=folders,
            builds=build,
        )
    if name != "container":
        _refuse(name, build=build)
    if name == "process":
        return ProcessRuntime()
    if name == "sandbox":
        return SandboxRuntime(tools=folders)
    if name == "apptainer":
        return ApptainerRuntime(tools=folders)
    if container_engine is None:
        container_engine = next(filter(shutil.which, ("podman", "docker")), "podman")
    return ContainerRuntime(container_engine, container_arguments, tools=folders, build=build)


def _refuse(name: str, which: str = "", /, **settings: Any) -> None:
    """Raise `InputError` for a setting that a runtime does not have. `which` describes it."""
    for key, value in settings.items():
        if value:
            where = f'with runtime = "{name}"{which}'
            raise InputError(f"{key} = {value!r} has no meaning {where}: remove it")


def _folder(tool: str | Path) -> Path:
    folder = Path(tool).expanduser().absolute()
    if not folder.is_dir():
        fix = "write the folder of an installed program"
        raise InputError(f'tools names "{tool}", which is no folder: {fix}')
    return folder
