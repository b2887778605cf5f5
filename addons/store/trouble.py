"""A state in which writes fail: one line in the log when it begins and one when it ends."""

import logging
import threading
from pathlib import Path

logger = logging.getLogger(__name__)


class Trouble:
    """Counts what fails in a row, and logs the first failure and the first success after it. Thread-safe."""

    def __init__(self, run: Path, what: str) -> None:
        self._run = run
        self._what = what
        """The things that fail, in the plural."""
        self._failures = 0
        self._lock = threading.Lock()

    def failed(self, error: OSError) -> None:
        """Count a failure."""
        with self._lock:
            self._failures += 1
            if self._failures == 1:
                logger.error("cannot write to %s, until further notice: %s", self._run, error)

    def passed(self) -> None:
        """Note that it works."""
        if not self._failures:
            return
        with self._lock:
            failures, self._failures = self._failures, 0
        if failures:
            logger.warning("%s can be written again: %d %s", self._run, failures, self._what)
