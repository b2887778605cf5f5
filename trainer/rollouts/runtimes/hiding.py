"""Files and folders of this machine that no box shows, also where a tool folder contains them."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from rolltap.trainer.rollouts.runtimes.runtime import Runtime
from rolltap.trainer.rollouts.tasks.task import Task

_ROW = re.compile(r"(:|, )[^/]*$")
"""The place in a file at the end of a task's `source`."""


@runtime_checkable
class HidingRuntime(Runtime, Protocol):
    """A runtime whose boxes show tool folders of this machine, and hide what is in them."""

    def hide(self, paths: Iterable[Path]) -> None:
        """Hide files and folders in the boxes that are made from now on, besides those that are hidden already."""


def covered(hidden: Iterable[Path], tools: Sequence[Path]) -> list[Path]:
    """Return where hidden files and folders are below tool folders, as a box sees them.

    A tool folder inside of a hidden one is not hidden: a program needs it. Paths that do not exist are left out.
    """
    found: list[Path] = []
    for tool in tools:
        place = tool.resolve()
        for path in hidden:
            real = path.resolve()
            if real.exists() and real.is_relative_to(place):
                found.append(tool / real.relative_to(place))
    return list(dict.fromkeys(found))


def private_paths(run: Path, work: Path, tasks: Iterable[Task]) -> list[Path]:
    """Return what sessions must not see: the run folder, the folder that the rollout works in, and the tasks' files.

    These are all paths that a task names, and the file or folder that its `source` names. An image is none of them: its
    sessions see it.
    """
    found = [run, work]
    for task in tasks:
        found += _paths(task.model_dump(exclude={"image"}))
        found.append(Path(_ROW.sub("", task.source)))
    return [path for path in dict.fromkeys(map(Path.absolute, found)) if path.exists()]


def _paths(value: object) -> list[Path]:
    if isinstance(value, Path):
        return [value]
    if isinstance(value, dict):
        return [path for part in value.values() for path in _paths(part)]
    if isinstance(value, list | tuple):
        return [path for part in value for path in _paths(part)]
    return []
