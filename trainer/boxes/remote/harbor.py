"""The runtime `harbor`: boxes are environments of Harbor (https://harborframework.com), on this
machine or elsewhere.

Harbor is a package of its own Python. One process of it, `inside/harbor_environments.py`, has all
boxes that are open, and stops them when this process ends.

    start     an archive of the workspace, the home, the mounts and the tools goes there
    run       the program, as root, with its output in a file; all that it left is killed; an
              archive of the workspace, the output and the verdict comes back
    stop      the environment is deleted
"""

import asyncio
import json
import secrets
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.remote.harbor_box import HarborBox
from rolltap.trainer.boxes.remote.harbor_process import VERSION, Harbor
from rolltap.trainer.boxes.runtime import BoxSpec
from rolltap.trainer.boxes.supervised import made
from rolltap.trainer.concurrency import run_blocking, run_to_end
from rolltap.trainer.folders import new_folder, remove_folder
from rolltap.trainer.tasks.task import Build


class HarborRuntime:
    """Boxes that are environments of Harbor.

    Args:
        python: Program of a Python that has Harbor.
        environment: Harbor's keys of a trial's `environment`, such as `type`.
        recorder_address: The recorder as boxes reach it, `HOST:PORT`, or `https://HOST:PORT` behind
            TLS. None if no box needs it.
        tools: Folders of this machine that boxes get, under the same path.
        builds: True lets Harbor build the images of tasks that have only a Dockerfile.
    """

    name = "harbor"
    isolated = True
    programs_here = False

    def __init__(
        self,
        python: Path,
        environment: Mapping[str, Any],
        recorder_address: str | None,
        *,
        tools: Sequence[Path] = (),
        builds: bool = False,
    ) -> None:
        self.builds = builds
        self.recorder_address = recorder_address
        self.shown = [*tools]
        self.warning: str | None = None
        self.process: Harbor | None = None
        self._python = python
        self._environment = dict(environment)
        self._allowed: list[str] = []
        """The recorder's host."""
        if recorder_address is not None:
            place = urlsplit(f"//{recorder_address.rpartition('://')[2]}")
            self._allowed.append(str(place.hostname))
        self._lock = threading.Lock()
        self._users = 0
        """Number of boxes and checks that need the process."""
        self._restricts: bool | None = None
        """True if Harbor can restrict the network of boxes; None before it was asked."""
        self._builds: dict[str, Path] = {}
        """The folders of Dockerfiles by their images."""

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """See `Runtime.show`. The program is the image's own."""
        for file in files:
            if file not in self.shown:
                self.shown.append(file)

    def check(self) -> None:
        """Raise `InputError` without Harbor, and for an environment that Harbor does not have or
        cannot use."""
        self._enter()
        try:
            checking = self.send("check", environment=self._environment, allowed=self._allowed)
            answer = checking.result()
        except OSError as error:
            raise InputError(str(error)) from error
        finally:
            self._leave()
        if not str(answer["version"]).startswith(f"{VERSION}."):
            raise InputError(
                f"{self._python} has Harbor {answer['version']}, and rolltap knows the interface of"
                f" {VERSION}: install that one in an environment of its own ({self._python} -m pip"
                f" install harbor=={VERSION}.0)"
            )
        self._restricts = bool(answer["restricts"])
        if not self._restricts:
            self.warning = (
                "Harbor cannot restrict the network of these environments to the recorder: their "
                "sessions, and their judges, reach what the environment's own network reaches"
            )

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[HarborBox]:
        """Yield an environment.

        Raises `OSError` when it does not start, and `InputError` when it never will.
        """
        async with self._started(spec) as box:
            await box.fill(self.shown)
            yield box

    @asynccontextmanager
    async def _started(self, spec: BoxSpec) -> AsyncIterator[HarborBox]:
        """Yield an environment without files of this machine."""
        if self._restricts is None:
            await run_to_end(self.check)
        async with made(self._enter, self._leave), made(new_folder, remove_folder) as folder:
            definition = self._definition(spec)
            proxy = None if spec.proxy is None else self.recorder_address
            box = HarborBox(spec, folder, proxy, definition, self.send)
            try:
                await box.start()
                yield box
            finally:
                await box.stop()

    async def build(self, image: str, build: Build, log: Path) -> None:
        """Let an environment build the folder of a Dockerfile once. Later boxes of `image` are of
        that folder.

        Raises `InputError` when it cannot be built in time.
        """
        self._builds[image] = build.folder
        try:
            async with asyncio.timeout(build.timeout), self._started(_bare(image, "/", log.parent)):
                pass
        except TimeoutError as error:
            limit = f"{build.timeout:g} s (`timeout` of the task's `build`)"
            what = f"its image cannot be built: the build did not end within {limit}"
            raise InputError(what) from error
        except OSError as error:
            raise InputError(f"its image cannot be built: {error}") from error

    def image_digest(self, image: str) -> str:
        """Return the digest that the image's name has; empty without one."""
        return image.partition("@")[2]

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image has into `dest`.

        Raises `InputError` without it.
        """

        async def copy() -> None:
            async with self._started(_bare(image, workdir, dest)) as box:
                await box.copy_out(dest)

        try:
            run_blocking(copy())
        except OSError as error:
            raise InputError(
                f"the folder {workdir} of the image {image} cannot be copied: {error}"
            ) from error

    def send(self, operation: str, **fields: Any) -> "Future[dict[str, Any]]":
        """Send a request to the process, which is started again when it has died.

        Blocks while it starts.
        """
        with self._lock:
            if self.process is not None and self.process.ended:
                self.process.close()
                self.process = None
            if self.process is None:
                self.process = Harbor(self._python)
            return self.process.send(operation, **fields)

    def _definition(self, spec: BoxSpec) -> dict[str, Any]:
        """Return what Harbor's process needs to know of a box."""
        limits: dict[str, float] = {}
        if spec.limits.cpus is not None:
            limits["cpus"] = spec.limits.cpus
        if spec.limits.memory_gib is not None:
            limits["memory_mb"] = round(spec.limits.memory_gib * 1024)
        if spec.limits.disk_gib is not None:
            limits["storage_mb"] = round(spec.limits.disk_gib * 1024)
        allowed = None
        if self._restricts:
            allowed = [] if spec.proxy is None else self._allowed
        image = spec.image
        folder = None
        if image in self._builds:
            folder = str(self._builds[image])
            image = None
        return {
            "environment": self._environment,
            "image": image,
            "definition": folder,
            "allowed": allowed,
            "limits": limits,
        }

    def _enter(self) -> None:
        """Keep the process until the last one who needs it has left."""
        with self._lock:
            self._users += 1

    def _leave(self, _: None = None) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self.process is None:
                return
            process = self.process
            self.process = None
        process.close()


def read_environment(text: str) -> dict[str, Any]:
    """Return Harbor's keys of a trial's `environment`: a type, a class as MODULE:CLASS, or a JSON
    file with the keys.

    Raises `InputError` for a file that cannot be read.
    """
    if not text.endswith(".json"):
        return {"import_path" if ":" in text else "type": text}
    try:
        keys = json.loads(Path(text).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"harbor_environment names {text}, which cannot be read: {error}"
        ) from error
    if not isinstance(keys, dict):
        raise InputError(f"harbor_environment names {text}, which has no object of JSON")
    return keys


def _bare(image: str, workdir: str, folder: Path) -> BoxSpec:
    """Return a box of an image, which gets no files."""
    name = f"rolltap-{secrets.token_hex(4)}"
    return BoxSpec(
        name=name,
        workspace=folder,
        workdir=workdir,
        home=folder,
        image=image,
    )
