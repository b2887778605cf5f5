"""The queue of sessions: a state machine without I/O. Events in, actions out; `runner` carries the
actions out.

    waiting -> preparing -> ready -> running -> ran -> judging -> ended
       ^           |          |                                     |
       +-----------+----------+  the node was lost (once)           |
       |                                                            |
       +---------- pausing <---- an attempt that is retried --------+

An attempt can end in every phase. A session that is cancelled while it waits or pauses ends at
once. In another phase it is stopped: it takes no further slot, and ends with its event `ended`.

`preparing`, `running` and `judging` have slots on each node. `ready` is a bounded buffer of
prepared sessions: a slot for running never waits for a disk. `ran` waits for a judge and holds no
slot. When as many sessions wait in `ran` as the node has slots for running, none starts to run. Of
the groups with the highest priority the oldest goes first, its retries too, so groups end in about
the order in which they came. A priority never stops a session.

Evaluations are prepared before other sessions, whatever the priorities, as long as fewer than
`Slots.evaluation` are between preparing and the end of their run; further ones after all others.
A prepared evaluation runs first, because it holds a slot of that share and does no work while it
waits in `ready`.
Evaluations are judged last: one that ran is no longer in that share, and the next step of a
training waits for the other sessions.

A group stays on the node that takes its first session, because its sessions share the prefix cache
of that node's engines. The node with the most free slots takes the next group. If there are several
nodes, a node without a free slot takes none, because another node may have one sooner. When a node
is lost, its groups wait for another one.

A `session_id` is the id of an attempt: the id of the session, and the number of the attempt if it
is not the first. An event of an attempt that has ended changes nothing.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from rolltap.trainer.names import SessionName

Phase = Literal["waiting", "preparing", "ready", "running", "ran", "judging", "pausing"]
_Order = tuple[int, int, int]
"""Negative priority, number of the group, index in the group. Of a whole group the index is -1."""
_EVALUATIONS_FIRST = (True, False)
_EVALUATIONS_LAST = (False, True)


class Slots(NamedTuple):
    """Most sessions at once in a phase, on one node.

    As long as fewer than `evaluation` sessions that evaluate are between preparing and the end of
    their run, the next session that is prepared evaluates, if one waits.
    """

    preparing: int
    ready: int
    running: int
    judging: int
    evaluation: int = 1


class Action(NamedTuple):
    """Act of the queue: a phase of a session begins, it is stopped, or a group of which none is
    left is closed.

    `session_id` is empty for a group, and `node` for a group and a stop. A session that is stopped
    has ended when its event `ended` comes.
    """

    kind: Literal["prepare", "run", "judge", "stop", "close"]
    group_id: str
    session_id: str = ""
    node: str = ""


@dataclass(slots=True)
class _Group:
    order: _Order
    deadline: float
    evaluates: bool
    unended: set[str]
    """Sessions that have not ended."""
    node: str | None = None


@dataclass(slots=True)
class _Attempt:
    group_id: str
    order: _Order
    retries_used: int
    """Retries that its session has used, this attempt too if it is one."""
    phase: Phase = "waiting"
    due: float = 0.0
    stopped: bool = False
    spared: bool = False
    """True when it has lost a node before it began to run, which cost no retry."""
    node: str | None = None
    """The node that the attempt is on, from preparing to its end. None too after its node was lost.
    """


@dataclass(slots=True)
class _Node:
    slots: Slots
    rests: bool = False
    counts: Counter[Phase] = field(default_factory=Counter)
    groups: set[str] = field(default_factory=set)
    evaluating: int = 0
    """Sessions that evaluate, from preparing to running."""
    heaps: dict[tuple[Phase, bool], list[tuple[_Order, str]]] = field(default_factory=dict)
    """Phase and whether the sessions evaluate -> heap of those that wait for the phase after it. An
    entry may be out of date."""

    def free(self) -> int:
        """Return the number of slots for running that no session has, or is prepared for.

        It is negative where prepared sessions wait in `ready` for the slots of others.
        """
        held = self.counts["preparing"] + self.counts["ready"] + self.counts["running"]
        return self.slots.running - held

    def may_run(self) -> int:
        """Return the most sessions that may run now."""
        if self.counts["ran"] < max(1, self.slots.running):
            return self.slots.running
        return 0

    def may_prepare(self) -> bool:
        """Return True if a slot for preparing is free and a prepared session would have a place."""
        free = max(0, self.may_run() - self.counts["running"])
        ahead = self.counts["preparing"] + self.counts["ready"]
        return self.counts["preparing"] < self.slots.preparing and ahead < free + self.slots.ready


@dataclass(slots=True)
class SessionQueue:
    """Sessions of groups in their phases, on nodes. Times are in seconds of any clock that does not
    go back.

    An event and the actions after it take a time that is logarithmic in the number of sessions and
    linear in that of the nodes.

    Attributes:
        retries: Retries of a session, each after a pause. The first one takes `pause` seconds, the
            next twice as long.
        counts: Phase -> number of sessions, on all nodes and on none.
    """

    retries: int = 0
    pause: float = 1.0
    counts: Counter[Phase] = field(default_factory=Counter)
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _attempts: dict[str, _Attempt] = field(default_factory=dict)
    _unassigned: dict[bool, list[tuple[_Order, str]]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    """Whether groups evaluate -> heap of those that no node has. An entry may be out of date."""
    _submitted: int = 0
    _timers: list[tuple[float, str, str]] = field(default_factory=list)
    """Heap of deadlines of groups, with an empty session, and of ends of pauses: time, group,
    session. A timer whose group or session has ended means nothing."""
    _actions: list[Action] = field(default_factory=list)

    def add_node(self, name: str, slots: Slots) -> None:
        """Take a node, which gets sessions from now on."""
        self._nodes[name] = _Node(slots)

    def remove_node(self, name: str) -> None:
        """Forget a node. Its sessions still need their event `ended`; what waited for it waits for
        any node."""
        node = self._nodes.pop(name, None)
        if node is None:
            return
        for group_id in node.groups:
            group = self._groups[group_id]
            group.node = None
            for session_id in group.unended:
                self._attempts[session_id].node = None
            self._enqueue_group(group_id)

    def rest_node(self, name: str, rests: bool) -> None:
        """Give a node no further groups while it rests."""
        if name in self._nodes:
            self._nodes[name].rests = rests

    def submit(
        self,
        group_id: str,
        session_ids: Sequence[str],
        *,
        deadline: float = math.inf,
        evaluates: bool = False,
        priority: int = 0,
        retries_used: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Take the sessions of a new group. Those that have not ended at the deadline are stopped.

        `retries_used` is session -> the retries that it has used before.

        Raises `ValueError` for a name that is used already.
        """
        known = [session_id for session_id in session_ids if session_id in self._attempts]
        if known or group_id in self._groups or len({*session_ids}) < len(session_ids):
            raise ValueError(f"the group {group_id}, or a session of it, is there already")
        number = self._submitted
        self._submitted += 1
        order = (-priority, number, -1)
        self._groups[group_id] = _Group(order, deadline, evaluates, {*session_ids})
        if deadline < math.inf:
            heapq.heappush(self._timers, (deadline, group_id, ""))
        for index, session_id in enumerate(session_ids):
            order = (-priority, number, index)
            attempt = _Attempt(group_id, order, retries_used.get(session_id, 0))
            self._attempts[session_id] = attempt
            self._count(attempt, 1)
        self._enqueue_group(group_id)
        self._close_if_over(group_id)

    def prepared(self, session_id: str) -> None:
        """Note that a session is prepared."""
        self._pass_on(session_id, "preparing", "ready")

    def ran(self, session_id: str) -> None:
        """Note that the harness of a session has ended."""
        self._pass_on(session_id, "running", "ran")

    def ended(self, session_id: str, now: float, *, again: bool = False) -> str | None:
        """Note the end of a session, in whatever phase. With `again` it is retried, unless its
        retries are used up.

        Returns the id of the next attempt, or None.
        """
        attempt = self._attempts.pop(session_id, None)
        if attempt is None:
            return None
        self._count(attempt, -1)
        group = self._groups[attempt.group_id]
        group.unended.remove(session_id)
        used = attempt.retries_used
        if not again or attempt.stopped or used >= self.retries:
            self._close_if_over(attempt.group_id)
            return None
        due = now + self.pause * 2.0**used
        retry = _Attempt(attempt.group_id, attempt.order, used + 1, "pausing", due)
        retry_id = str(SessionName.parse(session_id).next)
        group.unended.add(retry_id)
        self._attempts[retry_id] = retry
        self._count(retry, 1)
        heapq.heappush(self._timers, (due, retry.group_id, retry_id))
        return retry_id

    def requeue(self, session_id: str) -> bool:
        """Let a session wait again, with its retries, if its node was lost before it began to run.

        Call it when the node does nothing for it any more. Returns False for any other session, and
        the second time: its preparation may be what ends the nodes.
        """
        attempt = self._attempts.get(session_id)
        if attempt is None or attempt.stopped or attempt.spared or attempt.node is not None:
            return False
        if attempt.phase not in ("preparing", "ready"):
            return False
        attempt.spared = True
        self._set_waiting(session_id)
        return True

    def cancel(self, name: str) -> None:
        """Stop a session, by the id of any attempt of it that has not ended, or all sessions of a
        group."""
        group = self._groups.get(name)
        session_ids = [name]
        if group is not None:
            session_ids = sorted(group.unended)
        for session_id in session_ids:
            attempt = self._attempts.get(session_id)
            if attempt is None or attempt.stopped:
                continue
            if attempt.phase in ("waiting", "pausing"):
                self.ended(session_id, now=0.0)  # the time matters for a retry alone
            else:
                attempt.stopped = True
                self._actions.append(Action("stop", attempt.group_id, session_id))

    def is_stopped(self, session_id: str) -> bool:
        """Return True for a session that is to be stopped and has not ended."""
        return session_id in self._attempts and self._attempts[session_id].stopped

    def is_running(self, session_id: str) -> bool:
        """Return True for a session that has a slot for running."""
        return session_id in self._attempts and self._attempts[session_id].phase == "running"

    def node_counts(self, name: str) -> Counter[Phase]:
        """Return phase -> number of the sessions that a node has begun."""
        return self._nodes[name].counts

    def advance(self, now: float) -> list[Action]:
        """Return what is to be done now, in this order. Call it after events, and at the time
        `due`."""
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)
            if not self._is_current(timer):
                continue
            _, group_id, paused_id = timer
            if paused_id:
                self._set_waiting(paused_id)
            else:
                self.cancel(group_id)
        for name, node in self._nodes.items():
            while node.counts["judging"] < node.slots.judging:
                session_id = self._take(node, "ran", _EVALUATIONS_LAST)
                if session_id is None:
                    break
                self._begin(session_id, "judging", "judge", name)
            while node.counts["running"] < node.may_run():
                session_id = self._take(node, "ready", _EVALUATIONS_FIRST)
                if session_id is None:
                    break
                self._begin(session_id, "running", "run", name)
        self._prepare()
        actions = self._actions
        self._actions = []
        return actions

    def due(self) -> float | None:
        """Return the time at which the next pause or deadline ends, or None."""
        while self._timers and not self._is_current(self._timers[0]):
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return self._timers[0][0]

    def _is_current(self, timer: tuple[float, str, str]) -> bool:
        """Return False for a timer whose group or session has ended."""
        time, group_id, paused_id = timer
        if not paused_id:
            group = self._groups.get(group_id)
            return group is not None and group.deadline == time
        attempt = self._attempts.get(paused_id)
        return attempt is not None and attempt.phase == "pausing" and attempt.due == time

    def _prepare(self) -> None:
        """Begin sessions on the nodes, each time on the one with the most free slots."""
        nodes: list[tuple[int, int, str]] = []
        for place, (name, node) in enumerate(self._nodes.items()):
            nodes.append((-node.free(), place, name))
        heapq.heapify(nodes)
        while nodes:
            _, place, name = nodes[0]
            node = self._nodes[name]
            session_id = None
            if node.may_prepare():
                session_id = self._take_waiting(name, node)
            if session_id is None:
                heapq.heappop(nodes)
            else:
                self._begin(session_id, "preparing", "prepare", name)
                heapq.heapreplace(nodes, (-node.free(), place, name))

    def _take_waiting(self, name: str, node: _Node) -> str | None:
        """Take the session that a node begins next: of its groups, or of one that it takes with
        it."""
        first = node.evaluating < node.slots.evaluation
        for evaluates in (first, not first):
            own = self._first(node, "waiting", evaluates)
            group_id = self._first_unassigned(node, evaluates)
            if group_id is not None:
                order = self._groups[group_id].order
                if own is None or order < self._attempts[own].order:
                    heapq.heappop(self._unassigned[evaluates])
                    self._assign(name, node, group_id)
            session_id = self._take(node, "waiting", (evaluates,))
            if session_id is not None:
                return session_id
        return None

    def _first_unassigned(self, node: _Node, evaluates: bool) -> str | None:
        """Return the first group that no node has, if the node may take it."""
        if node.rests or (len(self._nodes) > 1 and node.free() <= 0):
            return None
        heap = self._unassigned[evaluates]
        while heap:
            order, group_id = heap[0]
            group = self._groups.get(group_id)
            is_current = group is not None and group.order == order and group.node is None
            if is_current and self._has_waiting(group_id):
                return group_id
            heapq.heappop(heap)
        return None

    def _has_waiting(self, group_id: str) -> bool:
        unended = self._groups[group_id].unended
        return any(self._attempts[name].phase == "waiting" for name in unended)

    def _assign(self, name: str, node: _Node, group_id: str) -> None:
        """Give a group to a node."""
        group = self._groups[group_id]
        group.node = name
        node.groups.add(group_id)
        for session_id in group.unended:
            if self._attempts[session_id].phase == "waiting":
                self._push(session_id)

    def _enqueue_group(self, group_id: str) -> None:
        group = self._groups[group_id]
        heapq.heappush(self._unassigned[group.evaluates], (group.order, group_id))

    def _take(self, node: _Node, phase: Phase, turns: tuple[bool, ...]) -> str | None:
        """Take the first session that stands in `phase`.

        `turns` says whether those that evaluate come before the others (True, False), after them,
        or alone.
        """
        for evaluates in turns:
            session_id = self._first(node, phase, evaluates)
            if session_id is not None:
                heapq.heappop(node.heaps[phase, evaluates])
                return session_id
        return None

    def _first(self, node: _Node, phase: Phase, evaluates: bool) -> str | None:
        heap = node.heaps.get((phase, evaluates), [])
        while heap:
            session_id = heap[0][1]
            attempt = self._attempts.get(session_id)
            if attempt is not None and attempt.phase == phase and not attempt.stopped:
                return session_id
            heapq.heappop(heap)
        return None

    def _set_waiting(self, session_id: str) -> None:
        """Let a session wait for a node, as the first time."""
        attempt = self._attempts[session_id]
        self._move(attempt, "waiting", None)
        if self._groups[attempt.group_id].node is None:
            self._enqueue_group(attempt.group_id)
        else:
            self._push(session_id)

    def _pass_on(self, session_id: str, phase: Phase, following: Phase) -> None:
        attempt = self._attempts.get(session_id)
        if attempt is None or attempt.phase != phase or attempt.node is None:
            return
        self._move(attempt, following, attempt.node)
        self._push(session_id)

    def _begin(
        self,
        session_id: str,
        phase: Phase,
        action: Literal["prepare", "run", "judge"],
        node: str,
    ) -> None:
        attempt = self._attempts[session_id]
        self._move(attempt, phase, node)
        self._actions.append(Action(action, attempt.group_id, session_id, node))

    def _move(self, attempt: _Attempt, phase: Phase, node: str | None) -> None:
        self._count(attempt, -1)
        attempt.phase = phase
        attempt.node = node
        self._count(attempt, 1)

    def _count(self, attempt: _Attempt, change: int) -> None:
        """Count an attempt into its phase, or out of it, on its node too."""
        self.counts[attempt.phase] += change
        if attempt.node is None:
            return
        node = self._nodes[attempt.node]
        node.counts[attempt.phase] += change
        runs_or_will = attempt.phase in ("preparing", "ready", "running")
        if runs_or_will and self._groups[attempt.group_id].evaluates:
            node.evaluating += change

    def _push(self, session_id: str) -> None:
        """Put a session among those of its group's node that wait for the phase after its own."""
        attempt = self._attempts[session_id]
        group = self._groups[attempt.group_id]
        assert group.node is not None
        heap = self._nodes[group.node].heaps.setdefault((attempt.phase, group.evaluates), [])
        heapq.heappush(heap, (attempt.order, session_id))

    def _close_if_over(self, group_id: str) -> None:
        group = self._groups[group_id]
        if group.unended:
            return
        del self._groups[group_id]
        if group.node is not None:
            self._nodes[group.node].groups.discard(group_id)
        self._actions.append(Action("close", group_id))
