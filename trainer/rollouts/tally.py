"""Counts of a rollout while it runs, for its progress line."""

from collections import Counter
from dataclasses import dataclass, field

from rolltap.addons.store.records import UNREWARDED, Session
from rolltap.trainer.rollouts.facts import Facts


@dataclass(slots=True)
class Tally:
    """Counts over the sessions that have ended, of `total` places.

    A place is done when its session is not tried again. `in_a_row` is the number of sessions that ended last without
    telling anything of the policy: failures of infrastructure, sessions without a completed call, and those that the
    judge could not judge; `unjudged_in_a_row` is the number of these alone.
    """

    total: int
    done: int = 0
    in_a_row: int = 0
    unjudged_in_a_row: int = 0
    refusals: int = 0
    tried_again: int = 0
    left_out: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, session: Session, facts: Facts, *, again: bool) -> None:
        """Add a session that has ended. `again` is True when it is tried again."""
        self.refusals += facts.refusals
        unjudged = session.status == "unjudged"
        self.unjudged_in_a_row = self.unjudged_in_a_row + 1 if unjudged else 0
        useless = unjudged or session.status == "infrastructure" or not facts.completed_calls
        self.in_a_row = self.in_a_row + 1 if useless else 0
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
            (self.refusals, "requests refused"),
        ):
            counts += [f"{number} {what}"] if number else []
        return f"{self.done} of {self.total} sessions: {', '.join(counts)}"
