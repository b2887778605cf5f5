"""The scheduler of sessions: a state machine without I/O. Events in, actions out; `schedule` carries the actions out.

    waiting -> preparing -> ready -> running -> ran -> judging -> ended
       ^                                                            |
       +---------- pausing <---- an attempt that is retried --------+

`preparing`, `running` and `judging` have slots. `ready` is a bounded buffer of prepared sessions: a slot for running
never waits for a disk. `ran` waits for a judge and holds no slot; as many as may run can wait there before no further
session starts. Of the groups with the highest priority the oldest goes first, its retries too, so groups end in about
the order in which they came. A priority never stops a session.

A session is named by its id, which counts its attempts. An event of an attempt that has ended changes nothing.
"""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rolltap.trainer.rollouts.resume import attempt_of, next_attempt

Phase = Literal["waiting", "preparing", "ready", "running", "ran", "judging", "pausing"]


class Slots(NamedTuple):
    """Most sessions at once in a phase. `evaluation`: most of those that evaluate, while others wait too."""

    preparing: int
    ready: int
    running: int
    judging: int
    evaluation: int = 1


class Action(NamedTuple):
    """Act of the scheduler: a phase of a session begins, it is stopped, or a group is closed, of which none is left.

    `session_id` is empty for a group. A session that is stopped has ended when its event `ended` comes.
    """

    kind: Literal["prepare", "run", "judge", "stop", "close"]
    group_id: str
    session_id: str = ""


@dataclass(slots=True)
class _Group:
    number: int
    deadline: float
    evaluates: bool
    left: set[str]


@dataclass(slots=True)
class _Attempt:
    group_id: str
    order: tuple[int, int, int]
    first: int
    """Number of the first attempt of this rollout."""
    phase: Phase = "waiting"
    due: float = 0.0
    stopped: bool = False


@dataclass(slots=True)
class Scheduler:
    """Sessions of groups in their phases. Times are in seconds of any clock that does not go back.

    Attributes:
        retries: Retries of a session, each after a pause. The first one takes `pause` seconds, the next twice as long.
        counts: Phase -> number of sessions.
    """

    slots: Slots
    retries: int = 0
    pause: float = 1.0
    counts: Counter[Phase] = field(default_factory=Counter)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _attempts: dict[str, _Attempt] = field(default_factory=dict)
    _queues: dict[tuple[Phase, bool], list[tuple[tuple[int, int, int], str]]] = field(default_factory=dict)
    _evaluating: int = 0
    """Sessions that evaluate, from preparing to running."""
    _submitted: int = 0
    _timers: list[tuple[float, str, str]] = field(default_factory=list)
    """Heap of deadlines of groups, with an empty session, and of ends of pauses: time, group, session. A timer whose
    group or session has ended means nothing."""
    _actions: list[Action] = field(default_factory=list)

    def submit(
        self,
        group_id: str,
        session_ids: Sequence[str],
        *,
        deadline: float = math.inf,
        evaluates: bool = False,
        priority: int = 0,
    ) -> None:
        """Take the sessions of a new group. Those that have not ended at the deadline are stopped.

        Raises `ValueError` for a name that is used already.
        """
        known = [session_id for session_id in session_ids if session_id in self._attempts]
        if known or group_id in self._groups or len({*session_ids}) < len(session_ids):
            raise ValueError(f"the group {group_id}, or a session of it, is there already")
        self._groups[group_id] = _Group(self._submitted, deadline, evaluates, {*session_ids})
        if deadline < math.inf:
            heapq.heappush(self._timers, (deadline, group_id, ""))
        for index, session_id in enumerate(session_ids):
            self._attempts[session_id] = _Attempt(group_id, (-priority, self._submitted, index), attempt_of(session_id))
            self.counts["waiting"] += 1
            self._queue(session_id)
        self._submitted += 1
        self._close(group_id)

    def prepared(self, session_id: str) -> None:
        """Note that a session is prepared."""
        self._pass_on(session_id, "preparing", "ready")

    def ran(self, session_id: str) -> None:
        """Note that the harness of a session has ended."""
        self._pass_on(session_id, "running", "ran")

    def ended(self, session_id: str, now: float, *, again: bool = False) -> str | None:
        """Note the end of a session, in whatever phase. With `again` it is retried, unless its retries are used up.

        Returns the id of the next attempt, or None.
        """
        attempt = self._attempts.pop(session_id, None)
        if attempt is None:
            return None
        self._leave(attempt)
        group = self._groups[attempt.group_id]
        group.left.remove(session_id)
        tried = attempt_of(session_id) - attempt.first
        if not again or attempt.stopped or tried >= self.retries:
            self._close(attempt.group_id)
            return None
        further = next_attempt(session_id)
        due = now + self.pause * 2.0**tried
        self._attempts[further] = _Attempt(attempt.group_id, attempt.order, attempt.first, "pausing", due)
        heapq.heappush(self._timers, (due, attempt.group_id, further))
        self.counts["pausing"] += 1
        group.left.add(further)
        return further

    def cancel(self, name: str) -> None:
        """Stop a session, by the id of any attempt of it that has not ended, or all sessions of a group."""
        group = self._groups.get(name)
        for session_id in sorted(group.left) if group else [name]:
            attempt = self._attempts.get(session_id)
            if attempt is None or attempt.stopped:
                continue
            if attempt.phase in ("waiting", "pausing"):
                self.ended(session_id, 0.0)
            else:
                attempt.stopped = True
                self._actions.append(Action("stop", attempt.group_id, session_id))

    def running(self) -> list[str]:
        """Return the sessions that run."""
        return [name for name, attempt in self._attempts.items() if attempt.phase == "running"]

    def is_stopped(self, session_id: str) -> bool:
        """Return True for a session that is to be stopped and has not ended."""
        return session_id in self._attempts and self._attempts[session_id].stopped

    def advance(self, now: float) -> list[Action]:
        """Return what is to be done now, in this order. Call it after events, and at the time `due`."""
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)
            if not self._means(timer):
                continue
            _, group_id, paused_id = timer
            if paused_id:
                self._move(paused_id, "waiting")
            else:
                self.cancel(group_id)
        while self.counts["judging"] < self.slots.judging and (session_id := self._take("ran", [False, True])):
            self._move(session_id, "judging", "judge")
        while self.counts["running"] < self._may_run() and (session_id := self._take("ready", self._turns("ready"))):
            self._move(session_id, "running", "run")
        while self._may_prepare() and (session_id := self._take("waiting", self._turns("waiting"))):
            self._move(session_id, "preparing", "prepare")
        actions, self._actions = self._actions, []
        return actions

    def due(self) -> float | None:
        """Return the time at which the next pause or deadline ends, or None."""
        while self._timers and not self._means(self._timers[0]):
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _means(self, timer: tuple[float, str, str]) -> bool:
        """Return False for a timer whose group or session has ended."""
        time, group_id, paused_id = timer
        if not paused_id:
            group = self._groups.get(group_id)
            return group is not None and group.deadline == time
        attempt = self._attempts.get(paused_id)
        return attempt is not None and attempt.phase == "pausing" and attempt.due == time

    def _may_run(self) -> int:
        return self.slots.running if self.counts["ran"] < max(1, self.slots.running) else 0

    def _may_prepare(self) -> bool:
        free = max(0, self._may_run() - self.counts["running"])
        ahead = self.counts["preparing"] + self.counts["ready"]
        return self.counts["preparing"] < self.slots.preparing and ahead < free + self.slots.ready

    def _turns(self, phase: Phase) -> Collection[bool]:
        """Return whose turn it is for the phase after `phase`: True for sessions that evaluate, the first one first."""
        within = self._evaluating < self.slots.evaluation if phase == "waiting" else True
        return [True, False] if within else [False, True]

    def _take(self, phase: Phase, turns: Collection[bool]) -> str | None:
        """Take the first session out of a queue."""
        for evaluates in turns:
            queue = self._queues.get((phase, evaluates), [])
            while queue:
                _, session_id = heapq.heappop(queue)
                attempt = self._attempts.get(session_id)
                if attempt is not None and attempt.phase == phase and not attempt.stopped:
                    return session_id
        return None

    def _pass_on(self, session_id: str, phase: Phase, following: Phase) -> None:
        attempt = self._attempts.get(session_id)
        if attempt is not None and attempt.phase == phase:
            self._move(session_id, following)

    def _move(self, session_id: str, phase: Phase, action: Literal["prepare", "run", "judge"] | None = None) -> None:
        attempt = self._attempts[session_id]
        self._leave(attempt)
        attempt.phase = phase
        self.counts[phase] += 1
        self._evaluating += self._is_counted(attempt)
        if action is None:
            self._queue(session_id)
        else:
            self._actions.append(Action(action, attempt.group_id, session_id))

    def _leave(self, attempt: _Attempt) -> None:
        self.counts[attempt.phase] -= 1
        self._evaluating -= self._is_counted(attempt)

    def _is_counted(self, attempt: _Attempt) -> bool:
        return attempt.phase in ("preparing", "ready", "running") and self._groups[attempt.group_id].evaluates

    def _queue(self, session_id: str) -> None:
        attempt = self._attempts[session_id]
        queue = self._queues.setdefault((attempt.phase, self._groups[attempt.group_id].evaluates), [])
        heapq.heappush(queue, (attempt.order, session_id))

    def _close(self, group_id: str) -> None:
        if not self._groups[group_id].left:
            del self._groups[group_id]
            self._actions.append(Action("close", group_id))
