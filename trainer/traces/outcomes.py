"""From a session's outcome and its suspicions to the reward that trains it, or the reason why it has none."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rolltap.addons.store.records import UNREWARDED, Session
from rolltap.trainer.traces.ledger import LeftOut

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Choice = Literal["judge", "exclude"] | Number


class Outcomes(BaseModel):
    """Rewards of sessions that were not completed, by status: keys of a recipe's table [outcomes].

    `"judge"` keeps the judge's reward, `"exclude"` leaves the sessions out of training and of their groups, a number is
    their reward in place of the judge's. Sessions with the status `infrastructure` or `cancelled` never have a reward,
    and neither have those that were not judged because no call of theirs was completed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    failed: Choice = "judge"
    """The harness ended with another status than 0."""
    timeout: Choice = "judge"
    """The harness was stopped at its time limit."""
    budget: Choice = "judge"
    """A budget of the session was used up."""
    unjudged: Literal["exclude"] | Number = "exclude"
    """The judge could not judge."""


Suspicious = Literal["keep", "exclude"] | Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
"""Treatment of sessions with evidence of cheating: kept, left out of training and of their groups, or kept with this
number subtracted from their reward."""


@dataclass(frozen=True, slots=True)
class RewardRules:
    """Choices of a recipe that turn outcomes into rewards."""

    outcomes: Outcomes = field(default_factory=Outcomes)
    suspicious: Suspicious = "keep"


@dataclass(frozen=True, slots=True)
class Label:
    """The reward that trains a session, or why it has none: one of the two is None."""

    reward: float | None
    reason: LeftOut | None


def session_reward(session: Session | None) -> float | None:
    """Return the recorded reward. A status of `UNREWARDED` has none, whoever recorded one."""
    return None if session is None or session.status in UNREWARDED else session.reward


def label_session(session: Session | None, rules: RewardRules) -> Label:
    """Return the label of a session by the rules. A session without a row has no reward."""
    if session is None:
        return Label(None, "no_reward")
    if session.status == "infrastructure" or session.status == "cancelled":
        return Label(None, session.status)
    choice: Choice = getattr(rules.outcomes, session.status, "judge")
    if choice == "exclude":
        return Label(None, "unjudged" if session.status == "unjudged" else "excluded")
    reward = session_reward(session)
    if choice != "judge" and (reward is not None or session.status == "unjudged"):
        reward = choice  # without either the judge was not asked: the policy did nothing
    if suspected(session) and rules.suspicious == "exclude":
        return Label(None, "suspicious")
    if reward is None:
        return Label(None, "no_reward")
    penalty = rules.suspicious if suspected(session) and isinstance(rules.suspicious, float | int) else 0.0
    return Label(reward - penalty, None)


def suspected(session: Session | None) -> dict[str, int]:
    """Return rule -> count of the suspicions in a session's row; empty without a row."""
    counts: dict[str, int] = json.loads(session.suspicions) if session is not None else {}
    return {name: count for name, count in counts.items() if count}
