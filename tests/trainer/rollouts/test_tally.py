from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.facts import Facts
from rolltap.trainer.rollouts.tally import Tally

GOOD = Facts(completed_calls=1)


def add(tally, status, reward=None, facts=GOOD, again=False):
    tally.add(Session(session_id="s", status=status, reward=reward), facts, again=again)


def test_the_progress_line_has_every_count():
    tally = Tally(5)
    add(tally, "completed", 1.0)
    add(tally, "completed", 0.0, Facts(completed_calls=1, refusals=3))
    add(tally, "infrastructure", again=True)
    add(tally, "failed", 0.0)
    add(tally, "unjudged")
    assert tally.line() == (
        "4 of 5 sessions: 2 completed, 1 failed, 1 unjudged, 1 without a reward, 1 tried again, 3 requests refused"
    )


def test_sessions_in_a_row_that_say_nothing_of_the_policy_are_counted():
    tally = Tally(9)
    add(tally, "infrastructure", facts=GOOD)
    add(tally, "timeout", facts=Facts())
    assert tally.in_a_row == 2
    add(tally, "unjudged")
    assert (tally.in_a_row, tally.unjudged_in_a_row) == (3, 1)
    add(tally, "failed", 0.0)
    assert (tally.in_a_row, tally.unjudged_in_a_row) == (0, 0)
