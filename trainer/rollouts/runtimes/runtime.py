"""The interface of a runtime: boxes in which the programs of a session run."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from rolltap.trainer.rollouts.tasks.limits import Limits

StopReason = Literal["timeout", "memory", "processes", "disk"]
"""Why rolltap stopped a program: its time, or a limit of its box."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine that is visible in a box, under an absolute path of its own there."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    """The parts of a box.

    Attributes:
        name: Unique among the boxes that exist: letters, digits, dot, dash and underscore.
        workspace: Folder of this machine, writable in the box as `workdir`.
        workdir: Absolute path of the workspace in the box. The runtime `process` has none of its own: there it is
            `workspace`.
        home: Folder of this machine, writable in the box: HOME.
        mounts: Further files and folders. The runtime `process` sees all files of the user anyway.
        image: Container image or root folder; None: this machine's system folders.
        limits: Limits of all programs in the box together.
        proxy: The recorder as this machine reaches it, `HOST:PORT`: all that a program in the box can reach. None: the
            box has no network.
    """

    name: str
    workspace: Path
    workdir: str
    home: Path
    mounts: Sequence[Mount] = ()
    image: str | None = None
    limits: Limits = field(default_factory=Limits)
    proxy: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    Attributes:
        status: Exit status; minus the signal's number when a signal ended it; None when rolltap stopped it.
        stopped: Why rolltap stopped it; None when it ended by itself.
    """

    status: int | None
    stopped: StopReason | None = None


class Box(Protocol):
    """One box. Its programs run one after another; what they leave running can be killed with `settle`."""

    @property
    def workdir(self) -> str:
        """Path of the workspace as programs in the box see it."""

    @property
    def home(self) -> str:
        """Path of the home folder as programs in the box see it."""

    @property
    def proxy(self) -> str | None:
        """The recorder as programs in the box reach it, `HOST:PORT`; None without network."""

    async def run(self, command: Sequence[str], *, env: Mapping[str, str], timeout: float, log: Path) -> Ended:
        """Run a program in the workspace, with an empty stdin and its output in the file `log`.

        `env` is its whole environment. The program is stopped after `timeout` seconds and when the caller is
        cancelled. Raises `OSError` when it cannot be started; `FileNotFoundError` names a program that is not there.
        """

    async def settle(self) -> None:
        """Kill every process that runs in the box, and wait for its end. Files stay."""


class Runtime(Protocol):
    """Makes boxes. Everything in a box dies when its block is left, and when this process dies, by kill -9 too."""

    name: str
    """`process`, `sandbox`, `container` or `apptainer`."""
    warning: str | None
    """Dangers that the runtime does not protect from; None when there is nothing to say."""
    isolated: bool
    """True when a box has its own files and network: paths of the box are then not those of this machine."""

    def check(self) -> None:
        """Raise `InputError` when boxes cannot be made here: it names what is missing, and how to install it."""

    def box(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        """Return a box. Entering raises `OSError` or `InputError` when it cannot be made."""

    def image_digest(self, image: str) -> str:
        """Return the digest of an image or root folder; empty when the runtime knows none."""


@runtime_checkable
class ImageRuntime(Runtime, Protocol):
    """A runtime whose boxes have an image: a name, or the absolute path of a root folder."""

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image holds into the folder `dest`. Raises `InputError` without it."""
