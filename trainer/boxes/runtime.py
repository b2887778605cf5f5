"""The interface of a runtime: boxes in which the programs of a session run.

A box of a local kind shows folders of this machine in place. One of a remote kind gets copies of
them, and brings the workspace back after each program: what is said of `Box.run` is all that its
users rely on.
"""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from rolltap.trainer.tasks.task import Build, Limits

StopReason = Literal["timeout", "memory", "processes", "disk"]
"""Why rolltap stopped a program: its time, or a limit of its box."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine that is visible in a box, under an absolute path of its own
    there."""

    source: Path
    target: str
    writable: bool = False


Accept = Callable[[socket.socket], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    """The parts of a box.

    Attributes:
        name: Unique among the boxes that exist: letters, digits, dot, dash and underscore.
        workspace: Folder of this machine, writable in the box as `workdir`. Remote boxes bring back
            what changes in it.
        workdir: Absolute path of the workspace in the box. The runtime `process` has none of its
            own: there it is `workspace`.
        home: Folder of this machine, writable in the box: HOME.
        mounts: Further files, folders and named pipes. The runtime `process` sees all files of the
            user anyway. A remote box has copies, whose changes stay there; a file of the workspace
            is the one of the box's workspace, and what is written to a pipe is written to the pipe
            here when the program has ended.
        image: Container image or root folder; None: this machine's system folders.
        limits: Limits of all programs in the box together.
        proxy: The recorder as this machine reaches it, `HOST:PORT`: all that a program in the box
            can reach. None: the box has no network.
        accept: Has the recorder accept connections at a socket that listens, as long as the block
            lasts. A box of this machine with a network of its own needs it beside `proxy`. The
            socket may be closed in the block.
    """

    name: str
    workspace: Path
    workdir: str
    home: Path
    mounts: Sequence[Mount] = ()
    image: str | None = None
    limits: Limits = field(default_factory=Limits)
    proxy: str | None = None
    accept: Accept | None = None

    def in_workspace(self, mount: Mount) -> str | None:
        """Return the path of a mount's source below the workspace; None for a source that is
        elsewhere."""
        if not mount.source.is_relative_to(self.workspace):
            return None
        return str(mount.source.relative_to(self.workspace))

    def written(self) -> list[Path]:
        """Return the files and folders of this machine that programs in the box can write to."""
        writable = [mount.source for mount in self.mounts if mount.writable]
        return [self.workspace, self.home, *writable]

    def disk_bytes(self) -> int:
        """Return the limit of the disk of an isolated box, in bytes."""
        limit = self.limits.of_isolated().disk_gib
        assert limit is not None
        return int(limit * 2**30)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    Attributes:
        status: Exit status; minus the signal's number when a signal ended it; None when rolltap
            stopped it.
        stopped: Why rolltap stopped it; None when it ended by itself.
    """

    status: int | None
    stopped: StopReason | None = None


class Box(Protocol):
    """One box. Its programs run one after another; what they leave running can be killed with
    `settle`."""

    workdir: str
    """Path of the workspace as programs in the box see it."""
    home: str
    """Path of the home folder as programs in the box see it."""
    proxy: str | None
    """The recorder as programs in the box reach it, `HOST:PORT`; None without network."""

    async def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        log: Path,
    ) -> Ended:
        """Run a program in the workspace, with an empty stdin and its output in the file `log`.

        `env` is its whole environment. The program is stopped after `timeout` seconds and when the
        caller is cancelled.

        When this returns, the folder `workspace` of the box is as the program left it, also when
        the program was stopped. A remote box kills what the program left running before it brings
        the changes back. Files without a change are not touched. When more comes back than the box
        may have on its disk, the program counts as stopped by this limit.

        Raises `OSError` when the program cannot be started: `FileNotFoundError` names a program
        that is not there. `ConnectionError` is raised when a remote box is lost.
        """

    async def settle(self) -> None:
        """Kill every process that runs in the box, and wait for its end. Files stay."""


class Runtime(Protocol):
    """Makes boxes. Everything in a box dies when its block is left, and when this process dies, by
    kill -9 too.

    A runtime whose boxes show files of this machine derives from `HidingRuntime` (hiding.py) if it
    is `isolated`. Only such a one is told what to hide: runs, tasks, keys, the home.

    A further runtime of rolltap needs, besides its class:

    - `RuntimeName`, `_TAKES`, `Settings` and `make_runtime` in choose.py;
    - its settings, if it has any, in `RolloutConfig` and `RolloutArguments` (rollouts/config.py),
      and in `_OPTIONS` (cli/tasks.py);
    - its name where runtimes are listed for users: `rollout` (public/rollouts.py),
      `Session.runtime` (addons/store/records.py), and the tables of recipes/site/pages/boxes.md;
    - tests: `KINDS` in tests/trainer/boxes/test_box.py, if its boxes are of this machine.
    """

    name: str
    """`process`, `sandbox`, `container`, `apptainer`, `ssh` or `harbor`, or one of your own."""
    warning: str | None
    """Dangers that the runtime does not protect from; None when there is nothing to say."""
    isolated: bool
    """True when a box has its own files and network: paths of the box are then not those of this
    machine.

    Such a box has each of `BoxSpec.mounts` at its `target`. Sessions and judges rely on it: the
    files of a judge are below `/rolltap`, the recorder's certificates in `CERTIFICATES`
    (environment.py). The box reaches nothing but `BoxSpec.proxy`, and its programs keep to
    `Limits.of_isolated`; where that is not so, `warning` says it.
    """
    programs_here: bool
    """True when boxes without an image have the programs of this machine."""

    def check(self) -> None:
        """Raise `InputError` when boxes cannot be made here: it names what is missing, and how to
        install it."""

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """Show what a program of the operator's needs, and `files` under their paths, in boxes made
        from now on."""

    def box(self, spec: BoxSpec) -> AbstractAsyncContextManager[Box]:
        """Return a box. Entering raises `OSError` or `InputError` when it cannot be made."""

    def image_digest(self, image: str) -> str:
        """Return the digest of an image or root folder; empty when the runtime knows none."""


@runtime_checkable
class ImageRuntime(Runtime, Protocol):
    """A runtime whose boxes have an image: a name, or the absolute path of a root folder."""

    def copy_out(self, image: str, workdir: str, dest: Path) -> None:
        """Copy what the folder `workdir` of an image holds into the folder `dest`. Raises
        `InputError` without it."""


@runtime_checkable
class BuildingRuntime(ImageRuntime, Protocol):
    """A runtime that can build the images of tasks that have only a Dockerfile."""

    builds: bool
    """True when it does."""

    async def build(self, image: str, build: Build, log: Path) -> None:
        """Build `image`, unless it is there, with the output in `log`. Raises `InputError` if it
        cannot be built."""
