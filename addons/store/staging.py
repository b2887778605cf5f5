"""Files and folders that appear all at once: written under a hidden name, moved into place when they are complete."""

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
    """The name of a file that is not complete yet."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, mode: int = os.O_RDONLY, *, wait: bool = False) -> Iterator[int | None]:
    """Hold the lock (`flock`) of a file or folder: its descriptor, or None when another process holds it.

    Also None when the lock belongs to what had this name before, which with `wait` is an error. Raises `OSError`.
    """
    descriptor = os.open(path, mode)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """A locked file that takes the place of `path` when the block ends, and is removed when the block raises.

    A reader sees the old contents or the new, never a part, and so does one who comes after the machine stopped.
    Raises `OSError`.
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
    """Write `text` to `path` as `new_file` does; to a pipe or a device, which nothing may replace, as it is.

    Raises `OSError`.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    with new_file(path, "w") as file:
        file.write(text)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends, and is removed when the block raises.

    The hidden folder is locked, so that what a killed command left behind is told from what is being written. The files
    lie in a folder within it, as writers lock the folder that they write to.

    Raises `RunError` when `out` exists and is not an empty folder, when another command is writing it, and for an
    `OSError`: a full disk, a missing permission.
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
        raise  # of stdout: its reader has enough
    except OSError as error:
        raise RunError(f"{out} could not be written: {error}") from error
