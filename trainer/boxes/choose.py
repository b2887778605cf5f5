"""Choosing a runtime by its name and settings."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.apptainer import ApptainerRuntime
from rolltap.trainer.boxes.container import ContainerRuntime
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.runtime import Runtime
from rolltap.trainer.boxes.sandbox import SandboxRuntime


def make_runtime(
    name: str,
    *,
    tools: Sequence[str | Path] = (),
    container_engine: str | None = None,
    container_arguments: Sequence[str] = (),
    build: bool = False,
) -> Runtime:
    """Return a runtime. `Runtime.check` says whether it works here. `RolloutConfig` has checked the names.

    `tools` are folders of this machine that boxes have read-only, under the same path. `container_engine` is `podman`
    or `docker`; by default the first that is installed. `container_arguments` stand between the engine's name and its
    commands. `build` lets the runtime `container` build images of tasks. Raises `InputError` for a setting that is
    wrong, or that the runtime does not have.
    """
    if name == "process" and tools:
        raise InputError(
            f'tools = {[str(tool) for tool in tools]} has no meaning with runtime = "process", which sees all folders: '
            "remove it"
        )
    if name != "container":
        settings = {"container_engine": container_engine, "container_arguments": list(container_arguments)}
        for key, value in {**settings, "build": build}.items():
            if value:
                raise InputError(f'{key} = {value!r} has no meaning with runtime = "{name}": remove it')
    folders = [_folder(tool) for tool in tools]
    if name == "process":
        return ProcessRuntime()
    if name == "sandbox":
        return SandboxRuntime(tools=folders)
    if name == "apptainer":
        return ApptainerRuntime(tools=folders)
    if container_engine is None:
        container_engine = next(filter(shutil.which, ("podman", "docker")), "podman")
    return ContainerRuntime(container_engine, container_arguments, tools=folders, build=build)


def _folder(tool: str | Path) -> Path:
    folder = Path(tool).expanduser().absolute()
    if not folder.is_dir():
        raise InputError(f'tools names "{tool}", which is no folder: write the folder of an installed program')
    return folder
