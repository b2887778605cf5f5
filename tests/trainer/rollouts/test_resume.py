"""Which sessions of a run are used again, and under which ids the others are run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.store.records import Session
from rolltap.trainer.rollouts.resume import TRIED_AGAIN, Recorded
from rolltap.trainer.rollouts.tasks.task import Task

TASK = Task(id="t", instruction="go", evaluate=["true"])
KEY = "0a1b2c3d"


def row(session_id, status="completed", group=f"t-{KEY}.0"):
    return Session(session_id=session_id, status=status, group_id=group)


def missing(rows, *, sessions=2, further=False):
    recorded = Recorded(rows)
    return recorded.missing(recorded.group(TASK, KEY, sessions, further=further)).session_ids


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ["-0", "-1"]),
        ([("-0", "completed")], ["-1"]),
        ([("-0", "failed"), ("-1", "timeout")], []),
        ([("-0", "unjudged"), ("-1", "budget")], []),
        ([("-0", "infrastructure"), ("-1", "cancelled")], ["-0~1", "-1~1"]),
        ([("-0", "infrastructure"), ("-0~1", "completed"), ("-1", "completed")], []),
        ([("-0", "cancelled"), ("-0~1", "infrastructure"), ("-1", "completed")], ["-0~2"]),
        ([("-0~10", "cancelled"), ("-0~9", "cancelled"), ("-0", "cancelled")], ["-0~11", "-1"]),
        ([("-0", "completed"), ("-1", "completed"), ("-2", "completed")], []),
    ],
)
def test_a_session_that_says_something_of_the_agent_is_used_again_and_others_are_tried_again(rows, expected):
    found = missing([row(f"t-{KEY}.0{place}", status) for place, status in rows])
    assert found == [f"t-{KEY}.0{place}" for place in expected]


def test_sessions_of_another_key_or_task_are_not_taken():
    others = [row("t-ffffffff.0-0", group="t-ffffffff.0"), row(f"u-{KEY}.0-0", group=f"u-{KEY}.0"), row("x", group="")]
    assert missing(others) == [f"t-{KEY}.0-0", f"t-{KEY}.0-1"]


def test_the_newest_round_is_gone_on_with_and_a_further_one_comes_after_it():
    rows = [row(f"t-{KEY}.{number}-0", group=f"t-{KEY}.{number}") for number in (0, 9, 10)]
    assert missing(rows) == [f"t-{KEY}.10-1"]
    assert missing(rows, further=True) == [f"t-{KEY}.11-0", f"t-{KEY}.11-1"]
    assert missing([], further=True) == [f"t-{KEY}.0-0", f"t-{KEY}.0-1"]


STATUSES = st.sampled_from(["completed", "failed", "timeout", "budget", "unjudged", "infrastructure", "cancelled"])


@given(st.lists(STATUSES, max_size=40), st.integers(1, 4))
def test_however_often_it_is_stopped_every_place_ends_once_and_no_id_is_given_twice(statuses, sessions):
    rows: list[Session] = []
    for status in statuses:
        ids = missing(rows, sessions=sessions)
        if not ids:
            break
        rows.append(row(ids[len(rows) % len(ids)], status))
    ids = [session.session_id for session in rows]
    assert len(set(ids)) == len(ids)
    ended = [session for session in rows if session.status not in TRIED_AGAIN]
    assert len(ended) + len(missing(rows, sessions=sessions)) == sessions
