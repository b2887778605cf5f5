"""Temporary folders that can be removed whatever a session left in them."""

import contextlib
import logging
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


def new_folder() -> Path:
    """Make a folder that only this user can enter."""
    return Path(tempfile.mkdtemp(prefix="rolltap-"))


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield such a folder, and remove it at the end."""
    folder = new_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it. What cannot be removed is logged: nothing is raised.

    By rm(1): `shutil.rmtree` fails for folders that are nested a thousand times, and for those that
    a session closed to its own user.
    """
    remove = ["rm", "-rf", "--one-file-system", "--", str(folder)]
    try:
        if subprocess.run(remove, stderr=subprocess.DEVNULL).returncode:
            subprocess.run(["chmod", "-R", "u+rwx", "--", str(folder)], stderr=subprocess.DEVNULL)
            done = subprocess.run(remove, stderr=subprocess.PIPE, text=True, errors="replace")
            if done.returncode:
                logger.warning(
                    "the folder %s could not be removed: %s", folder, done.stderr.strip()[-500:]
                )
    except OSError as error:
        logger.warning("the folder %s could not be removed: %s", folder, error)
