"""Counts of a rollout while it runs, for its progress line."""

from collections import Counter
from dataclasses import dataclass, field

from rolltap.addons.store.records import UNREWARDED, Session
from rolltap.trainer.rollouts.facts import Facts
from rolltap.trainer.rollouts.groups import place_of


@dataclass(slots=True)
class Tally:
    """Counts over the sessions that have ended, of `total` places of `tasks` tasks.

    A place is done when its session is not tried again.
    """

    total: int
    tasks: int = 1
    done: int = 0
    refusals: int = 0
    tried_again: int = 0
    left_out: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    _useless: dict[str, str] = field(default_factory=dict)
    """Place -> task of the sessions that ended last without telling anything of the policy."""

    @property
    def in_a_row(self) -> int:
        """Number of places that ended last without telling anything of the policy, whatever the number of attempts.

        These are failures of infrastructure, sessions without a completed call, and those without a judgement. It is 0
        while all are of one task of several: what is wrong with that task says nothing of the others.
        """
        return len(self._useless) if len(set(self._useless.values())) >= min(self.tasks, 2) else 0

    def add(self, session: Session, facts: Facts, *, again: bool) -> None:
        """Add a session that has ended. `again` is True when it is tried again."""
        self.refusals += facts.refusals
        if session.status in ("infrastructure", "unjudged") or not facts.completed_calls:
            self._useless[place_of(session.session_id)] = session.task_id
        else:
            self._useless.clear()
        if again:
            self.tried_again += 1
            return
        self.done += 1
        self.statuses[session.status] += 1
        self.left_out += session.reward is None or session.status in UNREWARDED

    def line(self) -> str:
        """Return the counts as one line."""
        counts = [f"{number} {status}" for status, number in self.statuses.most_common()]
        for number, what in (
            (self.left_out, "without a reward"),
            (self.tried_again, "tried again"),
            (self.refusals, "events of refused requests"),
        ):
            counts += [f"{number} {what}"] if number else []
        return f"{self.done} of {self.total} sessions: {', '.join(counts)}"
