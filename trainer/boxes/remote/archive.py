"""Folders as tar streams, for boxes that are on another machine. With the standard library only.

An archive that comes from such a machine may be hostile: only files, folders and links are written,
and only beneath the folder. The filters of `tarfile` are not enough for this (CVE-2025-4517).
"""

import filecmp
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import IO, NamedTuple, Self, cast

from rolltap.trainer.beneath import NEW_FILE, make_folder, opened_parent, remove

MAX_ENTRIES = 1_000_000
"""Files, folders and links of one folder. A judge takes fewer."""
_MAX_PATH = 4000
_MAX_DEPTH = 110
"""Bytes of a path, and names in it. What lies deeper is left out: a judge would refuse it."""
_MAX_NAME = 255
"""Bytes of a name in a folder."""
_HEADER_BYTES = 1 << 20
"""Most bytes between the files of an archive: `tarfile` keeps them in memory."""
_BLOCK = 512
_CHUNK = 1 << 20
_PATH = str | os.PathLike[str]


class Stamp(NamedTuple):
    """Differs after a change: a program without rights cannot set a ctime."""

    inode: int
    size: int
    ctime_ns: int
    mode: int


class TooMuchError(Exception):
    """A folder has more than may be taken to another machine."""


def pack(file: IO[bytes], parts: Mapping[str, _PATH]) -> None:
    """Write files and folders into a tar stream, each under its name, with all that is in it.

    A link that is a part is followed, one in a part is not. What is no file, folder or link is left
    out. Raises `OSError`.
    """
    with _new_tar(file) as tar:
        for name, source in parts.items():
            top = os.path.realpath(source)
            _add(tar, top, name.strip("/"))
            if os.path.isdir(top):
                for path in _walk(top):
                    _add(tar, f"{top}/{path}", f"{name.strip('/')}/{path}")


def stamps(folder: _PATH) -> dict[str, Stamp]:
    """Return the stamps of what is in a folder by path. Raises `TooMuchError` and `OSError`."""
    found: dict[str, Stamp] = {}
    for path in _walk(os.fspath(folder)):
        status = os.lstat(f"{folder}/{path}")
        found[path] = Stamp(status.st_ino, status.st_size, status.st_ctime_ns, status.st_mode)
        if len(found) > MAX_ENTRIES:
            raise TooMuchError(f"there are more than {MAX_ENTRIES} files and folders")
    return found


def pack_changes(
    file: IO[bytes],
    folder: _PATH,
    before: Mapping[str, Stamp],
    limit: int,
) -> list[str]:
    """Write what was made or changed since `before` into a tar stream. Return what is gone.

    Raises `TooMuchError` for more than `limit` bytes, and `OSError`.
    """
    now = stamps(folder)
    left = limit
    with _new_tar(file) as tar:
        for path, stamp in now.items():
            old = before.get(path)
            if old == stamp:
                continue
            if old is not None and old.mode == stamp.mode and stat.S_ISDIR(stamp.mode):
                continue  # its time changes with what is in it, which is told by itself
            left -= _BLOCK
            if stat.S_ISREG(stamp.mode):
                left -= stamp.size
            if left < 0:
                raise TooMuchError(f"more than {limit} bytes were changed")
            _add(tar, f"{folder}/{path}", path)
    return [path for path in before if path not in now]


class _Room:
    """A file of which only so much can be read as there is room for."""

    def __init__(self, file: IO[bytes]) -> None:
        self.left = _HEADER_BYTES
        self._file = file

    def read(self, size: int) -> bytes:
        """Read from the file. Raises `tarfile.ReadError` without room."""
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError("a header is too long")
        return self._file.read(size)


class _Member(tarfile.TarInfo):
    """A member of an archive whose damage is no end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return what a header says. Raises `tarfile.ReadError` for a damaged one."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == _BLOCK and not any(buf):  # the end
                raise
            raise tarfile.ReadError(str(error)) from error


def unpack(file: IO[bytes], folder: _PATH, limit: int) -> bool:
    """Write what is in a tar stream into a folder, in place of what is there.

    Return False if something was left out: what comes after `limit` bytes or `MAX_ENTRIES`, a path
    that leads out of the folder or is none, what is no file, folder or link, and what follows a
    damaged part. Raises `OSError` for a fault of this machine.
    """
    room = _Room(file)
    try:
        with tarfile.open(fileobj=cast(IO[bytes], room), mode="r|", tarinfo=_Member) as tar:
            return _unpack(tar, room, folder, limit)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError):
        # `tarfile` checks few of the numbers in headers, and reads headers of headers by recursion
        return False


def _unpack(
    tar: tarfile.TarFile,
    room: _Room,
    folder: _PATH,
    limit: int,
) -> bool:
    whole = True
    left = limit
    number = 0
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # they would stay in memory
        number += 1
        left -= _BLOCK + member.size
        if left < 0 or member.size < 0 or member.issparse() or number > MAX_ENTRIES:
            return False
        room.left = member.size + _HEADER_BYTES
        path = member.name.removeprefix("./")
        if path == "." or _is_deep(path):
            continue
        path = _beneath(path)
        is_kept = member.isreg() or member.isdir()
        if member.issym():
            is_kept = _is_link(member.linkname)
        if not path or not is_kept:
            whole = False
            continue
        with opened_parent(folder, path, create=True) as (parent, name):
            _write(parent, name, member, tar)
    return whole


def delete(folder: _PATH, paths: Iterable[str]) -> None:
    """Delete paths below a folder, as far as they are there. Follows no links. Raises `OSError`."""
    for path in paths:
        inside = _beneath(path)
        if not inside:
            continue
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            opened_parent(folder, inside) as (parent, name),
        ):
            remove(parent, name)


def take_changes(new: Path, folder: Path) -> None:
    """Make a folder what another one is, and touch nothing in it that is the same.

    The other one is used up. Nobody else may write to them meanwhile. Raises `TooMuchError` and
    `OSError`.
    """
    wanted = stamps(new)
    for path, stamp in wanted.items():  # folders before what is in them
        source = new / path
        target = folder / path
        if stat.S_ISDIR(stamp.mode):
            if target.is_symlink() or not target.is_dir():
                delete(folder, [path])
                target.mkdir()
            target.chmod(stat.S_IMODE(stamp.mode))
        elif not _is_same(source, target):
            delete(folder, [path])
            shutil.move(source, target)
    delete(folder, stamps(folder).keys() - wanted.keys())


def _is_same(one: Path, other: Path) -> bool:
    if not os.path.lexists(other):
        return False
    if one.lstat().st_mode != other.lstat().st_mode:
        return False
    if one.is_symlink():
        return one.readlink() == other.readlink()
    return filecmp.cmp(one, other, shallow=False)


def write_pipe(path: _PATH, content: bytes, opened: int) -> None:
    """Open a pipe as often as it was opened elsewhere, and write what was written there.

    Waits until a reader has taken it. Raises `OSError`.
    """
    rest = memoryview(content)
    for _ in range(min(opened, 2)):  # who reads it tells none, one and several
        with open(path, "wb", buffering=0) as pipe:
            while rest:
                rest = rest[pipe.write(rest) :]


def _walk(folder: str) -> Iterator[str]:
    """Yield the relative paths of all that is in a folder, each folder before what is in it."""
    left = _entries(folder, "")
    while left:
        path, is_folder = left.pop()
        yield path
        if is_folder:
            left += _entries(folder, f"{path}/")


def _entries(folder: str, prefix: str) -> list[tuple[str, bool]]:
    """Return the paths of what is in a folder below `folder`, the last one first, and which are
    folders."""
    place = f"{folder}/{prefix}"
    _allow(place, stat.S_IRWXU)
    with os.scandir(place) as entries:
        found = list(islice(entries, MAX_ENTRIES + 1))
    found.sort(key=attrgetter("name"), reverse=True)
    paths = []
    for entry in found:
        path = prefix + entry.name
        if not _is_deep(path) and len(os.fsencode(f"{folder}/{path}")) <= _MAX_PATH:
            paths.append((path, entry.is_dir(follow_symlinks=False)))
    return paths


def _allow(path: str, rights: int) -> None:
    """Give the owner rights on a file or folder, which a program may have taken."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & rights != rights:
        with suppress(PermissionError):  # another user's
            os.chmod(path, mode | rights)


def _new_tar(file: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT)


def _add(tar: tarfile.TarFile, source: str, name: str) -> None:
    status = os.lstat(source)
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(status.st_mode)
    member.mtime = status.st_mtime
    if stat.S_ISREG(status.st_mode):
        _allow(source, stat.S_IRUSR)
        member.size = status.st_size
        with open(source, "rb") as content:
            tar.addfile(member, content)
    elif stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(source)
        tar.addfile(member)


def _is_deep(path: str) -> bool:
    """Return True for a path that is left out."""
    return len(path) > _MAX_PATH or path.rstrip("/").count("/") >= _MAX_DEPTH


def _beneath(path: str) -> str:
    """Return a relative path without a separator at its end; "" if it may lead out of its folder,
    or is none."""
    path = path.rstrip("/")
    if not _is_link(path):
        return ""
    for part in path.split("/"):
        if part in ("", ".", "..") or len(os.fsencode(part)) > _MAX_NAME:
            return ""
    return path


def _is_link(path: str) -> bool:
    """Return True if a path can be that of a link: it has some bytes, not too many, and no NUL."""
    try:
        return "\0" not in path and 0 < len(os.fsencode(path)) <= _MAX_PATH
    except UnicodeEncodeError:
        return False


def _write(
    parent: int,
    name: str,
    member: tarfile.TarInfo,
    tar: tarfile.TarFile,
) -> None:
    mode = member.mode & 0o777
    if member.isdir():
        make_folder(parent, name)
        os.chmod(name, mode | stat.S_IRWXU, dir_fd=parent)
        return
    remove(parent, name)
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=parent)
        return
    content = tar.extractfile(member)
    assert content is not None
    descriptor = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, _CHUNK)
        file.flush()
        os.fchmod(file.fileno(), mode | stat.S_IRUSR)
        # a time that no file system has
        with suppress(ValueError, OverflowError, OSError):
            nanoseconds = int(member.mtime * 1e9)
            os.utime(file.fileno(), ns=(nanoseconds, nanoseconds))
