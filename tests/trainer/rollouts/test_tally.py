from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.facts import Facts
from rolltap.trainer.rollouts.outcomes import Tally

GOOD = Facts(completed_calls=1)


def add(tally, status, reward=None, facts=GOOD, again=False, name="s", task="t"):
    tally.add(Session(session_id=name, task_id=task, status=status, reward=reward), facts, again=again)


def test_the_progress_line_has_every_count():
    tally = Tally(5)
    add(tally, "completed", 1.0)
    add(tally, "completed", 0.0, Facts(completed_calls=1, refusals=3))
    add(tally, "infrastructure", again=True)
    add(tally, "failed", 0.0)
    add(tally, "unjudged")
    assert tally.line() == (
        "4 of 5 sessions: 2 completed, 1 failed, 1 unjudged, 1 without a reward, 1 retried, "
        "3 events of refused requests"
    )


def test_places_in_a_row_that_say_nothing_of_the_policy_are_counted():
    tally = Tally(9)
    add(tally, "infrastructure", facts=GOOD, name="a")
    add(tally, "timeout", facts=Facts(), name="b")
    add(tally, "unjudged", name="c")
    assert tally.failures_in_a_row == 3
    add(tally, "failed", 0.0, name="d")
    assert tally.failures_in_a_row == 0


def test_attempts_at_one_session_are_one_place():
    tally = Tally(9)
    for name in ("a", "a~1", "a~2", "b"):
        add(tally, "infrastructure", again=True, name=name)
    assert tally.failures_in_a_row == 2


def test_one_task_of_several_says_nothing_of_the_others():
    tally = Tally(9, tasks=2)
    for name in "abcdef":
        add(tally, "infrastructure", name=name, task="bad")
    assert tally.failures_in_a_row == 0
    add(tally, "infrastructure", name="g", task="other")
    assert tally.failures_in_a_row == 7
