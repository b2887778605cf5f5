"""Folders that appear all at once: written under a hidden name, moved into place when they are complete.

The hidden folder is locked by the command that writes it, so that what a killed command left behind is told from what
is being written. The files lie in a folder within it, as writers lock the folder that they write to.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltap.addons.store.segment import sync_folder
from rolltap.trainer.errors import UserError

STAGING = ".staging"
"""Folder inside a run: files that are being added."""
COMPLETE = ".complete"
"""The files once all are complete: whoever holds the lock of `STAGING` may move them into the run."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends, and is removed when the block raises.

    Raises `UserError` when `out` exists and is not an empty folder, when another command is writing it, and for an
    `OSError`: a full disk, a missing permission.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose a new one")
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.with_name(f".{out.name}.partial")) as staged:
            yield staged
            _sync(staged)
            staged.rename(out)
            sync_folder(out.parent)


@contextmanager
def new_files(run: Path) -> Iterator[Path]:
    """A folder whose files are all added to the run folder `run` when the block ends, and to none when it raises.

    Killed at any instruction, either no file is in the run or the next `new_files` or `clean` of the run finishes.
    Raises `UserError` when another command is adding files to the run, and for an `OSError`.
    """
    with _writing(run), _locked(run / STAGING) as staged:
        _finish(run)
        yield staged
        _sync(staged)
        staged.rename(run / COMPLETE)
        _finish(run)


def clean(run: Path) -> None:
    """Do for a run what the killed command left to do: move complete files into place, remove the others.

    Raises `UserError` when a live command is adding files to the run.
    """
    with _locked(run / STAGING):
        _finish(run)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # of stdout: its reader has enough
    except OSError as error:
        raise UserError(f"{folder} could not be written: {error}") from error


def _finish(run: Path) -> None:
    """Move the files of a complete folder into the run. A kill in between leaves the rest to the next one."""
    folder = run / COMPLETE
    if folder.is_dir():
        for name in sorted(os.listdir(folder)):
            (folder / name).rename(run / name)
        folder.rmdir()
        sync_folder(run)


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """A new folder in the hidden `folder`, which is locked until the block ends and then removed."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # its last owner may have removed it in between
            owned = os.path.samestat(os.fstat(descriptor), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            owned = False
        if not owned:
            raise UserError(f"another command is writing {folder}: wait until it has ended")
        try:
            staged = folder / "run"
            if staged.exists():
                shutil.rmtree(staged)
            staged.mkdir()
            yield staged
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Have the files of a folder on the disk before its name says that they are complete."""
    for path in [*folder.rglob("*"), folder]:
        sync_folder(path)
