"""Output folders that are complete or absent."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltap.trainer.errors import UserError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, which becomes `out` when the block ends without an error, else is removed.

    Raises `UserError` when `out` exists and is not an empty folder, and for an `OSError` in the block: a full disk, a
    missing permission. A killed process leaves the temporary folder, whose name begins with a dot.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: choose a new one")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(out)
    except BrokenPipeError:
        raise  # of stdout: the reader has enough
    except OSError as error:
        raise UserError(f"{out} could not be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
