"""The runtime `apptainer`, by Apptainer's command line."""

import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.engines import container
from rolltap.trainer.boxes.engines.box import Engine, EngineBox, call, mount_options
from rolltap.trainer.boxes.hiding import HidingRuntime
from rolltap.trainer.boxes.runtime import BoxSpec, Mount
from rolltap.trainer.tasks.task import Limits

_CONTROL_GROUPS = Path("/sys/fs/cgroup/cgroup.controllers")
"""Is there with control groups of version 2, with which Apptainer has limits for every user."""
_CLOSED = (
    "--containall --no-home --no-mount hostfs,bind-paths --writable-tmpfs --net --network none"
    " --no-privs"
)
_ADDS_RIGHTS = ("APPTAINER_ADD_CAPS", "SINGULARITY_ADD_CAPS")
"""Variables that stand for the option --add-caps, which counts beside --no-privs."""
_COPIED = "/rolltap-copy"


class ApptainerEngine(Engine):
    """The command lines of Apptainer. A box is an instance: its first process is Apptainer's
    own."""

    command = ("apptainer",)

    def create(
        self, name: str, spec: BoxSpec, mounts: Sequence[Mount], folder: Path
    ) -> list[list[str]]:
        """See `Engine.create`."""
        return [self.restart(name, spec, mounts)]

    def restart(self, name: str, spec: BoxSpec, mounts: Sequence[Mount]) -> list[str]:
        """See `Engine.restart`. What programs wrote outside of the mounts is gone: it was in
        memory."""
        options = [
            *_CLOSED.split(),
            *(_limits(spec.limits) if _CONTROL_GROUPS.exists() else ()),
            *mount_options(mounts, "ro"),
        ]
        return ["apptainer", "instance", "start", *options, source(str(spec.image)), name]

    def stop(self, name: str) -> list[str]:
        """See `Engine.stop`."""
        return ["apptainer", "instance", "stop", "--force", name]

    def remove(self, name: str) -> list[str]:
        """See `Engine.remove`."""
        return self.stop(name)

    def execute(self, name: str, command: Sequence[str]) -> list[str]:
        """See `Engine.execute`. Of root, a program has all rights again without --no-privs: only
        users inherit it."""
        options = ["--cleanenv", "--no-eval", "--no-privs", "--pwd", "/"]
        return ["apptainer", "exec", *options, f"instance://{name}", *command]

    def state(self, name: str) -> list[str]:
        """See `Engine.state`."""
        return ["apptainer", "instance", "list", "--json", name]

    def pid(self, state: str) -> int:
        """See `Engine.pid`."""
        instances = json.loads(state)["instances"]
        return int(instances[0]["pid"]) if instances else 0


def _limits(limits: Limits) -> Iterator[str]:
    if limits.cpus is not None:
        yield from ("--cpus", f"{limits.cpus:g}")
    if limits.memory_gib is not None:
        yield from ("--memory", f"{limits.memory_gib * 2**30:.0f}")
    if limits.processes is not None:
        yield from ("--pids-limit", str(limits.processes))


def source(image: str) -> str:
    """Return a task's image as Apptainer names it: a path, a URI, or an image of a Docker
    registry."""
    return image if image.startswith("/") or "://" in image else f"docker://{image}"


class ApptainerRuntime(HidingRuntime):
    """Boxes that are instances of an image: a SIF file, a root folder, or one that Apptainer
    fetches."""

    name = "apptainer"
    isolated = True
    warning: str | None = (
        "the runtime apptainer has been tested with recorded command lines only, and its limits"
        " need control groups of version 2"
    )

    def __init__(self, *, tools: Sequence[Path] = ()) -> None:
        super().__init__(tools)
        self.id = secrets.token_hex(4)
        """Part of the names of the runtime's instances."""

    def check(self) -> None:
        """Raise `InputError` when Apptainer is missing, or would give rights to programs in spite
        of --no-privs."""
        if shutil.which("apptainer") is None:
            raise InputError(
                "apptainer is not installed: see"
                " https://apptainer.org/docs/admin/latest/installation.html, or choose another"
                " runtime"
            )
        if given := next((name for name in _ADDS_RIGHTS if os.environ.get(name)), None):
            raise InputError(
                f"{given} would give a session's programs rights over this machine: unset it"
            )

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[EngineBox]:
        """Yield an instance. Raises `InputError` for an image that is not here, and `OSError` when
        Apptainer fails."""
        self.check()
        if str(spec.image).startswith("/") and not Path(str(spec.image)).exists():
            raise InputError(f"there is no image {spec.image} on this machine")
        async with EngineBox(
            self, ApptainerEngine(), spec, f"rolltap-{self.id}-{spec.name}"
        ).alive() as box:
            yield box

    def image_digest(self, image: str) -> str:
        """Return the SHA-256 of a SIF file or of a root folder's content; nothing for an image that
        is fetched."""
        if not image.startswith("/"):
            return ""
        path = Path(image)
        return container.file_digest(path) if path.is_file() else container.root_folder_digest(path)

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image holds into the folder `dest`. Raises
        `InputError` without it."""
        if Path(image).is_dir():
            container.copy_from_root_folder(Path(image), workdir, dest)
            return
        dest.mkdir(parents=True, exist_ok=True)
        mount = mount_options([Mount(dest, _COPIED, writable=True)], "ro")
        inside = ["cp", "-a", f"{workdir.rstrip('/')}/.", _COPIED]
        try:
            call(["apptainer", "exec", "--containall", "--no-home", *mount, source(image), *inside])
        except OSError as error:
            raise InputError(
                f"the folder {workdir} of the image {image} cannot be copied: {error}"
            ) from error
