"""The repairs that are safe: cutting off what was never a commit, and removing what dead processes left behind."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from rolltap.addons.store.staging import COMPLETE, STAGING, clean
from rolltap.trainer.runs.segment_tail import find_tail

_HIDDEN = re.compile(r"\.(?:(?:calls|sessions|events)-.*\.arrow|run\.json)\.(?P<process>\d+)")
"""See `rolltap.addons.store.segment.hidden_name`."""


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file or folder, as all do on what they write."""
    with _lock(path, os.O_RDONLY) as descriptor:
        return descriptor is None


def find_leftovers(run: Path) -> Iterator[tuple[Path, bool]]:
    """Hidden files and folders of a run that were meant to get another name; and whether a process still works on them.

    A process of that number on this machine counts: it may be about to lock its file.
    """
    staging = run / STAGING
    staged = staging.exists() and is_held(staging)
    for path in sorted(run.iterdir()):
        if path.name in (STAGING, COMPLETE):
            yield path, staged
        elif match := _HIDDEN.fullmatch(path.name):
            yield path, _is_alive(int(match["process"])) or is_held(path)


def remove_leftovers(run: Path) -> list[str]:
    """Remove leftovers that nobody works on, and move complete files into place; returns what was done."""
    done = []
    for path, held in list(find_leftovers(run)):
        if held:
            continue
        if path.name == COMPLETE:
            done.append(f"{path.name}: its files were moved into the run")
        else:
            done.append(f"{path.name}: removed, it was left behind by a process that was killed")
        if path.name in (STAGING, COMPLETE):
            clean(run)
        else:
            path.unlink()
    return done


def cut_tail(path: Path, schema: pa.Schema) -> str | None:
    """Cut off the tail of a segment if that is safe and nobody writes it; returns what was done."""
    with _lock(path, os.O_RDWR) as descriptor:
        if descriptor is None or not os.path.samestat(os.fstat(descriptor), path.stat()):
            return None
        tail = find_tail(path, schema)
        if tail is None or tail.kind == "unknown":
            return None
        if tail.kind == "headless":
            path.unlink()
            return f"{path.name}: removed, it had lost all but {tail.size} bytes"
        os.ftruncate(descriptor, tail.start)
        os.fsync(descriptor)
    return f"{path.name}: the last {tail.size} bytes, from byte {tail.start} on, were cut off"


@contextmanager
def _lock(path: Path, mode: int) -> Iterator[int | None]:
    """Holds the lock; None if another process does."""
    descriptor = os.open(path, mode)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
