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
import errno
import gzip
import json
import logging
import math
import re
import secrets
import signal
import threading
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside import archive, harbor_program
from rolltap.trainer.boxes.inside.harbor_process import VERSION, Harbor
from rolltap.trainer.boxes.runtime import BoxSpec, Ended
from rolltap.trainer.boxes.supervised import LOG_BYTES, made
from rolltap.trainer.concurrency import in_folder_thread, run_blocking, run_to_end, wait_for_end
from rolltap.trainer.folders import new_folder, remove_folder
from rolltap.trainer.tasks.box_paths import HOME
from rolltap.trainer.tasks.task import Build

logger = logging.getLogger(__name__)

_TRANSFER_SECONDS = 600
"""Time to pack or unpack what goes over, beside what a program takes."""
_TAKEN_BYTES = 80 << 20
"""Most bytes of an output or a verdict. A box that keeps to its script sends less."""
_SAID_CHARACTERS = 500
_GIB = 1 << 30


class HarborBox:
    """An environment of Harbor as a box. `spec.name` is the environment's name."""

    def __init__(self, runtime: "HarborRuntime", spec: BoxSpec, folder: Path) -> None:
        self.workdir = spec.workdir
        self.home = HOME
        self.proxy = None if spec.proxy is None else runtime.recorder_address
        self._runtime = runtime
        self._spec = spec
        self._definition = runtime.definition(spec)
        self._script = folder / "script"
        self._packed = folder / "packed"
        """The archive that goes there, or came back."""
        self._back = folder / "back"
        """The files of the archive that came back."""
        self._pipes: list[tuple[Path, str]] = []
        """Pipes of this machine, and their paths in the box."""
        disk_gib = spec.limits.of_isolated().disk_gib
        assert disk_gib is not None
        self._most_bytes = round(disk_gib * _GIB)
        """Most bytes of the archive that comes back, and of its files."""

    async def start(self) -> None:
        """Start the environment. Raises `OSError`, and `InputError` when it never will start."""
        await self._send("start", **self._definition)

    async def fill(self) -> None:
        """Take the files to the environment. Raises `OSError`."""
        spec = self._spec
        parts = {self.workdir: spec.workspace, self.home: spec.home}
        for file in self._runtime.shown:
            parts[str(file)] = file
        for mount in spec.mounts:
            if mount.source.is_fifo():
                self._pipes.append((mount.source, mount.target))
            elif spec.in_workspace(mount) is None:  # else it is there already
                parts[mount.target] = mount.source
        await in_folder_thread(_pack, self._packed, parts)
        await self._upload(self._packed, harbor_program.TO_BOX)
        await self._execute(harbor_program.UNPACK, _TRANSFER_SECONDS)

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        """Run a program: see `Box.run`. It is started by the box's `sh`, and timed there."""
        token = secrets.token_hex(16)
        script = harbor_program.run_script(
            token,
            command,
            env=env,
            timeout=timeout,
            workdir=self.workdir,
            pipes=[target for _, target in self._pipes],
            log_bytes=LOG_BYTES,
            most_bytes=self._most_bytes,
        )
        self._script.write_text(script)
        # no argument has it: Harbor logs command lines, and other users see them
        place = f"{harbor_program.FOLDER}.{token}"
        await self._upload(self._script, place)
        seconds = timeout + harbor_program.GRACE_SECONDS + _TRANSFER_SECONDS
        said = await self._execute(f"sh {place}", seconds)
        found = re.search(rf"{token} ([0-9]{{1,3}}) (ended|timeout|absent)\b", said)
        if found is None:
            last = said.strip()[-_SAID_CHARACTERS:]
            raise OSError(f"the environment of {self._spec.name} ran no program: {last}")
        status = int(found[1])
        how = found[2]
        if how == "absent":
            why = "there is no such program in the environment"
            raise FileNotFoundError(errno.ENOENT, why, command[0])
        is_whole = await self._bring(self._spec.workspace)
        await in_folder_thread(self._take_output, log)
        if not is_whole:
            return Ended(None, "disk")
        if how == "timeout":
            return Ended(None, "timeout")
        if 128 < status < 128 + signal.NSIG:
            status = 128 - status
        return Ended(status)

    async def settle(self) -> None:
        """Do nothing: a program's end is the end of all that it left."""

    async def stop(self) -> None:
        """Delete the environment, also when the caller is cancelled.

        A failure is logged: nothing here depends on it.
        """
        stopping = asyncio.ensure_future(self._send("stop", **self._definition))
        if await wait_for_end(stopping):
            raise asyncio.CancelledError
        if error := stopping.exception():
            logger.warning("the environment %s could not be stopped: %s", self._spec.name, error)

    async def copy_out(self, dest: Path) -> None:
        """Copy the workspace of the image into `dest`. Raises `OSError`."""
        await self._execute(harbor_program.pack_command(self.workdir), _TRANSFER_SECONDS)
        dest.mkdir(parents=True, exist_ok=True)
        if not await self._bring(dest):
            raise OSError(
                f"it has more than {self._most_bytes / _GIB:g} GiB, or files that cannot be copied"
            )

    async def _bring(self, workspace: Path) -> bool:
        """Make the folder `workspace` what the archive in the box says of it.

        Return False if it is too much or bad.
        """
        await in_folder_thread(remove_folder, self._packed)
        await in_folder_thread(remove_folder, self._back)
        self._back.mkdir()
        answer = await self._send(
            "download",
            source=harbor_program.FROM_BOX,
            target=str(self._packed),
            limit=self._most_bytes,
        )
        is_whole = await in_folder_thread(_unpack, self._packed, self._back, self._most_bytes)
        new = _folder_in(self._back, self.workdir)
        if new is None:
            return False
        try:
            await in_folder_thread(archive.take_changes, new, workspace)
        except archive.TooMuchError:
            return False
        return is_whole and bool(answer["whole"])

    def _take_output(self, log: Path) -> None:
        """Take the output and the verdicts that came back."""
        folder = _folder_in(self._back, harbor_program.FOLDER)
        log.write_bytes(_content(folder, harbor_program.LOG))
        for number, (pipe, _) in enumerate(self._pipes):
            content = _content(folder, harbor_program.verdict(number))
            archive.write_pipe(pipe, content, opened=1 if content else 0)

    async def _execute(self, command: str, seconds: float) -> str:
        """Run a command of ours. Return the end of its output. Raises `OSError` when it fails."""
        done = await self._send("execute", command=command, seconds=math.ceil(seconds))
        said = str(done["said"])
        if done["status"]:
            how = f"status {done['status']} in {self._spec.name}"
            why = said.strip()[-_SAID_CHARACTERS:]
            raise OSError(f"`{command}` ends with {how}: {why}")
        return said

    async def _upload(self, source: Path, target: str) -> None:
        await self._send("upload", source=str(source), target=target)

    async def _send(self, operation: str, **fields: Any) -> dict[str, Any]:
        sent = self._runtime.send(operation, box=self._spec.name, **fields)
        return await asyncio.wrap_future(sent)


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
        """Those who need the process."""
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
            await box.fill()
            yield box

    @asynccontextmanager
    async def _started(self, spec: BoxSpec) -> AsyncIterator[HarborBox]:
        """Yield an environment without files of this machine."""
        if self._restricts is None:
            await run_to_end(self.check)
        async with made(self._enter, self._leave), made(new_folder, remove_folder) as folder:
            box = HarborBox(self, spec, folder)
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
        except (OSError, TimeoutError) as error:
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

    def definition(self, spec: BoxSpec) -> dict[str, Any]:
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
    return BoxSpec(name=name, workspace=folder, workdir=workdir, home=folder, image=image)


def _pack(file: Path, parts: Mapping[str, Path]) -> None:
    with gzip.open(file, "wb", compresslevel=1) as packed:
        archive.pack(cast(IO[bytes], packed), parts)


def _unpack(file: Path, folder: Path, limit: int) -> bool:
    """Unpack a compressed archive. Return False if something was left out: see `archive.unpack`."""
    if not _is_file(file):
        return False
    try:
        with gzip.open(file) as packed:
            return archive.unpack(cast(IO[bytes], packed), folder, limit)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return False


def _folder_in(top: Path, path: str) -> Path | None:
    """Return the folder at a path of a box in what came back of it; None without one.

    A link is none.
    """
    place = top
    for part in path.strip("/").split("/"):
        place = place / part
        if place.is_symlink() or not place.is_dir():
            return None
    return place


def _content(folder: Path | None, name: str) -> bytes:
    """Return what a file has, up to a limit; nothing without the file."""
    if folder is None or not _is_file(folder / name):
        return b""
    with (folder / name).open("rb") as file:
        return file.read(_TAKEN_BYTES)


def _is_file(path: Path) -> bool:
    """Return True for a file. A link is none."""
    return path.is_file() and not path.is_symlink()
