"""The runtime `apptainer`, by Apptainer's command line."""

import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.box import EngineBox
from rolltap.trainer.boxes.containers.engine import Engine, call, mount_options
from rolltap.trainer.boxes.containers.images import copy_from_root_folder, path_digest
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
        self,
        name: str,
        spec: BoxSpec,
        mounts: Sequence[Mount],
        folder: Path,
    ) -> list[list[str]]:
        """See `Engine.create`."""
        return [self.restart(name, spec, mounts)]

    def restart(self, name: str, spec: BoxSpec, mounts: Sequence[Mount]) -> list[str]:
        """See `Engine.restart`. What programs wrote outside of the mounts is gone: it was in
        memory."""
        options = [*_CLOSED.split(), *mount_options(mounts, "ro")]
        if _CONTROL_GROUPS.exists():
            options += _limits(spec.limits)
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

    def first_process(self, name: str) -> int:
        """See `Engine.first_process`."""
        answer = json.loads(call(["apptainer", "instance", "list", "--json", name]))
        for instance in answer["instances"]:
            return int(instance["pid"])
        return 0


def _limits(limits: Limits) -> list[str]:
    options = []
    if limits.cpus is not None:
        options += ["--cpus", f"{limits.cpus:g}"]
    if limits.memory_gib is not None:
        options += ["--memory", f"{limits.memory_gib * 2**30:.0f}"]
    if limits.processes is not None:
        options += ["--pids-limit", str(limits.processes)]
    return options


def source(image: str) -> str:
    """Return a task's image as Apptainer names it: a path, a URI, or an image of a Docker
    registry."""
    if image.startswith("/") or "://" in image:
        return image
    return f"docker://{image}"


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
        for name in _ADDS_RIGHTS:
            if os.environ.get(name):
                raise InputError(
                    f"{name} would give a session's programs rights over this machine: unset it"
                )

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[EngineBox]:
        """Yield an instance. Raises `InputError` for an image that is not here, and `OSError` when
        Apptainer fails."""
        self.check()
        image = str(spec.image)
        if image.startswith("/") and not Path(image).exists():
            raise InputError(f"there is no image {image} on this machine")
        name = f"rolltap-{self.id}-{spec.name}"
        async with EngineBox(self, ApptainerEngine(), spec, name).alive() as box:
            yield box

    def image_digest(self, image: str) -> str:
        """Return the SHA-256 of a SIF file or of a root folder's content; nothing for an image that
        is fetched."""
        if not image.startswith("/"):
            return ""
        return path_digest(image)

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image holds into the folder `dest`. Raises
        `InputError` without it."""
        if Path(image).is_dir():
            copy_from_root_folder(Path(image), workdir, dest)
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
