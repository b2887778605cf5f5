"""Repair of a run folder: it removes what failed and killed writers left, and no row.

Removed are temporary files of dead processes. The uncommitted tail of a file is cut off, and kept
beside it.
"""

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa

from rolltap.addons.store.segment import SegmentReader
from rolltap.addons.store.staging import locked, new_file
from rolltap.addons.store.tables import run_files
from rolltap.trainer.traces.tables import TABLES

_HIDDEN = re.compile(
    rf"\.(?:(?:{'|'.join(TABLES)})-.*\.arrow(?:\.cut-\d+)?|(?:run|policy)\.json)\.(?P<process>\d+)"
)
"""See `rolltap.addons.store.staging.hidden_name`."""


def repair_run(run: Path) -> list[str]:
    """Remove temporary files of dead processes, and truncate uncommitted tails, but not in files
    that a process is writing. Return a sentence for each.

    Commits with a prefix are kept, readable or not. Repairing is idempotent.
    """
    repaired: list[str] = []
    for path, is_used in list(find_leftovers(run)):
        if not is_used:
            path.unlink()
            repaired.append(f"{path.name}: removed, a temporary file of a killed process")
    for table in TABLES:
        for path in run_files(run, table):
            repaired += _cut_end(path, TABLES[table])
    return repaired


def find_leftovers(run: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the temporary files of a run, each with True when a process may still use it.

    That is so when the file is locked, and when a process with the pid in its name is alive on this
    machine: it may be about to lock the file.
    """
    for path in sorted(run.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is not None:
            yield path, _is_alive(int(match["process"])) or is_held(path)


def is_held(path: Path) -> bool:
    """Return True when a process holds the lock of a file. Writers hold the lock of the file that
    they write."""
    with locked(path) as descriptor:
        return descriptor is None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _cut_end(path: Path, schema: pa.Schema) -> Iterator[str]:
    """Truncate the uncommitted tail of a file, and yield a sentence. A locked file is left as it
    is.

    The tail is kept in a file beside it, unless it is all zeros.
    """
    with locked(path, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
        if descriptor is None:
            return
        with SegmentReader(path, schema) as reader:
            for _ in reader:
                pass
        if not reader.uncommitted:
            return
        size = os.fstat(descriptor).st_size - reader.uncommitted
        where = ""
        if any(map(any, _pieces(path, size))):
            where = f", and are in {_keep(path, size).name}"
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
        yield (
            f"{path.name}: the last {reader.uncommitted} bytes were truncated: not a committed"
            f" message{where}"
        )


def _keep(path: Path, start: int) -> Path:
    """Write what a file has from `start` on to a new file, which is on the disk when this returns.

    A file that has the same bytes is that of a repair which was killed before it truncated.
    """
    for number in count(1):
        kept = path.with_name(f"{path.name}.cut-{number}")
        if not kept.exists():
            with new_file(kept, "wb") as copy:
                copy.writelines(_pieces(path, start))
        same = kept.stat().st_size == path.stat().st_size - start
        if same and all(map(bytes.__eq__, _pieces(path, start), _pieces(kept, 0))):
            break
    return kept


def _pieces(path: Path, start: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on, of which few are in memory at once."""
    with path.open("rb") as file:
        file.seek(start)
        while piece := file.read(2**20):
            yield piece
