"""The sessions of a step: their ids, those that are on the disk already, and the tasks of its further groups."""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.scheduler import Group
from rolltap.trainer.rollouts.task import Task
from rolltap.trainer.versions import Version

_PLACE = re.compile(r"-([0-9]+)\.([0-9]+)")
"""End of a session's id: its index in the group, and its attempt."""


def step_group(version: Version, position: int, task: Task, sessions: int) -> Group:
    """Return a group of a step, with the ids that its sessions get in the version's attempt.

    The group's id is `<task>-<run>.<step>.<position>`, the same in all attempts; `position` is its place in the step.
    A session's id is `<group>-<index>.<attempt>`.
    """
    group_id = f"{task.id}-{version.run}.{version.step}.{position}"
    return Group(task, group_id, [f"{group_id}-{index}.{version.attempt}" for index in range(sessions)])


class FinishedSessions:
    """Sessions with a row in the run folder, by group and index."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        tried: defaultdict[tuple[str, int], dict[int, Session]] = defaultdict(dict)
        for session in sessions:
            if found := _PLACE.fullmatch(session.session_id.removeprefix(session.group_id)):
                tried[session.group_id, int(found[1])][int(found[2])] = session
        self._groups: defaultdict[str, dict[int, Session]] = defaultdict(dict)
        for (group_id, index), attempts in tried.items():
            *_, last = ended = [attempts[attempt] for attempt in sorted(attempts)]
            self._groups[group_id][index] = next((session for session in ended if session.status != "error"), last)

    def of(self, groups: Sequence[Group]) -> dict[str, Session]:
        """Return the sessions of groups that are run together: id in `groups` -> session of any attempt.

        Of several attempts at a session the first without a fault (status `error`) counts, else the last. Faults count
        only when every session has ended and some are none: then the step was trained without them. Otherwise they are
        left out, to be run again.
        """
        found = {
            session_id: self._groups[group.group_id][index]
            for group in groups
            for index, session_id in enumerate(group.session_ids)
            if index in self._groups[group.group_id]
        }
        sound = {session_id: session for session_id, session in found.items() if session.status != "error"}
        return found if sound and len(found) == sum(len(group.session_ids) for group in groups) else sound


def has_signal(sessions: Iterable[Session]) -> bool:
    """Return True when the rewards of a group's sessions differ."""
    return len({session.reward for session in sessions if session.reward is not None}) > 1


def further_tasks(tasks: Sequence[Task], used: Sequence[Task], number: int, *, seed: int, step: int) -> list[Task]:
    """Return the tasks of up to `number` further groups of a step, drawn by (`seed`, `step`).

    Tasks that the step has not `used` come first. When all have come, they are drawn again.
    """
    drawn: list[Task] = []
    rng = random.Random(f"{seed}/{step}/further")
    while len(drawn) < number:
        order = rng.sample(tasks, len(tasks))
        drawn += sorted(order, key=lambda task: task in used) if not drawn else order
    return drawn[:number]
