"""The outcome of a session: a table from what happened to a status, a reward and an error.

| the first that holds | status | reward |
| --- | --- | --- |
| the engine, the recorder or the machine failed (`faults`) | `infrastructure` | none |
| the judge was asked, and could not judge | `unjudged` | none |
| a budget was used up, and no later call was completed | `budget` | the judge's |
| stopped at the session's time limit | `timeout` | the judge's |
| stopped at a limit of its box; exit status other than 0; ended by a signal | `failed` | the judge's |
| exit status 0 | `completed` | the judge's |

A session without a completed call is not judged, and has no reward: there is nothing of the policy's to judge.

Counts of a rollout while it runs, for its progress line.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rolltap.addons.store.records import UNREWARDED, Session, SessionStatus
from rolltap.trainer.rollouts.facts import Facts, place_of
from rolltap.trainer.rollouts.judges.verdict import Judged
from rolltap.trainer.rollouts.runtimes.runtime import Ended, StopReason

_STOPPED: Mapping[StopReason, str] = MappingProxyType(
    {
        "memory": "stopped: its programs used more memory than the limit",
        "processes": "stopped: it had more processes than the limit",
        "disk": "stopped: it wrote more than the limit of its disk",
    }
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status, reward and error of a session's row.

    `ended` is the status that an unjudged session has without its judge; None for others.
    """

    status: SessionStatus
    reward: float | None = None
    error: str | None = None
    ended: SessionStatus | None = None


def is_judged(facts: Facts) -> bool:
    """Return True for a session whose result is the policy's: the judge is asked."""
    return facts.fault is None and facts.completed_calls > 0


def outcome(ended: Ended, timeout: float, facts: Facts, judged: Judged | None) -> Outcome:
    """Return the outcome of a session. `timeout` is its time limit in seconds.

    `judged` is None for a session that was not judged. Raises `ValueError` when it is given although `is_judged` is
    False, or missing although it is True.
    """
    if (judged is not None) != is_judged(facts):
        raise ValueError("a session is judged if and only if it has a completed call and no fault")
    status, how = _ending(ended, timeout)
    if facts.fault is not None:
        return Outcome("infrastructure", None, f"{facts.fault} ({how or 'the harness ended with status 0'})")
    if facts.budget is not None:
        status, how = "budget", _joined(facts.budget, how)
    if judged is None:
        return Outcome(status, None, _joined("no model call was completed, so that there is no reward", how))
    if judged.reward is None:
        return Outcome("unjudged", None, _joined(judged.unjudged or "the judge gave no reward", how), status)
    return Outcome(status, judged.reward, how)


def _ending(ended: Ended, timeout: float) -> tuple[SessionStatus, str | None]:
    """Return the status by the end of the harness alone, and why it is not `completed`."""
    if ended.stopped == "timeout":
        return "timeout", f"stopped after {timeout:g} s"
    if ended.stopped is not None:
        return "failed", _STOPPED[ended.stopped]
    if ended.status is None or ended.status < 0:
        number = "an unknown signal" if ended.status is None else f"signal {-ended.status}"
        return "failed", f"the harness was ended by {number}"
    if ended.status:
        return "failed", f"the harness ended with status {ended.status}"
    return "completed", None


def _joined(why: str, how: str | None) -> str:
    return why if how is None else f"{why} ({how})"


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
