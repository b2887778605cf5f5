"""The lock of a run folder: one rollout or training runs sessions in it at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolltap.addons.errors import RunError
from rolltap.addons.store.staging import locked

LOCK_FILE = "rollout.lock"


@contextmanager
def rollout_lock(run: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made if it does not exist. A killed process holds it no longer.

    Raises `RunError` when another process holds it, and `OSError`.
    """
    run.mkdir(parents=True, exist_ok=True)
    with locked(run / LOCK_FILE, os.O_RDWR | os.O_CREAT) as held:
        if held is None:
            raise RunError(f"another rollout or training runs sessions in {run}: wait until it has ended, or stop it")
        yield
