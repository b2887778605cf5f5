"""Budgets: sessions that ended because they had used up what they were given.

The recorder refuses calls over a budget, and tells the harness as its API tells it. A harness may go on all the same:
one whose prompt is too long compacts its history. So a budget has ended a session only if no later call was completed.
"""

from collections.abc import Mapping, Sequence

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.faults import Asked, Told


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


def budget_options(budgets: Mapping[str, int | None]) -> dict[str, str]:
    """Return the recorder's options of budgets: the name without its `max_` -> the most, or None for no budget.

    Raises `InputError` for a budget below 1.
    """
    for name, most in budgets.items():
        if most is not None and most < 1:
            raise InputError(f"max_{name}={most}: give at least 1, or leave it out")
    return {f"rolltap_max_{name}": str(most) for name, most in budgets.items() if most is not None}
