"""The runtime `ssh`: boxes on a machine that this user reaches by ssh.

OpenSSH's client connects, so that the user's own configuration, keys and jump hosts count. One
process of it is the connection to the machine and starts there `boxes/agent`, whose files it brings
along. The agent makes boxes as the runtimes of this machine do. The connection lasts as long as
there are boxes:

    connect      ssh HOST python3; the agent's files go over stdin
    forward      ssh -O forward -R: a socket in the agent's folder leads to the recorder here
    box          the workspace, the home and the mounts go there; one stream of the connection each
    run          the command goes there; its output, its end and its changes come back
    leave        the box and its folders are removed there

When the connection breaks, everything ends on the machine. Sessions that had boxes there fail with
`OSError`, and the next box has a new connection. Nothing that comes back is trusted: see
`inside/archive.py`.
"""

import asyncio
import io
import re
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

import rolltap.addons
import rolltap.trainer
from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside.archive import delete, pack, unpack, write_pipe
from rolltap.trainer.boxes.inside.frames import STARTED, Connection, LostError, Stream
from rolltap.trainer.boxes.runtime import BoxSpec, Ended, Mount, StopReason
from rolltap.trainer.concurrency import Once, in_folder_thread, run_blocking, wait_for_end
from rolltap.trainer.folders import scratch_folder

_BOOT = Path(__file__).parents[1] / "inside" / "boot.py"
_FILES = (
    "addons/*.py",
    "trainer/*.py",
    "trainer/boxes/**/*.py",
    "trainer/judges/__init__.py",
    "trainer/judges/channel.py",
    "trainer/tasks/*.py",
)
"""The parts of rolltap that the agent needs. They need no more than psutil and pydantic."""
_LINES_BEFORE = 1000
"""Most lines that a shell may say before the agent starts."""
_FOLDER = re.compile(r"/[\w./-]{1,90}", re.ASCII)
"""The agent's folder. ssh(1) reads nothing else into such a name, and the path of a socket in it
has at most 107 bytes (unix(7))."""
_SAID_BYTES = 2000
_NOT_CONNECTED = 255
"""Exit status of ssh(1) for an error of its own; others are those of the program on the machine."""
_CONNECT_SECONDS = 60.0
_FORWARD_SECONDS = 60.0
_END_SECONDS = 20.0
LATE_SECONDS = 600.0
"""Longest wait for what a program leaves, when it should have ended by its own timeout."""
_TAKEN_BYTES = 80 << 20
"""Most bytes of an output or a verdict. A machine that keeps to its agent sends less."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as OpenSSH's client reaches it.

    Attributes:
        host: Name of the machine, with a user or without, as a configuration of ssh has it; or
            `ssh://USER@HOST:PORT`.
        python: Program on that machine: a Python 3.11 or newer with psutil and pydantic.
        arguments: Further options of ssh(1).
    """

    host: str
    python: str = "python3"
    arguments: tuple[str, ...] = ()

    def connect(self, control: Path, program: str) -> list[str]:
        """Return the command that runs a program on the machine. `control` is for its socket.

        Nobody is asked for a password, and the user's agent, screen and ports stay here.
        """
        options = ["-T", "-e", "none"]
        for option in (
            f"ControlPath={control}",
            "ControlMaster=yes",
            "ControlPersist=no",
            "BatchMode=yes",
            "ForwardAgent=no",
            "ForwardX11=no",
            "ClearAllForwardings=yes",
            "PermitLocalCommand=no",
            "RemoteCommand=none",
        ):
            options += ["-o", option]
        return ["ssh", *options, *self.arguments, "--", self.host, program]

    def forward(self, control: Path, socket: str, proxy: str) -> list[str]:
        """Return the command with which a socket on the machine leads to `proxy`, `HOST:PORT`."""
        forward = f"{socket}:{proxy}"
        # no configuration: it may have forwards of its own
        options = ["-F", "none", "-o", f"ControlPath={control}", "-O", "forward", "-R", forward]
        return ["ssh", *options, "--", self.host]


class Link:
    """A connection to a machine, with the agent at its other end. Made by `linked`."""

    def __init__(
        self, machine: Machine, control: Path, connection: Connection, folder: str
    ) -> None:
        self.connection = connection
        self._machine = machine
        self._control = control
        self._folder = folder
        self._numbers = count()
        self._sockets: Once[str, str] = Once()

    async def forward(self, proxy: str) -> str:
        """Return the socket on the machine that leads to the recorder. Raises `OSError`.

        Only the user of the agent can reach it. A port would be open to all users of the machine,
        and to its network where sshd has `GatewayPorts yes`.
        """
        return await self._sockets.get(proxy, partial(self._forward, proxy))

    async def _forward(self, proxy: str) -> str:
        socket = f"{self._folder}/recorder-{next(self._numbers)}"
        asked = await asyncio.create_subprocess_exec(
            *self._machine.forward(self._control, socket, proxy),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_FORWARD_SECONDS):
                _, said = await asked.communicate()
        except TimeoutError as error:
            how = f"did not answer within {_FORWARD_SECONDS:g} s"
            raise OSError(f"the machine {self._machine.host} {how}") from error
        finally:
            await _ended_at_once(asked)
        if asked.returncode:
            raise OSError(
                f"{self._machine.host} forwards no socket to the recorder ({_text(said)}): "
                "its sshd needs AllowStreamLocalForwarding"
            )
        return socket


@asynccontextmanager
async def linked(machine: Machine) -> AsyncIterator[Link]:
    """Connect to a machine and start the agent. Everything ends there with the block.

    Raises `InputError` for a machine that cannot have boxes, and `OSError` for one that is not
    reached.
    """
    with scratch_folder() as folder, (folder / "errors").open("w+b") as errors:
        control = folder / "ssh"
        boot = "import sys; exec(eval(sys.stdin.buffer.raw.readline()))"
        program = f"exec {shlex.quote(machine.python)} -c {shlex.quote(boot)}"
        client = await asyncio.create_subprocess_exec(
            *machine.connect(control, program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C must not end it before its boxes
        )
        assert client.stdin is not None
        assert client.stdout is not None
        connection = Connection(client.stdout, client.stdin)
        try:
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    place = await _start_agent(client.stdin, client.stdout)
            except (OSError, EOFError, asyncio.LimitOverrunError) as error:
                raise await _why_not(machine, client, errors, error) from error
            running = asyncio.create_task(connection.run())
            try:
                if not _FOLDER.fullmatch(place):
                    raise InputError(
                        f"the machine {machine.host} cannot have boxes: no forwarded socket can be "
                        f"in {place}: set TMPDIR there to a short path of letters, digits, '.', "
                        "'_' and '-'"
                    )
                yield Link(machine, control, connection, place)
            finally:
                client.stdin.close()  # the agent ends its boxes, and then the connection
                if not connection.why:
                    await _ended_within(client, _END_SECONDS)
                running.cancel()
                await wait_for_end(running)
        finally:
            client.stdin.close()
            await _ended_at_once(client)


async def _start_agent(stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> str:
    """Start the agent, and return its folder on the machine."""
    files = await asyncio.to_thread(_agent_files)
    stdin.write(f"{_BOOT.read_text()!r}\n{len(files)}\n".encode() + files)
    await stdin.drain()
    for _ in range(_LINES_BEFORE):
        if await stdout.readuntil() == STARTED:
            return _text(await stdout.readuntil())
    raise OSError("it says much and starts no agent")


async def _why_not(
    machine: Machine, client: asyncio.subprocess.Process, errors: IO[bytes], error: Exception
) -> Exception:
    """Return the error of a connection that could not be made."""
    if not isinstance(error, TimeoutError):
        await _ended_within(client, _END_SECONDS)
    errors.seek(0)
    said = _text(errors.read()) or str(error) or f"no answer within {_CONNECT_SECONDS:g} s"
    if client.returncode in (None, _NOT_CONNECTED):
        return OSError(
            f"the machine {machine.host} is not reached by ssh: {said}. `ssh {machine.host} true` "
            "must work and ask nothing; --ssh-argument (ssh_arguments in a recipe) has further "
            "options"
        )
    return InputError(
        f"the machine {machine.host} cannot have boxes: {said}. Make an environment there "
        "(python3 -m venv boxes && boxes/bin/pip install psutil pydantic), and name its Python "
        "with --ssh-python (ssh_python in a recipe)"
    )


async def _ended_at_once(client: asyncio.subprocess.Process) -> None:
    """End a process of ssh(1), if it has not ended, and wait for its end."""
    if client.returncode is None:
        with suppress(ProcessLookupError):
            client.kill()
    await wait_for_end(asyncio.ensure_future(client.wait()))


async def _ended_within(client: asyncio.subprocess.Process, seconds: float) -> None:
    """Wait for the end of ssh(1), which ends with its program."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await client.wait()


@cache
def _agent_files() -> bytes:
    """Return the files that the agent needs, as a compressed archive."""
    tops = {
        "addons": Path(rolltap.addons.__path__[0]),
        "trainer": Path(rolltap.trainer.__path__[0]),
    }
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("rolltap/__init__.py"))
        for pattern in _FILES:
            top, _, below = pattern.partition("/")
            for path in sorted(tops[top].glob(below)):
                tar.add(path.resolve(), f"rolltap/{top}/{path.relative_to(tops[top])}")
    return file.getvalue()


def _text(said: bytes) -> str:
    return said.decode(errors="replace").strip()[-_SAID_BYTES:]


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


class SshBox:
    """A box on a machine, which is one stream of the connection to it."""

    def __init__(self, host: str, stream: Stream, spec: BoxSpec, made: Mapping[str, Any]) -> None:
        read = _read(_Made, made)
        self.workdir = read.workdir
        self.home = read.home
        self.proxy = read.proxy
        self._host = host
        self._stream = stream
        self._spec = spec
        self._pipes = [mount.source for mount in spec.mounts if mount.source.is_fifo()]

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        """Run a program: see `Box.run`. The folders of the machine's PATH come first."""
        try:
            return await self._run(command, env, timeout, log)
        except LostError as error:
            raise _lost(self._host, error) from error

    async def _run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        stream = self._stream
        stream.patience = timeout + LATE_SECONDS
        await stream.send({"command": list(command), "env": dict(env), "timeout": timeout})
        left = _TAKEN_BYTES
        with log.open("wb", buffering=0) as output:
            while chunk := await stream.receive_bytes():
                output.write(chunk[:left])
                left = max(0, left - len(chunk))
        told = _read(_Told, _checked(self._host, await stream.receive()))
        if len(told.pipes) != len(self._pipes):
            raise LostError("it tells of pipes that the box does not have")
        ended = Ended(told.status, told.stopped)
        limit = self._spec.limits.of_isolated().disk_gib
        assert limit is not None
        with tempfile.TemporaryFile() as file:
            is_whole = await _receive_file(stream, file, int(limit * _GIB))
            await in_folder_thread(delete, self._spec.workspace, told.gone)
            file.seek(0)
            if not await in_folder_thread(unpack, file, self._spec.workspace, int(limit * _GIB)):
                is_whole = False
        for pipe, opened in zip(self._pipes, told.pipes, strict=True):
            content = bytearray()
            while chunk := await stream.receive_bytes():
                content += chunk[: _TAKEN_BYTES - len(content)]
            await asyncio.to_thread(write_pipe, pipe, bytes(content), opened)
        if not is_whole:
            return Ended(None, "disk")
        return ended

    async def settle(self) -> None:
        """Do nothing: what a program left has ended before its changes come back."""


async def _receive_file(stream: Stream, file: IO[bytes], limit: int) -> bool:
    """Write the bytes of a stream into a file. Return False if there are more than `limit`."""
    left = limit
    while chunk := await stream.receive_bytes():
        left -= len(chunk)
        if left >= 0:
            file.write(chunk)
    return left >= 0


def _checked(host: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of a machine. Raises the error that it tells: `OSError` or `InputError`."""
    if message.get("error") is None:
        return message
    error = _read(_Error, message["error"])
    if error.permanent:
        raise InputError(f"on the machine {host}: {error.text}")
    if error.errno is not None:
        raise OSError(error.errno, error.text, error.filename)
    raise OSError(error.text)


def _read(kind: type[M], message: object) -> M:
    """Return what a machine tells. Raises `LostError` for what its agent does not."""
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        raise LostError("it does not tell what its agent does") from error


def _lost(host: str, error: LostError) -> ConnectionError:
    return ConnectionError(f"the connection to the machine {host} was lost: {error}")


class _Shared:
    """The connection that the boxes of an event loop have together."""

    def __init__(self, machine: Machine) -> None:
        self.users = 0
        self._machine = machine
        self._made: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._left = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    @property
    def is_lost(self) -> bool:
        """True when it was made and is lost, or could not be made."""
        if not self._made.done():
            return False
        if self._made.cancelled():
            return True
        return self._made.exception() is not None or bool(self._made.result().connection.why)

    async def link(self) -> Link:
        """Wait until it is made. Raises as `linked`."""
        return await asyncio.shield(self._made)

    async def end(self) -> None:
        """End it, and wait for that."""
        self._left.set()
        if not self._made.done():
            self._task.cancel()
        if await wait_for_end(self._task):
            raise asyncio.CancelledError

    async def _hold(self) -> None:
        try:
            async with linked(self._machine) as link:
                self._made.set_result(link)
                await self._left.wait()
        except Exception as error:
            if self._made.done():
                raise
            self._made.set_exception(error)
            self._made.exception()  # nobody may wait any more
        finally:
            self._made.cancel()


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
            run_blocking(self._ask({"do": "check"}))
        except OSError as error:
            raise InputError(str(error)) from error

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """See `Runtime.show`. The program is the machine's, the files go there."""
        self._settings["program"] = program
        self._files += [file for file in files if file not in self._files]

    def image_digest(self, image: str) -> str:
        """Return the digest of an image that the machine has, or pulls. Raises as `box`."""
        answer = run_blocking(self._ask({"do": "digest", "image": image}))
        return _read(_Digest, answer).digest

    @asynccontextmanager
    async def box(self, spec: BoxSpec) -> AsyncIterator[SshBox]:
        """Yield a box. Raises `OSError` and `InputError`, also those of the runtime there."""
        host = self._machine.host
        async with self._link() as link:
            try:
                recorder = None
                if spec.proxy is not None:
                    recorder = await link.forward(spec.proxy)
                parts, mounts = _parts(spec, self._files)
                request = {
                    "do": "box",
                    "settings": self._settings,
                    "name": spec.name,
                    "workdir": spec.workdir,
                    "image": spec.image,
                    "limits": spec.limits.model_dump(),
                    "recorder": recorder,
                    "mounts": mounts,
                }
                stream = await link.connection.open(request)
            except LostError as error:
                raise _lost(host, error) from error
            try:
                try:
                    with tempfile.TemporaryFile() as file:
                        await in_folder_thread(pack, file, parts)
                        file.seek(0)
                        await stream.send_file(file)
                    box = SshBox(host, stream, spec, _checked(host, await stream.receive()))
                except LostError as error:
                    raise _lost(host, error) from error
                yield box
            finally:
                if await wait_for_end(asyncio.ensure_future(stream.close())):
                    raise asyncio.CancelledError

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
                await shared.end()

    async def _ask(
        self,
        request: Mapping[str, Any],
        file: IO[bytes] | None = None,
    ) -> Mapping[str, Any]:
        """Return the answer to one question, and write what follows it into a file."""
        async with linked(self._machine) as link:
            stream = await link.connection.open({**request, "settings": self._settings})
            answer = _checked(self._machine.host, await stream.receive())
            while file is not None and (chunk := await stream.receive_bytes()):
                file.write(chunk)
            return answer


class SshImageRuntime(SshRuntime):
    """Boxes of images that the machine has."""

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what a folder of an image holds: see `ImageRuntime.copy_out`."""
        with tempfile.TemporaryFile() as file:
            run_blocking(self._ask({"do": "copy out", "image": image, "workdir": workdir}, file))
            size = file.tell()
            file.seek(0)
            dest.mkdir(parents=True, exist_ok=True)
            if not unpack(file, dest, size):
                what = "has files that cannot be copied"
                raise InputError(f"the folder {workdir} of the image {image} {what}")


def _parts(spec: BoxSpec, files: Iterable[Path]) -> tuple[dict[str, Path], list[dict[str, Any]]]:
    """Return what goes to the machine by its name there, and the mounts of these names."""
    parts = {"workspace": spec.workspace, "home": spec.home}
    mounts = []
    for number, mount in enumerate([*spec.mounts, *(Mount(file, str(file)) for file in files)]):
        source = f"mounts/{number}"
        is_pipe = mount.source.is_fifo()
        inside = spec.in_workspace(mount)
        if inside is not None:
            source = f"workspace/{inside}"
        elif not is_pipe:
            parts[source] = mount.source
        told = {"source": source, "target": mount.target, "writable": mount.writable}
        mounts.append({**told, "pipe": is_pipe})
    return parts, mounts
