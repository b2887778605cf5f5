"""The outcome of a session: whose fault it is, when it is started again, and what becomes a
reward.

The first line that holds is the status of a session's row:

| status | what happened | judged | reward | started again |
| --- | --- | --- | --- | --- |
| `cancelled` | the rollout was stopped or killed while it ran | no | none | by the next start |
| `infrastructure` | engine, recorder or machine failed: a fault | no | none | at once, next start |
| `diverged` | a fork that differed before its call, or ended (`Facts.diverged`) | no | none | no |
| `unjudged` | the judge was asked, and could not judge | asked | none | by the next start |
| `budget` | a budget was used up, and no later call was completed | yes | the judge's | no |
| `timeout` | stopped at the session's time limit | yes | the judge's | no |
| `failed` | a limit of its box; exit status other than 0; a signal | yes | the judge's | no |
| `completed` | exit status 0 | yes | the judge's | no |

**Whose fault.** The rows that the recorder wrote decide, not the program's exit status.

- It is ours (a fault, `find_fault`) if no token was sampled: a reward would say nothing of the
  policy. Side questions, calls of the role `auxiliary`, count only in a session without other
  calls. A first prompt that is over a budget is no fault: a retry would be refused too.
- It is ours if a call failed for a reason of ours (an event `fault`; a silence of the engine
  towards everybody ends in one), or began and could not be recorded, and the harness did not
  recover. It recovered if a later call of the same role, or of the agent itself, was completed. A
  request that was refused before it became a call has no role: any later call but a side question
  is its recovery. Side questions, model lists and token counts are no part of the task: once there
  are other calls, their failures do not count.
- All else is the agent's: wrong requests, limits of the session and the context window, budgets,
  its time limit while it was being answered, a call in the engine's queue that it left, and its
  exit status. A harness that was killed too: an agent can kill its own harness, and the kernel's
  kill for want of memory looks the same.
- A judge that cannot judge is nobody's fault in the session: its reward is open.

**What is started again.** A session of `infrastructure` is retried in the same rollout up to
`retries` times, after a pause, as another attempt (`ID~1`) at its place; not when it cannot be run
at all (`Facts.permanent`: a missing path, image or program; a judge whose program is missing; a
shell's status 126 or 127 without a call). The next start of the rollout or training starts sessions
with a status of `STARTED_AGAIN` again. All others are final: the same command uses them again.
After `give_up_after` consecutive infrastructure failures on a node the node gets no more sessions
(`Failures`), and without a node the rollout stops. Sessions without a completed call and unjudged
ones count as such, because they too say nothing of the policy.

**What becomes a reward.** The judge's number. A session without a completed call is not judged and
has none, whatever its status: there is nothing of the policy's to judge. `infrastructure` and
`cancelled` never enter a group of GRPO. A recipe's `[outcomes]` gives judged sessions of `budget`,
`timeout` and `failed` another reward or leaves them out. When an unjudged session is given a reward
later, it gets the status that it would have had (`Outcome.ended`).
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rolltap.addons.store.records import UNREWARDED, Session, SessionStatus
from rolltap.trainer.boxes.runtime import Ended, StopReason
from rolltap.trainer.judges.verdict import Judged
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.queue import Phase
from rolltap.trainer.traces.facts import Facts

_STOPPED: dict[StopReason, str] = {
    "memory": "stopped: its programs used more memory than the limit, 'limits.memory_gib' of"
    " the task",
    "processes": "stopped: it had more processes than the limit, 'limits.processes' of the task",
    "disk": "stopped: it wrote more than the limit of its disk, 'limits.disk_gib' of the task",
}
_SHOWN: tuple[Phase, ...] = ("preparing", "ready", "running", "judging")
"""Phases that the progress line counts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status, reward and error of a session's row, and the status that an unjudged one has without
    its judge."""

    status: SessionStatus
    reward: float | None = None
    error: str | None = None
    ended: SessionStatus | None = None

    def set_in(self, session: Session) -> None:
        """Set the outcome in a session's row."""
        session.status = self.status
        session.reward = self.reward
        session.error = self.error
        if self.ended is not None:  # for a reward that somebody gives later
            session.evidence = {**session.evidence, "ended": self.ended}


def is_judged(facts: Facts) -> bool:
    """Return True for a session whose result is the policy's: the judge is asked."""
    return facts.fault is None and facts.completed_calls > 0


def outcome(
    ended: Ended,
    timeout: float,
    facts: Facts,
    judged: Judged | None,
) -> Outcome:
    """Return the outcome of a session. `timeout` is its time limit in seconds.

    `judged` is None for a session that was not judged. Raises `ValueError` when it is given
    although `is_judged` is False, or missing although it is True.
    """
    if (judged is not None) != is_judged(facts):
        raise ValueError("a session is judged if and only if it has a completed call and no fault")
    status, how = _ending(ended, timeout)
    if facts.fault is not None:
        end = how or "the harness ended with status 0"
        return Outcome("infrastructure", error=f"{facts.fault} ({end})")
    if facts.budget is not None:
        status = "budget"
        how = _joined(facts.budget, how)
    if judged is None:
        why = "no model call was completed, so that there is no reward"
        return Outcome(status, error=_joined(why, how))
    if judged.reward is None:
        why = judged.unjudged or "the judge gave no reward"
        return Outcome("unjudged", error=_joined(why, how), ended=status)
    return Outcome(status, judged.reward, how)


def _ending(ended: Ended, timeout: float) -> tuple[SessionStatus, str | None]:
    """Return the status by the end of the harness alone, and why it is not `completed`."""
    if ended.stopped == "timeout":
        limit = f"{timeout:g} s, the limit of --timeout or of the task's 'timeout'"
        return "timeout", f"stopped after {limit}"
    if ended.stopped is not None:
        return "failed", _STOPPED[ended.stopped]
    if ended.status is None:
        return "failed", "the harness was ended by an unknown signal"
    if ended.status < 0:
        return "failed", f"the harness was ended by signal {-ended.status}"
    if ended.status:
        return "failed", f"the harness ended with status {ended.status}"
    return "completed", None


def _joined(why: str, how: str | None) -> str:
    return why if how is None else f"{why} ({how})"


@dataclass(slots=True)
class Failures:
    """Infrastructure failures in a row, of one group or one node. `tasks` are those of the whole
    rollout."""

    tasks: Collection[str] = ()
    _failures: dict[str, str] = field(default_factory=dict)
    """Place -> task of the sessions that ended last and say nothing of the policy."""

    def add(self, session: Session, facts: Facts) -> None:
        """Add a session that has ended, and was not stopped by anybody."""
        nothing = not facts.completed_calls and session.status != "diverged"
        if session.status in ("infrastructure", "unjudged") or nothing:
            self._failures[SessionName.parse(session.session_id).place] = session.task_id
        else:
            self._failures.clear()

    @property
    def in_a_row(self) -> int:
        """Number of consecutive infrastructure failures, each place counted once.

        Sessions without a completed call or a judgement count too. It is 0 while all are of one
        task of several: what is wrong with that task says nothing of the others.
        """
        failed_tasks = set(self._failures.values())
        if len(failed_tasks) < min(len(self.tasks), 2):
            return 0
        return len(self._failures)


@dataclass(slots=True)
class Tally:
    """Counts over ended sessions, for the progress line. Of `total` places, one is done when it is
    not retried.

    `phases` are the numbers of sessions in each phase of the scheduler.
    """

    phases: Mapping[Phase, int] = field(default_factory=dict)
    total: int = 0
    done: int = 0
    refusals: int = 0
    retried: int = 0
    unrewarded: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    rewards: float = 0.0
    """Sum of the rewards so far."""

    def add(self, session: Session, facts: Facts | None, *, again: bool) -> None:
        """Add a session that has ended. It is retried if `again`, and was stopped by somebody if
        `facts` is None."""
        if facts is not None:
            self.refusals += facts.refusals
        if again:
            self.retried += 1
            return
        self.done += 1
        self.statuses[session.status] += 1
        self.unrewarded += session.reward is None or session.status in UNREWARDED
        self.rewards += session.reward or 0.0

    def line(self) -> str:
        """Return the counts, the mean of the rewards, and what is waited for, as one line."""
        counts: dict[str, int] = dict(self.statuses.most_common())
        counts["without a reward"] = self.unrewarded
        counts["retried"] = self.retried
        counts["events of refused requests"] = self.refusals
        for phase in _SHOWN:
            counts[phase] = self.phases.get(phase, 0)
        told = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
        line = f"{self.done} of {self.total} sessions: {told}"
        rewarded = self.done - self.unrewarded
        if rewarded:
            line += f"; mean reward {self.rewards / rewarded:.3g}"
        return line
