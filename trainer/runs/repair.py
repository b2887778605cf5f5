"""Repairs: cut off an uncommitted tail and keep it beside its file, and remove temporary files of dead processes."""

import errno
import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa

from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.staging import locked, new_file

_HIDDEN = re.compile(r"\.(?:(?:calls|sessions|events)-.*\.arrow(?:\.cut-\d+)?|(?:run|policy)\.json)\.(?P<process>\d+)")
"""See `rolltap.addons.store.staging.hidden_name`."""

_PIECE_BYTES = 1024 * 1024


def is_held(path: Path) -> bool:
    """Return True when a process holds the lock of a file. Writers hold the lock of the file that they write."""
    with locked(path) as descriptor:
        return descriptor is None


def find_leftovers(run: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the temporary files of a run, each with True when a process may still use it.

    That is so when the file is locked, and when a process with the pid in its name is alive on this machine: it may be
    about to lock the file.
    """
    for path in sorted(run.iterdir()):
        if match := _HIDDEN.fullmatch(path.name):
            yield path, _is_alive(int(match["process"])) or is_held(path)


def remove_leftovers(run: Path) -> Iterator[str]:
    """Remove temporary files that no process uses. Yield a sentence for each."""
    for path, held in list(find_leftovers(run)):
        if not held:
            path.unlink()
            yield f"{path.name}: removed, a temporary file of a killed process"


def cut_end(path: Path, schema: pa.Schema) -> Iterator[str]:
    """Truncate the uncommitted tail of a segment, and yield a sentence. A locked segment is left as it is.

    The tail is kept in a file beside the segment (`kept_cuts`), unless it holds nothing but zeros.
    """
    with locked(path, os.O_RDWR) as descriptor:
        if descriptor is None:
            return
        with SegmentReader(path, schema) as reader:
            for _ in reader:
                pass
        if reader.uncommitted:
            end = os.fstat(descriptor).st_size
            size = end - reader.uncommitted
            kept = _keep(path, descriptor, size, end)
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            where = f", and are in {kept.name}" if kept else ""
            yield f"{path.name}: the last {reader.uncommitted} bytes were truncated: not a committed message{where}"


def kept_cuts(run: Path) -> list[Path]:
    """Return the files with what repairs cut off. Appending one to its segment undoes the cut."""
    return sorted(run.glob("[!.]*.arrow.cut-*"))


def _keep(path: Path, descriptor: int, start: int, end: int) -> Path | None:
    """Write a tail to a new file, which is on the disk when this returns. Returns None for a tail of zeros.

    A file that has the same bytes is that of a repair which was killed before it truncated.
    """
    if not any(any(piece) for piece in _pieces(descriptor, start, end)):
        return None
    for number in count(1):
        kept = path.with_name(f"{path.name}.cut-{number}")
        if not kept.exists():
            break
        if kept.stat().st_size == end - start and _is_copy(kept, _pieces(descriptor, start, end)):
            return kept
    with new_file(kept, "wb") as file:
        for piece in _pieces(descriptor, start, end):
            file.write(piece)
    return kept


def _pieces(descriptor: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file between two offsets. Raises `OSError` when the file has fewer."""
    while start < end:
        piece = os.pread(descriptor, min(end - start, _PIECE_BYTES), start)
        if not piece:
            raise OSError(errno.EIO, f"{end - start} bytes less than its size can be read")
        start += len(piece)
        yield piece


def _is_copy(path: Path, pieces: Iterator[bytes]) -> bool:
    with path.open("rb") as file:
        return all(file.read(len(piece)) == piece for piece in pieces)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
