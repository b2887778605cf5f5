"""Budgets of a session, and the sessions that ended because they had used one up.

The recorder refuses calls over a budget, and tells the harness as its API tells it. A harness may go on all the same:
one whose prompt is too long compacts its history. So a budget has ended a session only if no later call was completed.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from rolltap.trainer.rollouts.faults import Asked, Told


class Budget(BaseModel):
    """Budgets of one session. None is no limit. A session that used one up has the status `budget`.

    Attributes:
        calls: Model calls.
        sampled_tokens: Sampled tokens of all calls together.
        prompt_tokens: Tokens of the prompt of one call. A longer one is refused as by a model with that window, so that
            harnesses compact their history.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: int | None = Field(default=None, ge=1)
    sampled_tokens: int | None = Field(default=None, ge=1)
    prompt_tokens: int | None = Field(default=None, ge=1)

    def options(self) -> dict[str, str]:
        """Return the recorder's options (`rolltap_max_calls` and others) of the budgets that are set."""
        return {f"rolltap_max_{name}": str(value) for name, value in self.model_dump(exclude_none=True).items()}


def find_budget(calls: Sequence[Asked], events: Sequence[Told]) -> str | None:
    """Return the budget that ended a session whose calls have ended, in words, or None.

    When there are several, the newest is named.
    """
    told = [event for event in events if event.kind == "budget"]
    if not told:
        return None
    last = max(told, key=lambda event: event.at)
    went_on = any(call.status == "completed" and call.started_at > last.at for call in calls)
    return None if went_on else f"budget: {last.detail}"
