"""The runtime without isolation: programs run as processes of this machine's user."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.runtime import BoxSpec, Ended
from rolltap.trainer.boxes.supervised import run_supervised


class ProcessBox:
    """A folder in which programs run with all rights of the user."""

    def __init__(self, spec: BoxSpec) -> None:
        self._spec = spec
        self.workdir = str(spec.workspace)
        self.home = str(spec.home)
        self.proxy = spec.proxy

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        """Run a program: see `Box.run`."""
        spec = self._spec
        return await run_supervised(
            command,
            cwd=spec.workspace,
            env=env,
            timeout=timeout,
            log=log,
            limits=spec.limits,
            folders=[spec.workspace, spec.home],
        )

    async def settle(self) -> None:
        """Do nothing: a program's end is the end of all that it left."""


class ProcessRuntime:
    """Boxes that only separate folders. Images are refused."""

    name = "process"
    isolated = False
    programs_here = True
    warning: str | None = (
        "sessions run with all rights of this user; --runtime sandbox limits them: see rolltap"
        " rollout --help"
    )

    def check(self) -> None:
        """Processes can be started everywhere."""

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """Do nothing: a process sees all that the user sees."""

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[ProcessBox]:
        """Yield a box. Raises `InputError` for a task with an image."""
        if spec.image is not None:
            raise InputError(
                f"the runtime process has no images, and the task needs {spec.image}: use --runtime"
                " container"
            )
        yield ProcessBox(spec)

    def image_digest(self, image: str) -> str:
        """Return an empty digest: there are no images."""
        return ""
