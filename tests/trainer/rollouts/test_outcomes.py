"""The table of outcomes row by row, and the counts of a rollout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.store.records import UNREWARDED, Session
from rolltap.trainer.boxes.runtime import Ended
from rolltap.trainer.judges.verdict import Judged
from rolltap.trainer.rollouts.outcomes import Failures, Outcome, Tally, is_judged, outcome
from rolltap.trainer.traces.facts import Facts

GOOD = Facts(completed_calls=2)
OVER = GOOD._replace(budget="budget: 3 calls")
DONE = Ended(0)
FAILED = Ended(1)
STOPPED = Ended(None, "timeout")
HALF = Judged(reward=0.5)
NO_PYTEST = Judged(unjudged="no pytest")
LONG = Facts(budget="budget: long")
BY_FAULT = OVER._replace(fault="x")
EMPTY = "no model call was completed, so that there is no reward"
BY_STATUS = "the harness ended with status 1"
OF_MEMORY = "stopped: its programs used more memory than the limit, 'limits.memory_gib' of the task"
NO_REWARD = f"the judge gave no reward ({BY_STATUS})"
OF_LENGTH = f"{EMPTY} (budget: long ({BY_STATUS}))"
LATE = "stopped after 60 s, the limit of --timeout or of the task's 'timeout'"


@pytest.mark.parametrize(
    ("ended", "facts", "judged", "expected"),
    [
        (DONE, GOOD, HALF, ("completed", 0.5)),
        (FAILED, GOOD, HALF, ("failed", 0.5, BY_STATUS)),
        (Ended(-9), GOOD, HALF, ("failed", 0.5, "the harness was ended by signal 9")),
        (STOPPED, GOOD, HALF, ("timeout", 0.5, LATE)),
        (Ended(None, "memory"), GOOD, HALF, ("failed", 0.5, OF_MEMORY)),
        (DONE, OVER, HALF, ("budget", 0.5, "budget: 3 calls")),
        (STOPPED, OVER, HALF, ("budget", 0.5, f"budget: 3 calls ({LATE})")),
        (DONE, GOOD, NO_PYTEST, ("unjudged", None, "no pytest", "completed")),
        (FAILED, GOOD, Judged(), ("unjudged", None, NO_REWARD, "failed")),
        (FAILED, Facts("no engine"), None, ("infrastructure", None, f"no engine ({BY_STATUS})")),
        (DONE, BY_FAULT, None, ("infrastructure", None, "x (the harness ended with status 0)")),
        (DONE, Facts(), None, ("completed", None, EMPTY)),
        (STOPPED, Facts(), None, ("timeout", None, f"{EMPTY} ({LATE})")),
        (FAILED, LONG, None, ("budget", None, OF_LENGTH)),
    ],
)
def test_a_session_has_the_outcome_of_the_first_row_that_holds(ended, facts, judged, expected):
    assert outcome(ended, 60, facts, judged) == Outcome(*expected)


ENDS = st.one_of(
    st.builds(Ended, st.integers(-64, 255)),
    st.builds(Ended, st.none(), st.sampled_from(["timeout", "memory", "processes", "disk"])),
)
FACTS = st.builds(
    Facts,
    fault=st.none() | st.just("a fault"),
    budget=st.none() | st.just("a budget"),
    completed_calls=st.integers(0, 2),
    refusals=st.integers(0, 2),
)
JUDGED = st.builds(Judged, reward=st.none() | st.floats(allow_nan=False, allow_infinity=False))


@given(ENDS, FACTS, JUDGED)
def test_a_reward_is_the_judges_and_none_comes_without_it_or_with_an_outcome_that_has_none(
    ended, facts, judged
):
    found = outcome(ended, 60, facts, judged if is_judged(facts) else None)
    assert found.reward == (judged.reward if is_judged(facts) else None)
    assert found.reward is None or found.status not in UNREWARDED
    assert (found.status == "infrastructure") == (facts.fault is not None)
    assert (found.error is None) == (found.status == "completed" and found.reward is not None)
    with pytest.raises(ValueError, match="judged if and only if"):
        outcome(ended, 60, facts, None if is_judged(facts) else judged)


def add(tally, status, reward=None, facts=GOOD, again=False):
    session = Session(session_id="s", task_id="t", status=status, reward=reward)
    tally.add(session, facts, again=again)


def test_the_progress_line_has_every_count():
    tally = Tally(total=5)
    add(tally, "completed", 1.0)
    add(tally, "completed", 0.0, Facts(completed_calls=1, refusals=3))
    add(tally, "infrastructure", again=True)
    add(tally, "failed", 0.0)
    add(tally, "unjudged")
    tally.phases = {"running": 1}
    assert tally.line() == (
        "4 of 5 sessions: 2 completed, 1 failed, 1 unjudged, 1 without a reward, 1 retried, "
        "3 events of refused requests, 1 running; mean reward 0.333"
    )


def fail(failures, status, *names, facts=GOOD, task="t"):
    for name in names:
        failures.add(Session(session_id=name, task_id=task, status=status), facts)


def test_places_in_a_row_that_say_nothing_of_the_policy_are_counted_each_once():
    failures = Failures()
    fail(failures, "infrastructure", "a")
    fail(failures, "timeout", "b", facts=Facts())
    fail(failures, "unjudged", "c")
    fail(failures, "infrastructure", "a~1", "a~2")
    assert failures.in_a_row == 3
    fail(failures, "failed", "d")
    assert failures.in_a_row == 0


def test_failures_of_one_task_of_several_say_nothing_of_the_others():
    failures = Failures({"bad", "other"})
    fail(failures, "infrastructure", *"abcdef", task="bad")
    assert failures.in_a_row == 0
    fail(failures, "infrastructure", "g", task="other")
    assert failures.in_a_row == 7


def test_forks_that_diverge_do_not_end_a_rollout_as_failures_of_ours_do():
    failures = Failures()
    tally = Tally()
    diverged = Facts(diverged="diverged at call 1")
    fail(failures, "diverged", *"abcdefghi", facts=diverged)
    add(tally, "diverged", facts=diverged)
    assert failures.in_a_row == 0
    assert tally.unrewarded == 1
