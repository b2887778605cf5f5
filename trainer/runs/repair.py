"""The repairs that are safe: cutting off what was never a commit, and removing what dead processes left behind."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.staging import locked

_HIDDEN = re.compile(r"\.(?:(?:calls|sessions|events)-.*\.arrow|(?:run|policy)\.json)\.(?P<process>\d+)")
"""See `rolltap.addons.store.staging.hidden_name`."""


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file, as all do on what they write."""
    with locked(path) as descriptor:
        return descriptor is None


def find_leftovers(run: Path) -> Iterator[tuple[Path, bool]]:
    """Hidden files of a run that were meant to get another name; and whether a process still works on them.

    A process of that number on this machine counts: it may be about to lock its file.
    """
    for path in sorted(run.iterdir()):
        if match := _HIDDEN.fullmatch(path.name):
            yield path, _is_alive(int(match["process"])) or is_held(path)


def remove_leftovers(run: Path) -> Iterator[str]:
    """Remove the hidden files that nobody works on; says what was done."""
    for path, held in list(find_leftovers(run)):
        if not held:
            path.unlink()
            yield f"{path.name}: removed, it was left behind by a process that was killed"


def cut_end(path: Path, schema: pa.Schema) -> Iterator[str]:
    """Cut off the end of a segment that was never a whole commit, unless somebody writes it; says what was done."""
    with locked(path, os.O_RDWR) as descriptor:
        if descriptor is None:
            return
        with SegmentReader(path, schema) as reader:
            for _ in reader:
                pass
        if reader.uncommitted:
            os.ftruncate(descriptor, path.stat().st_size - reader.uncommitted)
            os.fsync(descriptor)
            yield f"{path.name}: the last {reader.uncommitted} bytes were cut off, a commit that was not completed"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
