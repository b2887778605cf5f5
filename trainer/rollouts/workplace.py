"""The folder for what a rollout needs while it runs: starts, and the workspaces and homes of its sessions."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltap.addons.store.staging import locked

_PREFIX = "rolltap-work-"


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a new folder below the system's folder for temporary files, and remove it at the end.

    It is not in the run folder: a harness looks for its settings and for a checkout in the folders above its workspace.
    The folder is locked while its process runs. Those that killed rollouts of this user left are removed first.
    """
    _remove_left(Path(tempfile.gettempdir()))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with locked(folder) as held:
            if held is None:  # another rollout has taken it for a left one
                continue
            try:
                yield folder
            finally:
                remove_tree(folder)
            return


def remove_tree(folder: Path) -> None:
    """Remove a folder, also one with folders that an agent has made unreadable. What cannot be removed stays."""

    def make_writable(_: object, path: str, __: object) -> None:
        place = Path(path)
        try:
            place.parent.chmod(0o700)
            if place.is_dir() and not place.is_symlink():
                place.chmod(0o700)
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink()
        except OSError:
            return

    shutil.rmtree(folder, onerror=make_writable)


def _remove_left(parent: Path) -> None:
    for left in parent.glob(f"{_PREFIX}*"):
        try:
            with locked(left) as free:
                if free is not None and not left.is_symlink():
                    remove_tree(left)
        except OSError:  # another user's, or removed meanwhile
            continue
