import pytest

from rolltap.trainer.rollouts.config import Budget
from rolltap.trainer.rollouts.facts import EventFact, find_budget, find_fault
from tests.trainer.rollouts.test_faults import at, call, fault


def budget(second):
    return EventFact("budget", None, f"limit {second}", at(second), "POST", "/v1/messages")


@pytest.mark.parametrize(
    ("calls", "events", "expected"),
    [
        ([call(1)], [], None),
        ([call(1)], [budget(2)], "budget: limit 2"),
        ([call(1)], [budget(2), budget(4), budget(3)], "budget: limit 4"),
        # a harness that compacts its history goes on
        ([call(1), call(3, "compaction")], [budget(2)], None),
        ([call(1), call(3, status="failed")], [budget(2)], "budget: limit 2"),
        # a reply that was cut began before the event
        ([call(1), call(2)], [budget(3)], "budget: limit 3"),
        ([call(1)], [fault(2)], None),
    ],
)
def test_a_budget_ended_a_session_when_no_later_call_was_completed(calls, events, expected):
    assert find_budget(calls, events) == expected


def test_a_session_whose_first_prompt_is_over_the_budget_is_no_fault_and_not_tried_again():
    assert find_fault([], [budget(1)]) is None
    assert "fault 2" in find_fault([], [budget(1), fault(2)])


def test_budgets_become_options_of_the_recorder():
    given = Budget(calls=3, prompt_tokens=100)
    assert given.options() == {"rolltap_max_calls": "3", "rolltap_max_prompt_tokens": "100"}
