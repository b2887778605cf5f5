"""The runtime `container`: Podman or Docker."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.containers.box import EngineBox
from rolltap.trainer.boxes.containers.find import find_engine
from rolltap.trainer.boxes.containers.images import (
    copy_from_image,
    copy_from_root_folder,
    image_id,
    is_root_folder,
    path_digest,
)
from rolltap.trainer.boxes.containers.podman import ContainerEngine
from rolltap.trainer.boxes.hiding import HidingRuntime, require_narrow
from rolltap.trainer.boxes.runtime import BoxSpec
from rolltap.trainer.tasks.task import Build


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
        self._program = engine
        self._arguments = tuple(arguments)
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
        if is_root_folder(image):
            self._check_root_folder(image, workspace)
            return self._engine()
        engine = self._engine()
        image_id(engine.command, image)
        return engine

    def _check_root_folder(self, image: str, workspace: Path) -> None:
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
                ' container_engine = "podman", or make an image:'
                f" tar -C {image} -c . | docker import - NAME"
            )

    async def build(self, image: str, build: Build, log: Path) -> None:
        """Build an image, unless it is there. See `build_image`."""
        # a machine that only has boxes builds none, and lacks what this imports
        from rolltap.trainer.boxes.containers.build import build_image

        engine = await asyncio.to_thread(self._engine)
        await build_image(engine.command, image, build, log)

    def image_digest(self, image: str) -> str:
        """Return the SHA-256 of an image's configuration or of a root folder's content. It may pull
        the image.

        Raises `InputError` when there is no such image.
        """
        if is_root_folder(image):
            return path_digest(image)
        return image_id(self._engine().command, image)

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image holds into the folder `dest`. Raises
        `InputError` without it."""
        if is_root_folder(image):
            copy_from_root_folder(Path(image), workdir, dest)
        else:
            copy_from_image(self._engine().command, image, workdir, dest)
