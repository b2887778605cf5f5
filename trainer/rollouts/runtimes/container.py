"""The runtime of containers: Podman or Docker, by their command lines."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.runtimes import images
from rolltap.trainer.rollouts.runtimes.container_engine import ContainerEngine, find_engine
from rolltap.trainer.rollouts.runtimes.engine_box import EngineBox
from rolltap.trainer.rollouts.runtimes.hiding import covered
from rolltap.trainer.rollouts.runtimes.runtime import BoxSpec, Mount
from rolltap.trainer.rollouts.runtimes.tools import require_narrow


class ContainerRuntime:
    """Boxes that are containers: of an image, or of a root folder, of which each gets a copy on write.

    `engine` is `podman` or `docker`; `arguments` stand before its commands. `tools` are folders of this machine that
    each container has read-only, under the same path.
    """

    name = "container"
    isolated = True
    warning: str | None = None

    def __init__(self, engine: str = "podman", arguments: Sequence[str] = (), *, tools: Sequence[Path] = ()) -> None:
        self._program, self._arguments = engine, tuple(arguments)
        self._tools = [Mount(folder, str(folder)) for folder in tools]
        self.id = secrets.token_hex(4)
        """Value of the label `rolltap` of the runtime's containers."""
        self._hidden: tuple[Path, ...] = ()

    def hide(self, paths: Iterable[Path]) -> None:
        """See `HidingRuntime.hide`."""
        self._hidden = tuple(dict.fromkeys([*self._hidden, *paths]))

    def check(self) -> None:
        """Start a container as a trial. Raises `InputError` when the engine is missing, or does not work."""
        self._engine()

    def _engine(self) -> ContainerEngine:
        return replace(find_engine(self._program, self._arguments), label=self.id)

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[EngineBox]:
        """Yield a container. Raises `InputError` without an image, and `OSError` when the engine fails."""
        if spec.image is None:
            raise InputError(
                f"{spec.name} has no image, and the runtime container needs one: set `image` of its task to an image's "
                "name or a root folder, or choose the runtime sandbox"
            )
        for tool in self._tools:
            require_narrow(tool.source, spec.workspace)
        engine = await asyncio.to_thread(self._ready, spec.image, spec.workspace)
        spec = replace(spec, limits=spec.limits.of_isolated(), mounts=[*self._tools, *spec.mounts])
        hidden = covered(self._hidden, [tool.source for tool in self._tools])
        box = EngineBox(engine, spec, f"rolltap-{self.id}-{spec.name}", hidden)
        async with box.alive():
            yield box

    def _ready(self, image: str, workspace: Path) -> ContainerEngine:
        """Return the engine, with an image that is here. Raises `InputError` when one of them cannot be had."""
        if not images.is_root_folder(image):
            engine = self._engine()
            images.image_id(engine.command, image)
            return engine
        if not Path(image).is_dir():
            raise InputError(f"the image {image} is no folder of this machine")
        if workspace.resolve().is_relative_to(Path(image).resolve()):
            raise InputError(
                f"the root folder {image} contains the workspace {workspace}, so a session would see others"
            )
        if ":" in image:
            raise InputError(f"the root folder {image} has a colon in its name, which Podman does not take: rename it")
        if self._program == "docker":
            raise InputError(
                f"Docker has no containers of a root folder, and the image is {image}: set container_engine = "
                f'"podman", or make an image: tar -C {image} -c . | docker import - NAME'
            )
        return self._engine()

    def image_digest(self, image: str) -> str:
        """Return the SHA-256 of an image's configuration or of a root folder's content. It may pull the image.

        Raises `InputError` when there is no such image.
        """
        if images.is_root_folder(image):
            return images.root_folder_digest(Path(image))
        return images.image_id(self._engine().command, image)

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image holds into the folder `dest`. Raises `InputError` without it."""
        if images.is_root_folder(image):
            images.copy_from_root_folder(Path(image), workdir, dest)
        else:
            images.copy_from_image(self._engine().command, image, workdir, dest)
