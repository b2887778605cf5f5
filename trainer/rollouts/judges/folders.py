"""Reading and writing folders that an agent had, without following what it left there.

Every part of a path is opened relative to its folder and without following symbolic links. Nothing but regular files
is opened: opening a FIFO would wait, opening a device acts.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rolltap.addons.errors import RolltapError

MAX_ENTRIES = 500_000
"""Files and folders in a workspace."""
MAX_FILE_BYTES = 512 << 20
MAX_DEPTH = 100

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 20

Refusal = Literal[
    "symlink",
    "fifo",
    "socket",
    "device",
    "setuid",
    "git",
    "cache",
    "size",
    "unreadable",
    "depth",
    "protected",
    "planted",
    "settings",
]
"""Why something is not applied: a symbolic link out of the workspace; what is no file; a setuid or setgid bit (the file
is applied without it); a repository's own files; compiled Python; larger than `MAX_FILE_BYTES`; no right to
read it; deeper than `MAX_DEPTH`; under a path of the tests, or not under the paths that the task names; it would run in
the judge's pytest; it would change pytest's settings."""


class TooMuchError(RolltapError):
    """A workspace has more than can be judged."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or symbolic link. `digest` is a file's SHA-256, empty if it is larger than `MAX_FILE_BYTES`."""

    kind: Literal["file", "folder", "link"]
    executable: bool = False
    size: int = 0
    digest: str = ""
    target: str = ""


@dataclass(slots=True)
class Tree:
    """Content of a folder by relative path, and what of it cannot be applied elsewhere, with the reason."""

    entries: dict[str, Entry] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)


def scan(root: Path) -> Tree:
    """Return what is in a folder. A folder that is not there, or is a symbolic link, is empty.

    Raises `TooMuchError` for more than `MAX_ENTRIES`, and `OSError`.
    """
    tree = Tree()
    try:
        top = os.open(root, _FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return tree
    except OSError as error:
        if root.is_symlink():
            return tree
        raise error
    _scan_folder(top, "", 0, tree)
    return tree


def _scan_folder(folder: int, prefix: str, depth: int, tree: Tree) -> None:
    """Read the folder `folder`, a descriptor, which this closes."""
    try:
        with os.scandir(folder) as found:
            names = sorted(entry.name for entry in found)
        if len(tree.entries) + len(tree.refused) + len(names) > MAX_ENTRIES:
            raise TooMuchError(f"there are more than {MAX_ENTRIES} files and folders in the workspace")
        for name in names:
            path = prefix + name
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if (reason := _refusal(name, status, depth)) is not None:
                tree.refused[path] = reason
            elif stat.S_ISDIR(status.st_mode):
                try:
                    below = os.open(name, _FOLDER, dir_fd=folder)
                except PermissionError:
                    tree.refused[path] = "unreadable"
                    continue
                tree.entries[path] = Entry("folder")
                _scan_folder(below, path + "/", depth + 1, tree)
            elif stat.S_ISLNK(status.st_mode):
                target = os.readlink(name, dir_fd=folder)
                if stays_inside(target, depth):
                    tree.entries[path] = Entry("link", target=target)
                else:
                    tree.refused[path] = "symlink"
            else:
                _scan_file(folder, name, path, status, tree)
    finally:
        os.close(folder)


def _scan_file(folder: int, name: str, path: str, status: os.stat_result, tree: Tree) -> None:
    executable, size = bool(status.st_mode & stat.S_IXUSR), status.st_size
    if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
        tree.refused[path] = "setuid"
    if size > MAX_FILE_BYTES:
        tree.refused[path] = "size"
        tree.entries[path] = Entry("file", executable, size)
        return
    try:
        digest = hashlib.sha256()
        for chunk in read_chunks(folder, name):
            digest.update(chunk)
    except PermissionError:
        tree.refused[path] = "unreadable"
        return
    tree.entries[path] = Entry("file", executable, size, digest.hexdigest())


def _refusal(name: str, status: os.stat_result, depth: int) -> Refusal | None:
    if name.lower() == ".git":
        return "git"
    if name == "__pycache__" or name.endswith((".pyc", ".pyo")):
        return "cache"
    if depth > MAX_DEPTH:
        return "depth"
    mode = status.st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
        return None
    return "fifo" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


def stays_inside(target: str, depth: int) -> bool:
    """Return True if a symbolic link in a folder `depth` levels below the workspace cannot lead out of it.

    A `..` after a name is refused: the name may be a link itself, so that `..` is the folder above the link's target.
    """
    parts = target.split("/")
    if target.startswith("/") or not target or len(target) > 4000:
        return False
    ups = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    return ups <= depth and ".." not in parts[ups:] and not any(part.lower() == ".git" for part in parts)


def read_chunks(folder: int, name: str) -> Iterator[bytes]:
    """Yield the content of a regular file of the folder `folder`, a descriptor. Raises `OSError`."""
    file = os.open(name, _FILE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{name} is not a regular file")
        left = MAX_FILE_BYTES
        while left > 0 and (chunk := os.read(file, min(_CHUNK, left))):
            left -= len(chunk)
            yield chunk
    finally:
        os.close(file)


@contextlib.contextmanager
def opened(root: Path, path: str = "", *, create: bool = False) -> Iterator[int]:
    """Open the folder `path` below `root`, and yield its descriptor.

    With `create`, folders that are missing are made, and what stands in their place is removed. Raises `OSError`.
    """
    folder = os.open(root, _FOLDER)
    try:
        for part in filter(None, path.split("/")):
            if create:
                _make_folder(folder, part)
            below = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _make_folder(folder: int, name: str) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            os.mkdir(name, 0o755, dir_fd=folder)


def read_file(root: Path, path: str, limit: int) -> bytes | None:
    """Return a regular file's content below `root`, None if there is none. At most `limit` + 1 bytes are read."""
    parent, _, name = path.rpartition("/")
    try:
        with opened(root, parent) as folder:
            content = b""
            for chunk in read_chunks(folder, name):
                content += chunk
                if len(content) > limit:
                    break
    except OSError:
        return None
    return content[: limit + 1]


def write_file(root: Path, path: str, chunks: Iterator[bytes], *, executable: bool) -> str:
    """Write a file below `root` in place of what stands there, and return its SHA-256. Raises `OSError`."""
    parent, _, name = path.rpartition("/")
    digest = hashlib.sha256()
    with opened(root, parent, create=True) as folder:
        remove(folder, name)
        mode = 0o755 if executable else 0o644
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
        with os.fdopen(file, "wb") as output:
            for chunk in chunks:
                digest.update(chunk)
                output.write(chunk)
            os.fchmod(output.fileno(), mode)
    return digest.hexdigest()


def remove(folder: int, name: str) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
