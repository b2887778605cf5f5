"""The locks of a run folder, and the locked folder for what is needed while sessions run."""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rolltap.addons.errors import RunError
from rolltap.addons.store.staging import locked
from rolltap.trainer.folders import remove_folder

logger = logging.getLogger(__name__)

STOP_SECONDS = 20.0
"""Time in which a recorder that is to end can record its last calls."""
LEFT_SECONDS = 2 * STOP_SECONDS
"""Longest wait for the recorder of a killed process, which is killed after `STOP_SECONDS`."""
_PAUSE_SECONDS = 0.05
LOCK_FILE = "rollout.lock"
RECORDERS_FILE = "recorders.lock"


@contextmanager
def rollout_lock(
    run: Path,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Hold the lock of a run folder: one rollout or training runs sessions in it at a time.

    Makes the folder. Yields a descriptor for the recorders: those of a killed process keep it open
    until they have recorded their last calls. It waits for them, unless it is `stopped`.

    Raises `RunError` when another process holds the lock, and when such a recorder does not end;
    `OSError`.
    """
    run.mkdir(parents=True, exist_ok=True)
    with locked(run / LOCK_FILE, os.O_RDWR | os.O_CREAT) as held:
        if held is None:
            what = f"another rollout or training runs sessions in {run}"
            raise RunError(f"{what}: wait until it has ended, or stop it")
        with _without_recorders(run, stopped) as descriptor:
            yield descriptor


@contextmanager
def _without_recorders(run: Path, stopped: Callable[[], bool]) -> Iterator[int]:
    until = time.monotonic() + LEFT_SECONDS
    what = f"the recorder of a killed rollout or training still records into {run}"
    waits = False
    while True:
        with locked(run / RECORDERS_FILE, os.O_RDWR | os.O_CREAT) as held:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_SH)  # `share_recorders_lock`
                yield held
                return
        if stopped() or time.monotonic() >= until:
            program = "its mitmdump has ended (with --ray, also its actor Writer)"
            raise RunError(f"{what}: start again when {program}, or kill that process")
        if not waits:
            logger.warning("%s: waiting for its end, at most %g s", what, LEFT_SECONDS)
            waits = True
        time.sleep(_PAUSE_SECONDS)


def share_recorders_lock(run: Path) -> int:
    """Let the next start wait for this process, as for a recorder, until the result is closed.

    The result is a descriptor. The process that has `rollout_lock` waits for this meanwhile. Raises
    `OSError`.
    """
    descriptor = os.open(run / RECORDERS_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


_PREFIX = "rolltap-work-"


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a new temporary folder for certificates, starts, workspaces and homes, and remove it at
    the end.

    It is not in the run folder: a harness looks for its settings and for a checkout in the folders
    above its workspace. The folder is locked while its process runs. Those that killed processes of
    this user left are removed first.
    """
    _remove_left(Path(tempfile.gettempdir()))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        held: int | None = None
        with ExitStack() as stack:
            with suppress(FileNotFoundError):
                held = stack.enter_context(locked(folder))
            if held is None:  # another process has taken it for a left one
                continue
            try:
                yield folder
            finally:
                remove_folder(folder)
            return


def _remove_left(parent: Path) -> None:
    for left in parent.glob(f"{_PREFIX}*"):
        try:
            with locked(left) as free:
                if free is not None and not left.is_symlink():
                    remove_folder(left)
        except OSError:  # another user's, or removed meanwhile
            continue
