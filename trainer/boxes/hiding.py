"""The files of this machine that a box shows, and those that it hides in them."""

import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rolltap.addons.errors import InputError
from rolltap.trainer.tasks.task import Task

_ROW = re.compile(r"(:|, )[^/]*$")
"""The place in a file at the end of a task's `source`."""


class HidingRuntime:
    """A runtime whose boxes show `tools`, folders of this machine, and hide files and folders in
    all that they show."""

    programs_here = True

    def __init__(self, tools: Iterable[Path] = ()) -> None:
        self.tools = [Path(os.path.abspath(tool)) for tool in tools]
        self.programs: set[str] = set()
        """Programs of the operator's, by name or path: a sandbox shows what they need."""
        self._hidden: list[str] = []
        """Sorted, without links, each with a separator at its end."""

    def hide(self, paths: Iterable[Path]) -> None:
        """Hide files and folders, which may not exist yet, in boxes that are made from now on.
        Earlier ones stay so."""
        hidden = set(self._hidden)
        for path in paths:
            hidden.add(_with_separator(path))
        self._hidden = sorted(hidden)

    def show(self, program: str, files: Iterable[Path] = ()) -> None:
        """See `Runtime.show`. A sandbox shows no folder that nobody named."""
        self.programs.add(program)
        for file in files:
            if file not in self.tools:
                self.tools.append(file)

    def hidden_in(self, tools: Iterable[Path]) -> list[Path]:
        """Return where hidden files and folders are below tool folders, as a box sees them, if they
        exist."""
        found: dict[Path, None] = {}
        for tool in tools:
            place = _with_separator(tool)
            index = bisect_left(self._hidden, place)
            while index < len(self._hidden):
                hidden = self._hidden[index]
                index += 1
                if not hidden.startswith(place):
                    break
                if Path(hidden).exists():  # a path without the separator: it may be a file
                    found[tool / hidden.removeprefix(place)] = None
        return list(found)

    def layers(self, command: Sequence[str] = ()) -> dict[Path, bool]:
        """Return what a box with `command` shows and hides of this machine: see `layered`.

        Raises `InputError` when what it needs would be hidden, and for a tool folder that contains
        the user's home.
        """
        for tool in self.tools:
            require_narrow(tool, Path.home())
        return layered(self.tools, self.hidden_in(self.tools))


def _with_separator(path: Path) -> str:
    return os.path.join(path.resolve(), "")


def layered(shown: Iterable[Path], hidden: Iterable[Path]) -> dict[Path, bool]:
    """Return the paths that a box has to mount, outer ones first: True for what it shows, False for
    what is empty.

    The path nearest above a file counts, and without one the file is not seen. Raises `InputError`
    for a path that is both shown and hidden.
    """
    wanted = dict.fromkeys(shown, True)
    for path in hidden:
        if wanted.get(path):
            raise InputError(
                f"a session needs {path}, and must not see it, because it belongs to a run, a task"
                " or your home. Either install the program in a folder of its own elsewhere, or let"
                " --tools name only folders that the program needs"
            )
        wanted[path] = False
    layers: dict[Path, bool] = {}
    for path in sorted(wanted):
        is_seen = bool(nearest(path.parent, layers)[1])
        if wanted[path] != is_seen:
            layers[path] = wanted[path]
    return layers


def nearest(path: Path, layers: Mapping[Path, bool]) -> tuple[Path, bool | None]:
    """Return the layer at or above a path, and whether it shows the path; None without a layer."""
    for top in (path, *path.parents):
        if top in layers:
            return top, layers[top]
    return path, None


def private_paths(
    run: Path,
    tasks: Iterable[Task],
    files: Iterable[Path] = (),
    tools: Iterable[Path] = (),
) -> list[Path]:
    """Return what sessions must not see, wherever it lies: runs, tasks, `files`, the home and the
    temporary folder.

    Runs are this one, those beside it, and those in `tools` up to two folders deep. Of a task they
    are all paths that it names, and what its `source` names. An image is none of them: its sessions
    see it.
    """
    # a machine that only has boxes lacks what reads runs
    from rolltap.addons.store.metadata import RUN_FILE

    places = [run.absolute().parent]
    for tool in tools:
        places += [tool, *tool.glob("*/")]
    found = [run]
    for place in places:
        found += [file.parent for file in place.glob(f"*/{RUN_FILE}")]
    found += [*files, Path.home(), Path(tempfile.gettempdir())]
    for task in tasks:
        found += _paths(task.model_dump(exclude={"image"}))
        if task.source:
            found.append(Path(_ROW.sub("", task.source)))
    return list(dict.fromkeys(map(Path.absolute, found)))


def _paths(value: object) -> list[Path]:
    """Return the paths in a value, at every depth."""
    if isinstance(value, Path):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    found = []
    if isinstance(value, list | tuple):
        for part in value:
            found += _paths(part)
    return found


def require_narrow(folder: Path, private: Path) -> None:
    """Raise `InputError` when a tool folder contains the folder `private`, or the user's home."""
    for inside in (private, Path.home()):
        if inside.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the tool folder {folder} contains {inside}: name the folders of the tools"
                " themselves"
            )
