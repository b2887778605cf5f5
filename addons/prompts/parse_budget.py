"""A budget of time for parsing completions as a whole in the event loop."""

import time
from collections.abc import Callable


class ParseBudget:
    """The share of time in which completions are parsed as a whole. Streams of one event loop have it in common."""

    LONGEST_PAUSE = 2.0
    """Maximum seconds without a parse, after a long one."""

    def __init__(self, share: float = 0.1, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._next = 0.0

    def allows(self) -> bool:
        """Return whether a completion may be parsed now."""
        return self._clock() >= self._next

    def spend(self, seconds: float) -> None:
        """Count the time that a parse took."""
        pause = min(seconds * (1 / self._share - 1), self.LONGEST_PAUSE)
        self._next = max(self._next, self._clock() + pause)
