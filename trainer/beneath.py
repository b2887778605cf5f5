"""Files and folders beneath a folder that an agent, or another machine, could fill.

Every part of a path is opened relative to its folder, and without following symbolic links. With
the standard library only, because the far side of a box needs it.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rolltap.trainer.folders import remove_folder

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened_parent(
    root: str | os.PathLike[str], path: str, *, create: bool = False
) -> Iterator[tuple[int, str]]:
    """Open the folder of `path` beneath `root`, as `opened`, and yield its descriptor and the name
    in it."""
    parent, _, name = path.rpartition("/")
    with opened(root, parent, create=create) as folder:
        yield folder, name


@contextlib.contextmanager
def opened(root: str | os.PathLike[str], path: str = "", *, create: bool = False) -> Iterator[int]:
    """Open the folder `path` beneath `root`, and yield its descriptor.

    With `create`, folders that are missing are made, what stands in their place is removed, and the
    owner gets all rights on them. Raises `OSError`.
    """
    folder = os.open(root, FOLDER)
    try:
        for part in filter(None, path.split("/")):
            if create:
                allow_owner(folder, stat.S_IRWXU)  # a start may have folders that are read-only
                make_folder(folder, part)
            below = os.open(part, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        if create:
            allow_owner(folder, stat.S_IRWXU)
        yield folder
    finally:
        os.close(folder)


def allow_owner(descriptor: int, rights: int) -> None:
    """Give the owner rights on what a descriptor names, if this user is the owner."""
    mode = os.fstat(descriptor).st_mode
    if mode & rights != rights:
        with contextlib.suppress(OSError):  # another user's
            os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IMODE(mode) | rights)


def make_folder(parent: int, name: str) -> None:
    """Make a folder, in place of what is no folder. Raises `OSError`."""
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o755, dir_fd=parent)


def remove(parent: int, name: str) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there. Raises `OSError`.

    A folder that cannot be removed stays.
    """
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            remove_folder(Path(f"/proc/{os.getpid()}/fd/{parent}/{name}"))
        else:
            os.unlink(name, dir_fd=parent)
