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


def require_narrow(folder: Path, private: Path) -> None:
    """Raise `InputError` when a tool folder contains the folder `private`, or the user's home."""
    for inside in (private, Path.home()):
        if inside.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the tool folder {folder} contains {inside}: name the folders of the tools"
                " themselves"
            )
