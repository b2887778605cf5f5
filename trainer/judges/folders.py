"""Reading and writing folders that an agent had, without following what it left there.

Nothing but regular files is opened: opening a FIFO would wait, opening a device acts.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rolltap.addons.errors import RolltapError
from rolltap.trainer.beneath import FOLDER, NEW_FILE, allow_owner, opened_parent, remove

MAX_ENTRIES = 500_000
"""Files and folders in a workspace."""
MAX_FILE_BYTES = 512 << 20
MAX_DEPTH = 100
MAX_PATH = 4096
"""Characters of a path in a workspace."""
MAX_PATH_BYTES = 64 << 20
"""Characters of all paths in a workspace together."""

_CLOSED_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens a folder also without the right to read it."""
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 20
_MAX_TARGET = 4000
"""Characters of a link's text."""

_Kind = Literal[
    "symlink", "fifo", "socket", "device", "setuid", "git", "cache", "size", "unreadable", "depth"
]
Refusal = _Kind | Literal["protected", "planted", "settings"]
"""Why something is not applied: a symbolic link out of the workspace; what is no file; a setuid or
setgid bit (the file is applied without it); a repository's own files; compiled Python; larger than
`MAX_FILE_BYTES`; no right to read it; deeper than `MAX_DEPTH`, or with a path longer than
`MAX_PATH`; under a path of the tests, or not under the paths that the task names; a program of the
judge's would load it by itself; it would change a runner's settings."""


class TooMuchError(RolltapError):
    """A workspace cannot be judged for what the agent left in it: too much, or what cannot be
    read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or symbolic link. `digest` is a file's SHA-256, empty as long as nobody needs
    it."""

    kind: Literal["file", "folder", "link"]
    executable: bool = False
    size: int = 0
    digest: str = ""
    target: str = ""


@dataclass(slots=True)
class Tree:
    """Content of a folder by relative path, and what of it cannot be applied elsewhere, with the
    reason."""

    entries: dict[str, Entry] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    path_bytes: int = field(default=0, compare=False)
    rights: int = field(default=0, compare=False)

    @property
    def files(self) -> list[str]:
        """Paths of files and links."""
        return [path for path, entry in self.entries.items() if entry.kind != "folder"]


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a relative path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def scan(root: Path, rights: int = 0) -> Tree:
    """Return what is in a folder, without the digests of its files: no file is opened.

    A folder that is not there, or is a symbolic link, is empty. Folders get the owner's `rights`
    first, where that is possible: an agent can close its own. What stays closed is refused.

    Raises `TooMuchError` for more than `MAX_ENTRIES` or `MAX_PATH_BYTES` and a folder that stays
    closed, and `OSError`.
    """
    tree = Tree(rights=rights)
    if root.is_symlink() or not root.is_dir():
        return tree
    try:
        folder = _open_folder(root, rights)
    except PermissionError as error:
        raise TooMuchError("the workspace is closed to the user who judges it") from error
    _scan_folder(folder, "", 0, tree)
    return tree


def open_to_owner(folder: Path) -> None:
    """Give this user all rights on a folder of its own, if it is there. Follows no link, and raises
    nothing."""
    with contextlib.suppress(OSError):
        os.close(_open_folder(folder, stat.S_IRWXU))


def _open_folder(folder: Path | str, rights: int, parent: int | None = None) -> int:
    """Open a folder for reading. It gets the owner's rights first. Raises `OSError`."""
    here = os.open(folder, _CLOSED_FOLDER, dir_fd=parent)
    try:
        allow_owner(here, rights)
        return os.open(".", FOLDER, dir_fd=here)
    finally:
        os.close(here)


def _scan_folder(
    folder: int,
    prefix: str,
    depth: int,
    tree: Tree,
) -> None:
    """Read the folder `folder`, a descriptor, which this closes."""
    try:
        for name in _names(folder, prefix, tree):
            path = prefix + name
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if (reason := _refusal(path, name, status, depth)) is not None:
                    tree.refused[path] = reason
                elif stat.S_ISDIR(status.st_mode):
                    below = _open_folder(name, tree.rights, folder)
                    tree.entries[path] = Entry("folder")
                    _scan_folder(below, path + "/", depth + 1, tree)
                elif stat.S_ISLNK(status.st_mode):
                    target = os.readlink(name, dir_fd=folder)
                    if stays_inside(target, depth):
                        tree.entries[path] = Entry("link", target=target)
                    else:
                        tree.refused[path] = "symlink"
                else:
                    if status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                        tree.refused[path] = "setuid"
                    if status.st_size > MAX_FILE_BYTES:
                        tree.refused[path] = "size"
                    tree.entries[path] = Entry(
                        "file", bool(status.st_mode & stat.S_IXUSR), status.st_size
                    )
            except PermissionError:
                tree.refused[path] = "unreadable"
    finally:
        os.close(folder)


def _names(folder: int, prefix: str, tree: Tree) -> list[str]:
    """Return the sorted names in a folder, and count them. Raises `TooMuchError` before there are
    too many."""
    names = []
    with os.scandir(folder) as found:
        for entry in found:
            names.append(entry.name)
            tree.path_bytes += len(prefix) + len(entry.name)
            if len(tree.entries) + len(tree.refused) + len(names) > MAX_ENTRIES:
                raise TooMuchError(f"the workspace has more than {MAX_ENTRIES} files and folders")
            if tree.path_bytes > MAX_PATH_BYTES:
                raise TooMuchError(
                    f"the paths in the workspace have more than {MAX_PATH_BYTES >> 20} MiB"
                )
    return sorted(names)


def file_digest(root: Path, path: str, rights: int = 0) -> str:
    """Return the SHA-256 of a regular file below `root`. It gets the owner's `rights` first. Raises
    `OSError`."""
    digest = hashlib.sha256()
    for chunk in read_chunks(root, path, rights):
        digest.update(chunk)
    return digest.hexdigest()


def _refusal(
    path: str,
    name: str,
    status: os.stat_result,
    depth: int,
) -> Refusal | None:
    if name.lower() == ".git":
        return "git"
    if name == "__pycache__" or name.endswith((".pyc", ".pyo")):
        return "cache"
    if depth > MAX_DEPTH or len(path) > MAX_PATH:
        return "depth"
    match stat.S_IFMT(status.st_mode):
        case stat.S_IFREG | stat.S_IFDIR | stat.S_IFLNK:
            return None
        case stat.S_IFIFO:
            return "fifo"
        case stat.S_IFSOCK:
            return "socket"
    return "device"


def stays_inside(target: str, depth: int) -> bool:
    """Return True if a symbolic link in a folder `depth` levels below the workspace cannot lead out
    of it.

    A `..` after a name is refused: the name may be a link itself, so that `..` is the folder above
    the link's target.
    """
    if target.startswith("/") or not target or len(target) > _MAX_TARGET:
        return False
    parts = target.split("/")
    while parts and parts[0] == "..":
        parts.pop(0)
        depth -= 1
    return depth >= 0 and ".." not in parts and ".git" not in map(str.lower, parts)


def read_chunks(root: Path, path: str, rights: int = 0) -> Iterator[bytes]:
    """Yield the content of a regular file below `root`. It gets the owner's `rights` first. Raises
    `OSError`."""
    with opened_parent(root, path) as (folder, name):
        if rights:
            closed = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                if stat.S_ISREG(os.fstat(closed).st_mode):
                    allow_owner(closed, rights & stat.S_IRUSR)
            finally:
                os.close(closed)
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


def read_file(root: Path, path: str, limit: int) -> bytes | None:
    """Return a regular file's content below `root`, None if there is none. At most `limit` + 1
    bytes are returned."""
    content = b""
    try:
        for chunk in read_chunks(root, path):
            content += chunk
            if len(content) > limit:
                break
    except OSError:
        return None
    return content[: limit + 1]


def write_file(
    root: Path,
    path: str,
    chunks: Iterable[bytes],
    *,
    executable: bool,
) -> str:
    """Write a file below `root` in place of what stands there, and return its SHA-256. Raises
    `OSError`."""
    digest = hashlib.sha256()
    mode = 0o755 if executable else 0o644
    with opened_parent(root, path, create=True) as (folder, name):
        remove(folder, name)
        with os.fdopen(os.open(name, NEW_FILE, mode, dir_fd=folder), "wb") as output:
            for chunk in chunks:
                digest.update(chunk)
                output.write(chunk)
            os.fchmod(output.fileno(), mode)
    return digest.hexdigest()
