"""The connection to a machine behind ssh, with rolltap's far side at its other end.

OpenSSH's client connects, so that the user's own configuration, keys and jump hosts count. One
process of it starts `boxes/far_side` on the machine, whose files it brings along:

    connect      ssh HOST python3; the far side's files go over stdin
    forward      ssh -O forward -R: a socket in the far side's folder leads to the recorder here
"""

import asyncio
import io
import re
import shlex
import signal
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import IO

import rolltap.addons
import rolltap.trainer
from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.inside.frames import STARTED, Connection
from rolltap.trainer.concurrency import Once, finished, wait_for_end
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
"""The parts of rolltap that the far side needs. They need no more than psutil and pydantic."""
_LINES_BEFORE = 1000
"""Most lines that a shell may say before the far side starts."""
_FOLDER = re.compile(r"/[\w./-]{1,90}", re.ASCII)
"""The far side's folder. ssh(1) reads nothing else into such a name, and the path of a socket in it
has at most 107 bytes (unix(7))."""
_SAID_BYTES = 2000
_NOT_CONNECTED = 255
"""Exit status of ssh(1) for an error of its own; others are those of the program on the machine."""
_OPTIONS = (
    "ControlMaster=yes ControlPersist=no BatchMode=yes ForwardAgent=no ForwardX11=no"
    " ClearAllForwardings=yes PermitLocalCommand=no RemoteCommand=none"
)
"""Nobody is asked for a password, and the user's agent, screen and ports stay here."""
_ANSWER_SECONDS = 60.0
_END_SECONDS = 20.0


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
        """Return the command that runs a program on the machine. `control` is for its socket."""
        options = ["-T", "-e", "none", "-o", f"ControlPath={control}"]
        for option in _OPTIONS.split():
            options += ["-o", option]
        return ["ssh", *options, *self.arguments, "--", self.host, program]

    def forward(self, control: Path, socket: str, proxy: str) -> list[str]:
        """Return the command with which a socket on the machine leads to `proxy`, `HOST:PORT`."""
        # no configuration: it may have forwards of its own
        options = ["-F", "none", "-o", f"ControlPath={control}"]
        return ["ssh", *options, "-O", "forward", "-R", f"{socket}:{proxy}", "--", self.host]


class Link:
    """A connection to a machine. Made by `linked`."""

    def __init__(
        self,
        machine: Machine,
        control: Path,
        connection: Connection,
        folder: str,
    ) -> None:
        self.connection = connection
        self._machine = machine
        self._control = control
        self._folder = folder
        """The far side's folder on the machine. Only the far side's user can enter it."""
        self._numbers = count()
        self._sockets: Once[str, str] = Once()

    async def forward(self, proxy: str) -> str:
        """Return the socket on the machine that leads to the recorder. Raises `OSError`.

        A port would be open to all users of the machine, and to its network where sshd has
        `GatewayPorts yes`.
        """
        return await self._sockets.get(proxy, partial(self._forward, proxy))

    async def _forward(self, proxy: str) -> str:
        host = self._machine.host
        socket = f"{self._folder}/recorder-{next(self._numbers)}"
        asked = await asyncio.create_subprocess_exec(
            *self._machine.forward(self._control, socket, proxy),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                _, said = await asked.communicate()
        except TimeoutError as error:
            how = f"did not answer within {_ANSWER_SECONDS:g} s"
            raise OSError(f"the machine {host} {how}") from error
        finally:
            await _end(asked, 0)
        if asked.returncode:
            raise OSError(
                f"{host} forwards no socket to the recorder ({_text(said)}): its sshd needs "
                "AllowStreamLocalForwarding"
            )
        return socket


@asynccontextmanager
async def linked(machine: Machine) -> AsyncIterator[Link]:
    """Connect to a machine and start the far side. Everything ends there with the block.

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
        running = None
        try:
            place = await _start_far_side(machine, client, errors)
            running = asyncio.create_task(connection.run())
            _check_folder(machine, place)
            yield Link(machine, control, connection, place)
        finally:
            client.stdin.close()  # the far side ends its boxes, and then the connection
            is_alive = running is not None and not connection.why
            await _end(client, _END_SECONDS if is_alive else 0)
            if running is not None:
                running.cancel()
                await wait_for_end(running)


async def _start_far_side(
    machine: Machine, client: asyncio.subprocess.Process, errors: IO[bytes]
) -> str:
    """Start the far side, and return its folder on the machine. Raises as `linked`."""
    assert client.stdin is not None
    assert client.stdout is not None
    files = await asyncio.to_thread(_far_side_files)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            client.stdin.write(f"{_BOOT.read_text()!r}\n{len(files)}\n".encode() + files)
            await client.stdin.drain()
            for _ in range(_LINES_BEFORE):
                if await client.stdout.readuntil() == STARTED:
                    return _text(await client.stdout.readuntil())
        raise OSError(
            f"its login shell printed {_LINES_BEFORE} lines before rolltap started there: let it"
            " print nothing in logins that are not interactive"
        )
    except TimeoutError as error:
        why = f"no answer within {_ANSWER_SECONDS:g} s"
        raise _not_reached(machine, errors, why) from error
    except (OSError, EOFError, asyncio.LimitOverrunError) as error:
        await _end(client, _END_SECONDS)
        if client.returncode in (_NOT_CONNECTED, -signal.SIGKILL):
            raise _not_reached(machine, errors, str(error)) from error
        raise InputError(
            f"the machine {machine.host} cannot have boxes: {_said(errors) or error}. Make an "
            "environment there (python3 -m venv boxes && boxes/bin/pip install psutil pydantic), "
            "and name its Python with --ssh-python (ssh_python in a recipe)"
        ) from error


def _not_reached(machine: Machine, errors: IO[bytes], why: str) -> OSError:
    return OSError(
        f"the machine {machine.host} is not reached by ssh: {_said(errors) or why}. "
        f"`ssh {machine.host} true` must work and ask nothing; --ssh-argument (ssh_arguments in a "
        "recipe) has further options"
    )


def _check_folder(machine: Machine, place: str) -> None:
    if not _FOLDER.fullmatch(place):
        raise InputError(
            f"the machine {machine.host} cannot have boxes: no forwarded socket can be in {place}: "
            "set TMPDIR there to a short path of letters, digits, '.', '_' and '-'"
        )


async def _end(client: asyncio.subprocess.Process, seconds: float) -> None:
    """Wait for the end of ssh(1), which ends with its program. Kill it after `seconds`."""
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await client.wait()
    finally:
        if client.returncode is None:
            with suppress(ProcessLookupError):
                client.kill()
        await finished(client.wait())


@cache
def _far_side_files() -> bytes:
    """Return the files that the far side needs, as a compressed archive."""
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


def _said(errors: IO[bytes]) -> str:
    errors.seek(0)
    return _text(errors.read())


def _text(said: bytes) -> str:
    return said.decode(errors="replace").strip()[-_SAID_BYTES:]
