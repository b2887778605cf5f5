"""A token bucket: bursts are free, what goes on is bounded by a rate."""

import time


class Bucket:
    """Holds at most `size` units, and gains `per_second` of them each second."""

    def __init__(self, size: float, per_second: float) -> None:
        self._size, self._per_second = size, per_second
        self._left, self._at = size, time.monotonic()

    def take(self, units: float = 1) -> bool:
        """Take so many units, and return True; return False and take nothing if there are fewer."""
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < units:
            return False
        self._left -= units
        return True
