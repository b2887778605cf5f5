"""Run folders that appear all at once: written under a hidden name, moved into place when they are complete.

A hidden folder is locked by the command that writes it, so that what a killed command left behind is told from what
is being written.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rolltap.trainer.errors import UserError

STAGING = ".staging"
"""Folder inside a run: files that are being added."""
COMPLETE = ".complete"
"""The same folder once all files are complete: whoever finds it may move them into the run."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends, and is removed when the block raises.

    Raises `UserError` when `out` is there and not empty, and when another command is writing it.
    """
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already: choose a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.with_name(f".{out.name}.partial")) as staged:
        yield staged
        _sync(staged)
        staged.rename(out)
        _sync_folder(out.parent)


@contextmanager
def new_files(run: Path) -> Iterator[Path]:
    """A folder whose files are all added to the run folder `run` when the block ends, and to none when it raises.

    Killed at any instruction, either no file is in the run or the next `new_files` or `clean` of the run finishes.
    Raises `UserError` when another command is adding files to the run.
    """
    with _locked(run / STAGING) as staged:
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


def _finish(run: Path) -> None:
    """Move the files of a complete folder into the run. A kill in between leaves the rest to the next one."""
    folder = run / COMPLETE
    if folder.is_dir():
        for name in sorted(os.listdir(folder)):
            (folder / name).rename(run / name)
        folder.rmdir()
        _sync_folder(run)


def is_held(folder: Path) -> bool:
    """Whether a live command writes this staging folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """`folder`, empty and locked until the block ends; removed if it is still there then."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the one who held it may have moved it away in between
            mine = os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise UserError(f"another command is writing {folder}: wait until it has ended")
        for name in os.listdir(folder):
            (folder / name).unlink()
        try:
            yield folder
        finally:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Have the files of a folder on the disk before its name says that they are complete."""
    for name in os.listdir(folder):
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
