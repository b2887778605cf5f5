"""The interface of a runtime: boxes in which the programs of a session run.

A box of a local kind shows folders of this machine in place. One of a remote kind gets copies of
them, and brings the workspace back after each program: what is said of `Box.run` is all that its
users rely on.

Below it is what several runtimes need: what of this machine their boxes hide, temporary folders
that can be removed whatever a session left in them, and the files that a program needs in order to
run where the rest is hidden.
"""

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.task import Build, Limits, Task

logger = logging.getLogger(__name__)

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
        return [
            self.workspace,
            self.home,
            *(mount.source for mount in self.mounts if mount.writable),
        ]


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
        self, command: Sequence[str], *, env: Mapping[str, str], timeout: float, log: Path
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
    kill -9 too."""

    name: str
    """`process`, `sandbox`, `container`, `apptainer`, `ssh` or `harbor`."""
    warning: str | None
    """Dangers that the runtime does not protect from; None when there is nothing to say."""
    isolated: bool
    """True when a box has its own files and network: paths of the box are then not those of this
    machine."""
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


_ROW = re.compile(r"(:|, )[^/]*$")
"""The place in a file at the end of a task's `source`."""


class HidingRuntime:
    """A runtime whose boxes show `tools`, folders of this machine, and hide files and folders in
    all that they show."""

    programs_here = True

    def __init__(self, tools: Iterable[Path] = (), hidden: Iterable[Path] = ()) -> None:
        self.tools = [Path(os.path.abspath(tool)) for tool in tools]
        self.programs: set[str] = set()
        """Programs of the operator's, by name or path: a sandbox shows what they need."""
        self._hidden: list[str] = []
        """Sorted, without links, each with a separator at its end."""
        self.hide(hidden)

    def hide(self, paths: Iterable[Path]) -> None:
        """Hide files and folders, which may not exist yet, in boxes that are made from now on.
        Earlier ones stay so."""
        self._hidden = sorted(
            {*self._hidden, *(os.path.join(path.resolve(), "") for path in paths)}
        )

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """See `Runtime.show`. A sandbox shows no folder that nobody named."""
        self.programs.add(program)
        self.tools += [file for file in files if file not in self.tools]

    def hidden_in(self, tools: Iterable[Path]) -> list[Path]:
        """Return where hidden files and folders are below tool folders, as a box sees them, if they
        exist."""
        found: list[Path] = []
        for tool in tools:
            place = os.path.join(tool.resolve(), "")
            for index in range(bisect_left(self._hidden, place), len(self._hidden)):
                text = self._hidden[index]
                if not text.startswith(place):
                    break
                if Path(text).exists():
                    found.append(tool / text[len(place) :])
        return list(dict.fromkeys(found))

    def layers(self, command: Sequence[str] = ()) -> dict[Path, bool]:
        """Return what a box with `command` shows and hides of this machine: see `layered`.

        Raises `InputError` when what it needs would be hidden, and for a tool folder that contains
        the user's home.
        """
        for tool in self.tools:
            require_narrow(tool, Path.home())
        return layered(self.tools, self.hidden_in(self.tools))


def layered(shown: Iterable[Path], hidden: Sequence[Path]) -> dict[Path, bool]:
    """Return the paths that a box has to mount, outer ones first: True for what it shows, False for
    what is empty.

    The path nearest above a file counts, and without one the file is not seen. Raises `InputError`
    for a path that is both shown and hidden.
    """
    wanted, found = dict.fromkeys(shown, True), dict[Path, bool]()
    if both := [path for path in hidden if path in wanted]:
        raise InputError(
            f"a session needs {both[0]}, and must not see it: it is of a run, a task, or your home:"
            " install the program in a folder of its own, or name narrower tool folders"
        )
    wanted |= dict.fromkeys(hidden, False)
    for path in sorted(wanted):
        if wanted[path] != bool(nearest(path.parent, found)[1]):
            found[path] = wanted[path]
    return found


def nearest(path: Path, layers: Mapping[Path, bool]) -> tuple[Path, bool | None]:
    """Return the layer at or above a path, and whether it shows the path; None without a layer."""
    return next(
        ((top, layers[top]) for top in (path, *path.parents) if top in layers), (path, None)
    )


def private_paths(
    run: Path, tasks: Iterable[Task], files: Iterable[Path] = (), tools: Iterable[Path] = ()
) -> list[Path]:
    """Return what sessions must not see, wherever it lies: runs, tasks, `files`, the home and the
    temporary folder.

    Runs are this one, those beside it, and those in `tools` up to two folders deep. Of a task they
    are all paths that it names, and what its `source` names. An image is none of them: its sessions
    see it.
    """
    # a machine that only has boxes lacks what reads runs
    from rolltap.addons.store.metadata import RUN_FILE

    places = [
        run.absolute().parent,
        *(folder for tool in tools for folder in (tool, *tool.glob("*/"))),
    ]
    runs = [file.parent for place in places for file in place.glob(f"*/{RUN_FILE}")]
    found = [run, *runs, *files, Path.home(), Path(tempfile.gettempdir())]
    for task in tasks:
        found += _paths(task.model_dump(exclude={"image"}))
        found += [Path(_ROW.sub("", task.source))] if task.source else []
    return list(dict.fromkeys(map(Path.absolute, found)))


def _paths(value: object) -> list[Path]:
    if isinstance(value, Path):
        return [value]
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return [path for part in parts for path in _paths(part)]


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder that only this user can enter, and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="rolltap-"))
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it. What cannot be removed is logged: nothing is raised.

    By rm(1): `shutil.rmtree` fails for folders that are nested a thousand times, and for those that
    a session closed to its own user.
    """
    remove = ["rm", "-rf", "--one-file-system", "--", str(folder)]
    try:
        if subprocess.run(remove, stderr=subprocess.DEVNULL).returncode:
            subprocess.run(["chmod", "-R", "u+rwx", "--", str(folder)], stderr=subprocess.DEVNULL)
            done = subprocess.run(remove, stderr=subprocess.PIPE, text=True, errors="replace")
            if done.returncode:
                logger.warning(
                    "the folder %s could not be removed: %s", folder, done.stderr.strip()[-500:]
                )
    except OSError as error:
        logger.warning("the folder %s could not be removed: %s", folder, error)


SYSTEM = tuple(
    Path("/", name) for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
)
"""Folders that a sandbox shows, but for what is hidden in them."""
_OF_MANY = frozenset(
    {"", "usr", "local", "lib", "lib32", "lib64", "libexec", "share", "src", "games"}
)
"""Names of folders of the system in which others have theirs."""
_SHEBANG_BYTES = 256
_ENVIRONMENT = ("pyvenv.cfg", "bin", "lib/python3*", "lib/node_modules", "lib64")
"""Files and folders of a virtual environment: not all of it, for it may be made at the root of a
project."""
_PREFIX = ("bin", "lib", "lib64", "libexec", "share", "ssl", "opt", "Cellar")
"""Folders of an installation below one prefix, of conda, Homebrew and others too."""
_SHIMS = (*_PREFIX, "shims", "versions", "version", "installs", "plugins", "pyenv.d")
"""Files and folders of pyenv and its kind."""


@lru_cache(maxsize=256)
def tool_folders(program: str, path: str) -> tuple[Path, ...]:
    """Return what of this machine `program` needs, as folders, files and symbolic links.

    `path` is the PATH that finds it. Known are virtual environments with their base Python, folders
    of Node packages, installations below one prefix (`bin` and `lib`), the interpreters that
    scripts name in their first line, and programs that are one file. Code that a program finds in
    another way is missing, for instance an editable install. Empty for a program of the system that
    is in no environment, and for one that is not found by an absolute path.
    """
    found = shutil.which(program, path=path)
    if found is None or not os.path.isabs(found):
        return ()
    needed: list[Path] = []
    start = Path(os.path.abspath(found))
    for file in dict.fromkeys([*_links(start), start.resolve()]):
        needed += _installation(file)
    needed += [part for name in _interpreter(start) for part in tool_folders(name, path)]
    return tuple(dict.fromkeys(needed))


def projects_around(tools: Iterable[Path]) -> list[Path]:
    """Return the folders of the system that surround the environments among tools: no program's,
    but a project's."""
    paths = [tool.parents for tool in tools if tool.name == "pyvenv.cfg" and _is_of_system(tool)]
    around = [[path for path in each if path.name not in _OF_MANY] for each in paths]
    return [own[-1] for own in around if own]


def _is_of_system(path: Path) -> bool:
    return any(path.is_relative_to(top) for top in SYSTEM)


def require_narrow(folder: Path, private: Path) -> None:
    """Raise `InputError` when a tool folder contains the folder `private`, or the user's home."""
    for inside in (private, Path.home()):
        if inside.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the tool folder {folder} contains {inside}: name the folders of the tools"
                " themselves"
            )


def _links(path: Path) -> Iterator[Path]:
    """Yield a path and those that it leads to, link by link."""
    for _ in range(40):  # as many as the kernel follows
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / path.readlink()))


def _installation(file: Path) -> list[Path]:
    """Return the smallest known installation of a program: its own entries, as the folder around
    may be a project's."""
    parts, prefix = file.parts, file.parent.parent
    if file.parent.name == "bin" and (prefix / "pyvenv.cfg").is_file():
        return [*_entries(prefix, _ENVIRONMENT), *_base_python(prefix / "pyvenv.cfg")]
    if _is_of_system(file):
        return []
    if "node_modules" in parts:
        return [Path(*parts[: parts.index("node_modules") + 1])]
    if parts[1] == "nix" and len(parts) > 4:  # /nix/store/NAME
        return [Path(*parts[:3])]
    if file.parent.name == "shims" and _entries(prefix, ("versions", "installs")):
        return _entries(prefix, _SHIMS)
    libraries = _entries(prefix, ("lib/python3*", "lib/node_modules"))
    if file.parent.name != "bin" or not (libraries or parts[1] == "opt"):
        return [file]
    # programs of one user share ~/.local with other things
    personal = prefix == Path.home() or prefix.name == ".local"
    return [file, *libraries] if personal else _entries(prefix, _PREFIX)


def _entries(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [entry for pattern in patterns for entry in folder.glob(pattern)]


def _base_python(settings: Path) -> list[Path]:
    """Return the installation of the Python that a virtual environment was made of."""
    for line in settings.read_text(errors="replace").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            base = Path(value.strip()) / "python3"
            return [
                part
                for file in dict.fromkeys([base, base.resolve()])
                for part in _installation(file)
            ]
    return []


def _interpreter(file: Path) -> list[str]:
    """Return the programs that the first line of a script names."""
    with file.open("rb") as script:
        first = script.read(_SHEBANG_BYTES).split(b"\n")[0].decode(errors="replace")
    if not first.startswith("#!"):
        return []
    words = first[2:].split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[:1]
