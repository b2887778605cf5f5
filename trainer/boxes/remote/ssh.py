"""The runtime `ssh`: boxes on a machine that this user reaches by ssh.

The far side of a `Link` makes boxes as the runtimes of this machine do. The
connection lasts as long as there are boxes:

    box          the workspace, the home and the mounts go there; one stream of the connection each
    run          the command goes there; its output, its end and its changes come back
    leave        the box and its folders are removed there

When the connection breaks, everything ends on the machine. Sessions that had boxes there fail with
`OSError`, and the next box has a new connection. Nothing that comes back is trusted: see
`remote/archive.py`.
"""

import asyncio
import io
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside.frames import LostError, Stream
from rolltap.trainer.boxes.remote.archive import delete, pack, unpack, write_pipe
from rolltap.trainer.boxes.remote.connection import Link, Machine, linked
from rolltap.trainer.boxes.runtime import BoxSpec, Ended, Mount, StopReason
from rolltap.trainer.concurrency import finished, in_folder_thread, run_blocking, wait_for_end

LATE_SECONDS = 600.0
"""Longest wait for what a program leaves, when it should have ended by its own timeout."""
_TAKEN_BYTES = 80 << 20
"""Most bytes of an output or a verdict. The far side itself sends less."""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Made(_Message):
    workdir: str
    home: str
    proxy: str | None


class _Told(_Message):
    status: int | None
    stopped: StopReason | None
    gone: list[str]
    pipes: list[int]


class _Digest(_Message):
    digest: str


class _Error(_Message):
    text: str
    permanent: bool = False
    errno: int | None = None
    filename: str | None = None


M = TypeVar("M", bound=_Message)


def _read(host: str, kind: type[M], message: Mapping[str, Any]) -> M:
    """Return what a machine tells.

    Raises the error that it tells, `OSError` or `InputError`, and `LostError` for what it does
    not tell.
    """
    try:
        if message.get("error") is None:
            return kind.model_validate(message)
        error = _Error.model_validate(message["error"])
    except ValidationError as wrong:
        raise LostError("it does not tell what rolltap does there") from wrong
    if error.permanent:
        raise InputError(f"on the machine {host}: {error.text}")
    if error.errno is not None:
        raise OSError(error.errno, error.text, error.filename)
    raise OSError(error.text)


@contextmanager
def _named(host: str) -> Iterator[None]:
    """Name the machine in the error of a connection that is lost."""
    try:
        yield
    except LostError as error:
        message = f"the connection to the machine {host} was lost: {error}"
        raise ConnectionError(message) from error


async def _receive(stream: Stream, file: IO[bytes], limit: int) -> bool:
    """Write the bytes of a stream into a file, but `limit` at most. Return False if it has more."""
    left = limit
    while chunk := await stream.receive_bytes():
        file.write(chunk[: max(0, left)])
        left -= len(chunk)
    return left >= 0


class SshBox:
    """A box on a machine, which is one stream of the connection to it."""

    def __init__(
        self,
        host: str,
        stream: Stream,
        spec: BoxSpec,
        made: Mapping[str, Any],
    ) -> None:
        read = _read(host, _Made, made)
        self.workdir = read.workdir
        self.home = read.home
        self.proxy = read.proxy
        self._host = host
        self._stream = stream
        self._workspace = spec.workspace
        self._pipes = [mount.source for mount in spec.mounts if mount.source.is_fifo()]
        self._limit = spec.disk_bytes()
        """Most bytes of the changes that come back."""

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        """Run a program: see `Box.run`. The folders of the machine's PATH come first."""
        stream = self._stream
        with _named(self._host):
            stream.patience = timeout + LATE_SECONDS
            await stream.send({"command": list(command), "env": dict(env), "timeout": timeout})
            with log.open("wb", buffering=0) as output:
                await _receive(stream, output, _TAKEN_BYTES)
            told = _read(self._host, _Told, await stream.receive())
            if len(told.pipes) != len(self._pipes):
                raise LostError("it tells of pipes that the box does not have")
            is_whole = await self._receive_changes(told.gone)
            for pipe, opened in zip(self._pipes, told.pipes, strict=True):
                content = io.BytesIO()
                await _receive(stream, content, _TAKEN_BYTES)
                await asyncio.to_thread(write_pipe, pipe, content.getvalue(), opened)
        if not is_whole:
            return Ended(None, "disk")
        return Ended(told.status, told.stopped)

    async def _receive_changes(self, gone: Sequence[str]) -> bool:
        """Bring the workspace up to date. Return False if more comes than the box may have."""
        with tempfile.TemporaryFile() as file:
            has_come = await _receive(self._stream, file, self._limit)
            await in_folder_thread(delete, self._workspace, gone)
            file.seek(0)
            is_unpacked = await in_folder_thread(unpack, file, self._workspace, self._limit)
        return has_come and is_unpacked

    async def settle(self) -> None:
        """Do nothing: what a program left has ended before its changes come back."""


class _Shared:
    """The connection that the boxes of an event loop have together."""

    def __init__(self, machine: Machine) -> None:
        self.users = 0
        self._ending = AsyncExitStack()
        self._made = asyncio.create_task(self._ending.enter_async_context(linked(machine)))

    @property
    def is_lost(self) -> bool:
        """True when it was made and is lost, or could not be made."""
        if not self._made.done():
            return False
        if self._made.cancelled() or self._made.exception() is not None:
            return True
        return bool(self._made.result().connection.why)

    async def link(self) -> Link:
        """Wait until it is made. Raises as `linked`."""
        return await asyncio.shield(self._made)

    async def end(self) -> None:
        """End it, and wait for that."""
        self._made.cancel()  # when nobody waits any more for what is being made
        await wait_for_end(self._made)
        await self._ending.aclose()


class SshRuntime:
    """Boxes on a machine. `settings` are those of `make_runtime` for the runtime there."""

    name = "ssh"
    isolated = True
    programs_here = False
    warning: str | None = None

    def __init__(self, machine: Machine, settings: Mapping[str, Any]) -> None:
        self._machine = machine
        self._settings = {**settings, "program": None}
        self._files: list[Path] = []
        self._shared: dict[asyncio.AbstractEventLoop, _Shared] = {}

    def check(self) -> None:
        """Raise `InputError` when the machine is not reached, or boxes cannot be made there."""
        if shutil.which("ssh") is None:
            fix = "apt-get install openssh-client"
            raise InputError(f"the runtime ssh needs OpenSSH's client: {fix}")
        try:
            run_blocking(self._ask(_Message, {"do": "check"}))
        except OSError as error:
            raise InputError(str(error)) from error

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """See `Runtime.show`. The program is the machine's, the files go there."""
        self._settings["program"] = program
        self._files += [file for file in files if file not in self._files]

    def image_digest(self, image: str) -> str:
        """Return the digest of an image that the machine has, or pulls. Raises as `box`."""
        return run_blocking(self._ask(_Digest, {"do": "digest", "image": image})).digest

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[SshBox]:
        """Yield a box. Raises `OSError` and `InputError`, also those of the runtime there."""
        host = self._machine.host
        parts, mounts = _parts(spec, self._files)
        request = {
            "do": "box",
            "name": spec.name,
            "workdir": spec.workdir,
            "image": spec.image,
            "limits": spec.limits.model_dump(),
            "recorder": None,
            "mounts": mounts,
        }
        async with self._link() as link:
            if spec.proxy is not None:
                request["recorder"] = await link.forward(spec.proxy)
            async with self._stream(link, request) as stream:
                with _named(host), tempfile.TemporaryFile() as file:
                    await in_folder_thread(pack, file, parts)
                    file.seek(0)
                    await stream.send_file(file)
                    box = SshBox(host, stream, spec, await stream.receive())
                yield box

    @asynccontextmanager
    async def _stream(self, link: Link, request: Mapping[str, Any]) -> AsyncIterator[Stream]:
        """Yield a new stream, which begins with a request."""
        with _named(self._machine.host):
            stream = await link.connection.open({**request, "settings": self._settings})
        try:
            yield stream
        finally:
            await finished(stream.close())

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        """Yield the connection. The first who asks makes it, and the last who leaves ends it."""
        loop = asyncio.get_running_loop()
        shared = self._shared.get(loop)
        if shared is None or shared.is_lost:
            shared = self._shared[loop] = _Shared(self._machine)
        shared.users += 1
        try:
            yield await shared.link()
        finally:
            shared.users -= 1
            if not shared.users:
                if self._shared.get(loop) is shared:
                    del self._shared[loop]
                await finished(shared.end())

    async def _ask(
        self, kind: type[M], request: Mapping[str, Any], file: IO[bytes] | None = None
    ) -> M:
        """Return the answer to one question, and write what follows it into a file."""
        host = self._machine.host
        async with self._link() as link, self._stream(link, request) as stream:
            with _named(host):
                answer = _read(host, kind, await stream.receive())
                while file is not None and (chunk := await stream.receive_bytes()):
                    file.write(chunk)
                return answer


class SshImageRuntime(SshRuntime):
    """Boxes of images that the machine has."""

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what a folder of an image holds: see `ImageRuntime.copy_out`."""
        request = {"do": "copy out", "image": image, "workdir": workdir}
        with tempfile.TemporaryFile() as file:
            run_blocking(self._ask(_Message, request, file))
            size = file.tell()
            file.seek(0)
            dest.mkdir(parents=True, exist_ok=True)
            if not unpack(file, dest, size):
                what = "has files that cannot be copied"
                raise InputError(f"the folder {workdir} of the image {image} {what}")


def _parts(spec: BoxSpec, files: Iterable[Path]) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """Return what goes to the machine by its name there, and the mounts of these names."""
    parts = {"workspace": spec.workspace, "home": spec.home}
    mounts: list[dict[str, Any]] = []
    of_preset = [Mount(file, str(file)) for file in files]
    for mount in (*spec.mounts, *of_preset):
        source = f"mounts/{len(mounts)}"
        is_pipe = mount.source.is_fifo()
        inside = spec.in_workspace(mount)
        if inside is not None:
            source = f"workspace/{inside}"
        elif not is_pipe:
            parts[source] = mount.source
        sent = {
            "source": source,
            "target": mount.target,
            "writable": mount.writable,
            "pipe": is_pipe,
        }
        mounts.append(sent)
    return parts, mounts
