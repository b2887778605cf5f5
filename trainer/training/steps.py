"""The sessions of a step: their ids, those that are on the disk already, and the tasks of its further groups."""

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter

from rolltap.addons.store.records import Session
from rolltap.trainer.grpo.advantages import rewards_differ
from rolltap.trainer.rollouts.groups import Group, attempt_of, place_of
from rolltap.trainer.rollouts.resume import TRIED_AGAIN
from rolltap.trainer.rollouts.tasks.task import Task
from rolltap.trainer.traces.outcomes import RewardRules, label_session
from rolltap.trainer.versions import Version

_PLACE = re.compile(r"(.+-([0-9a-f]{8}\.[0-9]+)\.[0-9]+)-([0-9]+)\.([0-9]+)")
"""A session's place: the group that it was run in, with the run and the step of its weights; its index in the group;
and the training's attempt. The group of its row may be another one since somebody changed it."""


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
            found = _PLACE.fullmatch(place_of(session.session_id))
            if found and session.status not in TRIED_AGAIN and _sampled_by(session, found[2]):
                index, attempt = int(found[3]), (int(found[4]), attempt_of(session.session_id))
                group = self._groups[found[1]]
                group[index] = min(group.get(index, (attempt, session)), (attempt, session), key=itemgetter(0))

    def of(self, group: Group) -> dict[str, Session]:
        """Return the sessions of a group: id in `group` -> session of the first attempt that need not be tried again.

        Those of `TRIED_AGAIN` and sessions of other weights are not among them: they are run again.
        """
        finished = self._groups[group.group_id]
        return {name: finished[index][1] for index, name in enumerate(group.session_ids) if index in finished}


def _sampled_by(session: Session, weights: str) -> bool:
    return (session.policy_version or "").rpartition(".")[0] == weights


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
