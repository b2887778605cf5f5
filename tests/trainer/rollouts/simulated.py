"""The queue in virtual time: sessions whose phases take drawn times, without programs and without
waiting."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rolltap.trainer.rollouts.queue import SessionQueue

KINDS = ("prepare", "run", "judge")


@dataclass(slots=True)
class Simulated:
    """Result of a simulation, in seconds of virtual time.

    Attributes:
        ended: Session -> its end.
        closed: Group -> its end, in their order.
        ran: Sum of the times in which sessions ran.
        end: End of the last one.
    """

    ended: dict[str, float] = field(default_factory=dict)
    closed: dict[str, float] = field(default_factory=dict)
    ran: float = 0.0
    end: float = 0.0


def simulate(
    queue: SessionQueue,
    groups: Sequence[Sequence[str]],
    times: Callable[[str], tuple[float, float, float]],
) -> Simulated:
    """Run groups of sessions to their end. `times` returns the seconds to prepare, run and judge a
    session."""
    seen = Simulated()
    number = itertools.count()
    now = 0.0
    events: list[tuple[float, int, str, str]] = []
    for index, group in enumerate(groups):
        queue.submit(f"g{index}", group)
    while True:
        for kind, group_id, session_id, _ in queue.advance(now):
            if kind == "close":
                seen.closed[group_id] = now
                continue
            taken = times(session_id)[KINDS.index(kind)]
            if kind == "run":
                seen.ran += taken
            heapq.heappush(events, (now + taken, next(number), kind, session_id))
        if not events:
            seen.end = now
            return seen
        now, _, kind, session_id = heapq.heappop(events)
        if kind == "prepare":
            queue.prepared(session_id)
        elif kind == "run":
            queue.ran(session_id)
        else:
            queue.ended(session_id, now)
            seen.ended[session_id] = now


def long_tailed(
    seed: int, *, prepare: float = 0.1, judge: float = 0.1
) -> Callable[[str], tuple[float, float, float]]:
    """Return times whose median to run is 1, log-normal with sigma 1; to prepare and to judge take
    so much each."""

    def times(session_id: str) -> tuple[float, float, float]:
        return prepare, random.Random(f"{seed}/{session_id}").lognormvariate(0.0, 1.0), judge

    return times
