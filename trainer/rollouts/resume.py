"""Going on with a rollout that was stopped or killed. The run folder is all that is known of it.

A session with a row is used again, unless its outcome says nothing about the agent: then it is tried again under the id
of the next attempt. One that was begun and has no row was interrupted: it gets a row `cancelled`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

from rolltap.addons.store.records import Session, SessionStatus
from rolltap.trainer.rollouts.groups import Group, attempt_of, next_attempt, place_of
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.rollouts.session import end_session
from rolltap.trainer.rollouts.started import interrupted_sessions
from rolltap.trainer.rollouts.tasks.task import Task

TRIED_AGAIN: frozenset[SessionStatus] = frozenset({"infrastructure", "cancelled"})
"""Outcomes that say nothing about the agent."""
_ROUND = re.compile(r"0|[1-9][0-9]*")


def end_interrupted(recorder: Recorder) -> None:
    """Give a row `cancelled` to each session of the recorder's run that was begun and has none.

    Call it with the run's `rollout_lock`. Raises as `Recorder.end`.
    """
    for session in interrupted_sessions(recorder.path):
        end_session(recorder, session, None)


class Recorded:
    """The sessions that a run has: which of a group are used again, and under which ids the others are run."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        self._places: defaultdict[str, list[Session]] = defaultdict(list)
        self._rounds: defaultdict[str, set[int]] = defaultdict(set)
        for session in sessions:
            self._places[place_of(session.session_id)].append(session)
            base, dot, number = session.group_id.rpartition(".")
            if dot and _ROUND.fullmatch(number):
                self._rounds[base].add(int(number))

    def group(self, task: Task, key: str, sessions: int, *, further: bool) -> Group:
        """Return the group to go on with: the newest of the task and the key, or with `further` one after it.

        Its session ids are those of first attempts.
        """
        base = f"{task.id}-{key}"
        newest = max(self._rounds[base], default=-1)
        number = newest + 1 if further else max(newest, 0)
        return Group(task, f"{base}.{number}", [f"{base}.{number}-{index}" for index in range(sessions)])

    def attempts(self, group: Group) -> list[Session]:
        """Return all recorded sessions at the places of a group, in the order of the places and attempts."""
        return [
            session
            for place in group.session_ids
            for session in sorted(self._places[place], key=lambda session: attempt_of(session.session_id))
        ]

    def missing(self, group: Group) -> Group:
        """Return the group with the ids of the sessions that are still to be run: new places, and further attempts."""
        ids = []
        for place in group.session_ids:
            attempts = self.attempts(Group(group.task, group.group_id, [place]))
            if not attempts:
                ids.append(place)
            elif all(session.status in TRIED_AGAIN for session in attempts):
                ids.append(next_attempt(attempts[-1].session_id))
        return Group(group.task, group.group_id, ids)
