"""The sessions of a step: their ids, those that are on the disk already, and the tasks of its further groups."""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter

from rolltap.addons.store.records import Session
from rolltap.trainer.grpo.advantages import rewards_differ
from rolltap.trainer.rollouts.groups import Group
from rolltap.trainer.rollouts.resume import TRIED_AGAIN
from rolltap.trainer.rollouts.tasks.task import Task
from rolltap.trainer.traces.outcomes import RewardRules, label_session
from rolltap.trainer.versions import Version

_PLACE = re.compile(r"-([0-9]+)\.([0-9]+)(?:~([0-9]+))?")
"""End of a session's id: its index in the group, the training's attempt, and the number of earlier tries in that."""
_WEIGHTS = re.compile(r"-([0-9a-f]{8}\.[0-9]+)\.[0-9]+$")
"""End of a group's id: the run and the step of the weights, and its position."""


def step_group(version: Version, position: int, task: Task, sessions: int) -> Group:
    """Return a group of a step, with the ids that its sessions get in the version's attempt.

    The group's id is `<task>-<run>.<step>.<position>`, the same in all attempts; `position` is its place in the step.
    A session's id is `<group>-<index>.<attempt>`; one that is tried again in the same attempt has `~<number>` after it.
    """
    group_id = f"{task.id}-{version.run}.{version.step}.{position}"
    return Group(task, group_id, [f"{group_id}-{index}.{version.attempt}" for index in range(sessions)])


class FinishedSessions:
    """Sessions with a row in the run folder that need not be tried again, by group and index. The weights of their step
    sampled the first token of each."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._groups: defaultdict[str, dict[int, tuple[tuple[int, int], Session]]] = defaultdict(dict)
        for session in sessions:
            found = _PLACE.fullmatch(session.session_id.removeprefix(session.group_id))
            if found and session.status not in TRIED_AGAIN and _sampled_by_its_step(session):
                index, attempt = int(found[1]), (int(found[2]), int(found[3] or 0))
                group = self._groups[session.group_id]
                group[index] = min(group.get(index, (attempt, session)), (attempt, session), key=itemgetter(0))

    def of(self, group: Group) -> dict[str, Session]:
        """Return the sessions of a group: id in `group` -> session of the first attempt that need not be tried again.

        Those of `TRIED_AGAIN` and sessions of other weights are not among them: they are run again.
        """
        finished = self._groups[group.group_id]
        return {name: finished[index][1] for index, name in enumerate(group.session_ids) if index in finished}


def _sampled_by_its_step(session: Session) -> bool:
    weights = _WEIGHTS.search(session.group_id)
    return weights is not None and (session.policy_version or "").rpartition(".")[0] == weights[1]


def has_signal(sessions: Iterable[Session], rules: RewardRules) -> bool:
    """Return True when the rewards of a group's sessions, by the recipe's rules, differ (`rewards_differ`)."""
    labels = [label_session(session, rules) for session in sessions]
    return rewards_differ([label.reward for label in labels if label.reward is not None])


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
