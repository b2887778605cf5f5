"""The folder for what a recorder or a rollout needs while it runs: certificates, starts, workspaces, homes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltap.addons.store.staging import locked
from rolltap.trainer.rollouts.runtimes.scratch import remove_folder

_PREFIX = "rolltap-work-"


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a new folder below the system's folder for temporary files, and remove it at the end.

    It is not in the run folder: a harness looks for its settings and for a checkout in the folders above its workspace.
    The folder is locked while its process runs. Those that killed processes of this user left are removed first.
    """
    _remove_left(Path(tempfile.gettempdir()))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with locked(folder) as held:
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
