"""Admission of sessions by the engines' load: a controller without I/O.

Agents hardly ever make an engine preempt: their calls park in its queue. So a queue, and a full cache, say that there
are too many sessions. The constants are those of prime-rl's controller of concurrency.
"""

import math
from dataclasses import dataclass

from rolltap.trainer.engine.admin import Load

POLL_SECONDS = 5.0
GROW, GROW_BELOW = 1.25, 0.6
TRIM_AT, TRIM_HARD_AT, AIM = 0.8, 0.9, 0.7
"""Shares of the cache that is used."""
QUEUE_SHARE, QUEUE_POLLS, QUEUE_TRIM = 0.5, 6, 0.9
PREEMPTION_TRIM, PREEMPTION_TRIM_AGAIN = 0.8, 0.5
STALE_SECONDS = 15.0
AT_ONCE = 0.1
"""Most sessions that are admitted at once, as a share of the limit."""


@dataclass(slots=True)
class Admission:
    """How many sessions may run. `most` is never exceeded; a quarter of it is the first limit."""

    most: int
    limit: float = 0.0
    _preemptions: int | None = None
    _preempted: bool = False
    _queued: int = 0
    _ended: int = 0
    """Sessions that had ended at the last growth."""
    _seen: float = -math.inf

    def __post_init__(self) -> None:
        self.limit = max(1.0, self.most / 4)

    def poll(self, load: Load | None, *, running: int, ended: int, now: float) -> int:
        """Return how many sessions may run until the next poll, every `POLL_SECONDS`.

        `load` is that of the engines, or None when they do not tell. `running` sessions run, and `ended` have ended
        since the start. `now` is in seconds.
        """
        if load is not None:
            self._seen = now
            self._trim(load, running)
            self._grow(load, ended)
        elif now - self._seen > STALE_SECONDS:
            self.limit = max(1.0, min(self.limit, running))
        self.limit = min(max(self.limit, 1.0), self.most)
        return min(int(self.limit), running + max(1, int(self.limit * AT_ONCE)))

    def _trim(self, load: Load, running: int) -> None:
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        if preempted:
            self.limit *= PREEMPTION_TRIM_AGAIN if self._preempted else PREEMPTION_TRIM
        self._preemptions, self._preempted = load.preemptions, preempted
        self._queued = self._queued + 1 if load.waiting > QUEUE_SHARE * load.running else 0
        if self._queued and self._queued % QUEUE_POLLS == 0:
            self.limit *= QUEUE_TRIM
        if load.cache >= TRIM_AT:
            aim = running * AIM / load.cache
            self.limit = min(self.limit, aim if load.cache >= TRIM_HARD_AT else max(aim, self.limit * 0.9))

    def _grow(self, load: Load, ended: int) -> None:
        if ended - self._ended < self.limit:
            return
        self._ended = ended
        if load.cache < GROW_BELOW and not self._queued:
            self.limit *= GROW
