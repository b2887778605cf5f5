"""Digest of a workspace while its program works in it."""

import hashlib
import os
import stat
import time
from pathlib import Path

_IGNORED = {".git", "__pycache__"}
"""Names of what differs between equal workspaces: git's index and compiled Python have times in them."""
_MAX_FILES = 100_000
_MAX_BYTES = 64 << 20
"""Size of a file over which its size stands for its content."""
_SETTLED_SECONDS = 0.1
"""Age of a change after which another one has another time: clocks of file systems tick every few milliseconds."""


class WorkspaceDigest:
    """The digest of a folder: of the names, kinds and contents of its files, whatever their times and owners.

    Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[tuple[int, ...], bytes]] = {}
        """Path -> size, inode and times of a file, and the digest that it had then."""

    def read(self) -> str | None:
        """Return 32 hexadecimal digits, or None for a folder that cannot be read or has over 100,000 files.

        A file is read again only if its size, its inode or its times are others.
        """
        known, self._known = self._known, {}
        digest, number, top = hashlib.blake2b(digest_size=16), 0, str(self._folder)
        try:
            for folder, folders, files in os.walk(top, onerror=_fail):
                folders[:] = sorted({*folders} - _IGNORED)
                for path in (os.path.join(folder, name) for name in sorted({*folders, *files} - _IGNORED)):
                    status = os.lstat(path)
                    kind, executable = stat.S_IFMT(status.st_mode), status.st_mode & stat.S_IXUSR
                    content = self._content(path, status, known)
                    digest.update(repr((path[len(top) :], kind, executable, content)).encode())
                    number += 1
                if number > _MAX_FILES:
                    return None
        except OSError:
            return None
        return digest.hexdigest()

    def _content(self, path: str, status: os.stat_result, known: dict[str, tuple[tuple[int, ...], bytes]]) -> bytes:
        if stat.S_ISLNK(status.st_mode):
            return os.fsencode(os.readlink(path))
        if not stat.S_ISREG(status.st_mode):
            return b""
        if status.st_size > _MAX_BYTES:
            return str(status.st_size).encode()
        seen = status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
        before = known.get(path)
        if before is None or before[0] != seen:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                before = seen, hashlib.blake2b(file.read(_MAX_BYTES)).digest()
        if status.st_ctime < time.time() - _SETTLED_SECONDS:
            self._known[path] = before
        return before[1]


def _fail(error: OSError) -> None:
    raise error
