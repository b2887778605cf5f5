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
import filecmp
import gzip
import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
import threading
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside import archive, harbor_program
from rolltap.trainer.boxes.inside.harbor_process import VERSION, Harbor
from rolltap.trainer.boxes.runtime import BoxSpec, Ended, remove_folder
from rolltap.trainer.boxes.supervised import LOG_BYTES
from rolltap.trainer.concurrency import in_folder_thread, run_blocking, run_to_end, wait_for_end
from rolltap.trainer.tasks.box_paths import HOME
from rolltap.trainer.tasks.task import Build

logger = logging.getLogger(__name__)

_TRANSFER_SECONDS = 600
"""Time to pack or unpack what goes over, beside what a program takes."""
_NO_LIMIT = 1 << 60
_TAKEN_BYTES = 80 << 20
"""Most bytes of an output or a verdict. A box that keeps to its script sends less."""


class HarborBox:
    """An environment of Harbor as a box. `name` is the environment's."""

    def __init__(self, runtime: "HarborRuntime", spec: BoxSpec, folder: Path) -> None:
        self.workdir = spec.workdir
        self.home = HOME
        self.proxy = None if spec.proxy is None else runtime.recorder_address
        self._runtime = runtime
        self._spec = spec
        self._folder = folder
        self._definition = runtime.definition(spec)
        self._back = folder / "back"
        self._pipes: list[tuple[Path, str]] = []
        self._limit = round((spec.limits.of_isolated().disk_gib or 0) * 2**30)

    async def start(self) -> None:
        """Start the environment, and take the files there. Raises `OSError` and `InputError`."""
        spec = self._spec
        await self._send("start", **self._definition)
        parts = {self.workdir: spec.workspace, self.home: spec.home}
        parts |= {str(file): file for file in self._runtime.shown}
        for mount in spec.mounts:
            if stat.S_ISFIFO(mount.source.stat().st_mode):
                self._pipes.append((mount.source, mount.target))
            elif not mount.source.is_relative_to(spec.workspace):  # it is there already
                parts[mount.target] = mount.source
        packed = self._folder / "packed"
        await in_folder_thread(_pack, packed, parts)
        await self._call("upload_file", source_path=str(packed), target_path=harbor_program.TO_BOX)
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
        script = self._folder / "script"
        script.write_text(
            harbor_program.run_script(
                token,
                command,
                env=env,
                timeout=timeout,
                workdir=self.workdir,
                pipes=[target for _, target in self._pipes],
                log_bytes=LOG_BYTES,
            )
        )
        # no argument has it: Harbor logs command lines, and other users see them
        place = f"{harbor_program.FOLDER}.{token}"
        await self._call("upload_file", source_path=str(script), target_path=place)
        seconds = timeout + harbor_program.GRACE_SECONDS + _TRANSFER_SECONDS
        said = await self._execute(f"sh {place}", seconds)
        found = re.search(rf"{token} ([0-9]{{1,3}}) (ended|timeout|absent)\b", said)
        if found is None:
            last = said.strip()[-500:]
            raise OSError(f"the environment of {self._spec.name} ran no program: {last}")
        status = int(found[1])
        how = found[2]
        if how == "absent":
            why = "there is no such program in the environment"
            raise FileNotFoundError(errno.ENOENT, why, command[0])
        whole = await self._bring(self._spec.workspace, self._limit)
        await in_folder_thread(self._take, log)
        if not whole:
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
        """Copy what the workspace's folder has in the image into `dest`.

        Raises `OSError` when it is not there.
        """
        await self._send("start", **self._definition)
        await self._execute(harbor_program.pack_command(self.workdir), _TRANSFER_SECONDS)
        dest.mkdir(parents=True, exist_ok=True)
        await self._bring(dest, _NO_LIMIT)

    async def make(self) -> None:
        """Start the environment without files. Raises as `start`."""
        await self._send("start", **self._definition)

    async def _bring(self, workspace: Path, limit: int) -> bool:
        """Make the folder `workspace` what the archive in the box says of it.

        Return False if it is too much or bad.
        """
        packed = self._folder / "packed"
        source = harbor_program.FROM_BOX
        await self._call("download_file", source_path=source, target_path=str(packed))
        back = self._back
        await in_folder_thread(remove_folder, back)
        back.mkdir()
        whole = await in_folder_thread(_unpack, packed, back, limit)
        new = _folder_in(back, self.workdir)
        if new is None:
            return False
        try:
            await in_folder_thread(take_changes, new, workspace)
        except archive.TooMuchError:
            return False
        return whole

    def _take(self, log: Path) -> None:
        """Take the output and the verdicts that came back."""
        ours = _folder_in(self._back, harbor_program.FOLDER)
        log.write_bytes(_content(ours, harbor_program.LOG))
        for number, (pipe, _) in enumerate(self._pipes):
            content = _content(ours, harbor_program.verdict(number))
            archive.write_pipe(pipe, content, opened=1 if content else 0)

    async def _execute(self, command: str, seconds: float) -> str:
        """Run a command of ours. Return its output. Raises `OSError` when it fails."""
        arguments = {"command": command, "timeout_sec": math.ceil(seconds), "user": "root"}
        done = await self._call("exec", **arguments)
        said = (done.get("stdout") or "") + (done.get("stderr") or "")
        if done["return_code"]:
            why = said.strip()[-500:]
            how = f"status {done['return_code']} in {self._spec.name}"
            raise OSError(f"`{command}` ends with {how}: {why}")
        return said

    async def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return await self._send("call", method=method, arguments=arguments)

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
        self._allowed: list[str] = []
        """The recorder's host."""
        if recorder_address is not None:
            place = urlsplit(f"//{recorder_address.rpartition('://')[2]}")
            self._allowed.append(str(place.hostname))
        self.shown = [*tools]
        self.warning: str | None = None
        self._python = python
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._users = 0
        self.process: Harbor | None = None
        self._restricts: bool | None = None
        self._builds: dict[str, Path] = {}

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """See `Runtime.show`. The program is the image's own."""
        self.shown += [file for file in files if file not in self.shown]

    def check(self) -> None:
        """Raise `InputError` without Harbor, and for an environment that Harbor does not have or
        cannot use."""
        with self._open():
            checking = self.send("check", environment=self._environment, allowed=self._allowed)
            try:
                answer = checking.result()
            except OSError as error:
                raise InputError(str(error)) from error
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
        async with self._made(spec) as box:
            await box.start()
            yield box

    @asynccontextmanager
    async def _made(self, spec: BoxSpec) -> AsyncIterator[HarborBox]:
        if self._restricts is None:
            await run_to_end(self.check)
        async with AsyncExitStack() as stack:
            opened = ExitStack()
            opened.enter_context(self._open())
            stack.push_async_callback(run_to_end, opened.close)  # it may wait for Harbor's process
            folder = Path(tempfile.mkdtemp(prefix="rolltap-"))
            stack.push_async_callback(run_to_end, remove_folder, folder)
            box = HarborBox(self, spec, folder)
            stack.push_async_callback(box.stop)
            yield box

    async def build(self, image: str, build: Build, log: Path) -> None:
        """Let an environment build the folder of a Dockerfile once. Later boxes of `image` are of
        that folder.

        Raises `InputError` when it cannot be built in time.
        """
        self._builds[image] = build.folder
        empty = log.parent
        name = f"rolltap-{secrets.token_hex(4)}"
        spec = BoxSpec(name=name, workspace=empty, workdir="/", home=empty, image=image)
        try:
            async with asyncio.timeout(build.timeout), self._made(spec) as box:
                await box.make()
        except (OSError, TimeoutError) as error:
            raise InputError(f"its image cannot be built: {error}") from error

    def image_digest(self, image: str) -> str:
        """Return the digest that the image's name has; empty without one."""
        return image.partition("@")[2]

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image has into `dest`.

        Raises `InputError` without it.
        """
        spec = BoxSpec(
            name=f"rolltap-{secrets.token_hex(4)}",
            workspace=dest,
            workdir=workdir,
            home=dest,
            image=image,
        )

        async def copy() -> None:
            async with self._made(spec) as box:
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
        folder = self._builds.get(str(spec.image))
        allowed = None
        if self._restricts:
            allowed = [] if spec.proxy is None else self._allowed
        return {
            "environment": self._environment,
            "image": spec.image if folder is None else None,
            "definition": None if folder is None else str(folder),
            "allowed": allowed,
            "limits": limits,
        }

    def send(self, operation: str, **fields: Any) -> "Future[dict[str, Any]]":
        """Send a request to the process, which is started again when it has died.

        Blocks while it starts.
        """
        with self._lock:
            if self.process is None or self.process.ended:
                if self.process is not None:
                    self.process.close()
                self.process = Harbor(self._python)
            return self.process.send(operation, **fields)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Keep the process until the last one who needs it has left."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self.process if not self._users else None
                if last is not None:
                    self.process = None
            if last is not None:
                last.close()


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


def _pack(file: Path, parts: Mapping[str, Path]) -> None:
    with gzip.open(file, "wb", compresslevel=1) as packed:
        archive.pack(cast(IO[bytes], packed), parts)


def _unpack(file: Path, folder: Path, limit: int) -> bool:
    """Unpack a compressed archive. Return False if something was left out: see `archive.unpack`."""
    try:
        with gzip.open(file) as packed:
            return archive.unpack(cast(IO[bytes], packed), folder, limit)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return False


def take_changes(new: Path, folder: Path) -> None:
    """Make a folder what another one is, and touch nothing in it that is the same. The other one is
    used up.

    Nobody else may write to them meanwhile. Raises `TooMuchError` and `OSError`.
    """
    wanted = archive.stamps(new)
    for path, (_, _, _, mode) in wanted.items():  # folders before what is in them
        source = new / path
        target = folder / path
        if not stat.S_ISDIR(mode):
            if not _is_same(source, target):
                archive.delete(folder, [path])
                shutil.move(source, target)
            continue
        if target.is_symlink() or not target.is_dir():
            archive.delete(folder, [path])
            target.mkdir()
        target.chmod(stat.S_IMODE(mode))
    archive.delete(folder, [path for path in archive.stamps(folder) if path not in wanted])


def _is_same(one: Path, other: Path) -> bool:
    if not os.path.lexists(other):
        return False
    modes = [path.lstat().st_mode for path in (one, other)]
    if modes[0] != modes[1]:
        return False
    if stat.S_ISLNK(modes[0]):
        return one.readlink() == other.readlink()
    return filecmp.cmp(one, other, shallow=False)


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
    """Return what a file has, up to a limit; nothing without the file. A link is none."""
    if folder is None or (folder / name).is_symlink() or not (folder / name).is_file():
        return b""
    with (folder / name).open("rb") as file:
        return file.read(_TAKEN_BYTES)
