"""Atomic files and folders: written under a hidden name and renamed when they are complete."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rolltap.addons.errors import RunError


def hidden_name(path: Path) -> Path:
    """Return the name of `path` while it is incomplete. Each process has its own."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def sync_folder(folder: Path) -> None:
    """Fsync a folder, and with it the names of its files. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, mode: int = os.O_RDONLY, *, wait: bool = False) -> Iterator[int | None]:
    """Lock a file or folder (`flock`) for the block. Yields its descriptor, or None.

    It is None when another process holds the lock, or when `path` was replaced or removed
    meanwhile. With `wait`, block until the lock is free. Raises `OSError`, with `wait` also for a
    replaced `path`.
    """
    descriptor = os.open(path, mode | os.O_NONBLOCK)  # a FIFO has no other end
    try:
        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.flock(descriptor, how)
            held = os.path.samestat(os.fstat(descriptor), path.stat())
        except (BlockingIOError, FileNotFoundError):
            held = False
        if wait and not held:
            raise FileNotFoundError(errno.ENOENT, "it was replaced", str(path))
        yield descriptor if held else None
    finally:
        os.close(descriptor)


@contextmanager
def new_file(path: Path, mode: str) -> Iterator[IO[Any]]:
    """Yield a locked file that replaces `path` when the block ends, unless the block raises.

    Readers see either the old or the new contents, also after a machine crash: the file is fsynced
    before the rename. Raises `OSError`.
    """
    hidden = hidden_name(path)
    with open(hidden, mode) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            hidden.rename(path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` atomically. Raises `OSError`.

    A pipe or device cannot be replaced and is written to directly.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    with new_file(path, "w") as file:
        file.write(text)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` when the block ends, and is removed when the block raises.

    The hidden folder is locked while it is written. An unlocked one was left by a killed command
    and is written anew. The yielded folder lies inside it, because writers lock the folder that
    they write to.

    Raises `RunError` when `out` exists and is not an empty folder, when another command is writing
    it, and for an `OSError` such as a full disk or a missing permission. `BrokenPipeError` passes
    through.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists and is not an empty folder: choose a new one")
    hidden = out.with_name(f".{out.name}.partial")
    staged = hidden / "run"
    try:
        hidden.mkdir(parents=True, exist_ok=True)
        with locked(hidden) as lock:
            if lock is None:
                raise RunError(f"another command is writing {out}: wait until it has ended")
            try:
                if staged.exists():
                    shutil.rmtree(staged)
                staged.mkdir()
                yield staged
                for path in [*staged.rglob("*"), staged]:
                    sync_folder(path)
                staged.rename(out)
                sync_folder(out.parent)
            finally:
                shutil.rmtree(hidden)
    except BrokenPipeError:
        raise  # from stdout, whose reader has closed it: not an error of `out`
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
