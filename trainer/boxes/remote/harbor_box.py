"""An environment of Harbor as a box: what goes there, its programs, and what comes back.

Nothing that comes back is trusted: no link in it is followed, and all of it has a limit of size.
"""

import asyncio
import errno
import gzip
import logging
import math
import re
import secrets
import signal
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, cast

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside import harbor_program
from rolltap.trainer.boxes.remote import archive
from rolltap.trainer.boxes.runtime import BoxSpec, Ended
from rolltap.trainer.boxes.supervised import LOG_BYTES
from rolltap.trainer.concurrency import finished, in_folder_thread
from rolltap.trainer.folders import remove_folder
from rolltap.trainer.tasks.box_paths import HOME

logger = logging.getLogger(__name__)

_TRANSFER_SECONDS = 600
"""Time to pack or unpack what goes over, beside what a program takes."""
_TAKEN_BYTES = 80 << 20
"""Most bytes of an output or a verdict. A box that keeps to its script sends less."""
_SAID_CHARACTERS = 500
_GIB = 1 << 30


class HarborBox:
    """An environment of Harbor as a box. `spec.name` is the environment's name.

    `proxy` is the recorder as programs in the box reach it. `folder` is for files of the box.
    `definition` is what Harbor's process needs to know of the box, and `send` sends it a request.
    """

    def __init__(
        self,
        spec: BoxSpec,
        folder: Path,
        proxy: str | None,
        definition: Mapping[str, Any],
        send: Callable[..., "Future[dict[str, Any]]"],
    ) -> None:
        self.workdir = spec.workdir
        self.home = HOME
        self.proxy = proxy
        self._spec = spec
        self._definition = definition
        self._send_request = send
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

    async def fill(self, files: Iterable[Path]) -> None:
        """Take the files of the box there, and others under their own path. Raises `OSError`."""
        spec = self._spec
        parts = {self.workdir: spec.workspace, self.home: spec.home}
        for file in files:
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
        try:
            await finished(self._send("stop", **self._definition))
        except (OSError, InputError) as error:
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
        sent = self._send_request(operation, box=self._spec.name, **fields)
        return await asyncio.wrap_future(sent)


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
