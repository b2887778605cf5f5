"""Which sessions of a run are used again, which were interrupted, and the ids of the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Event, Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.rollouts import resume
from rolltap.trainer.rollouts.recorder import STARTED_FIELDS, started_event
from rolltap.trainer.rollouts.resume import STARTED_AGAIN, Recorded, group_key, key_parts
from rolltap.trainer.tasks.task import Task

IDS = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)


def test_the_key_of_a_group_tells_its_parts_apart():
    values = [{"a": "b"}, {"ab": ""}, {"a": "c"}, {"b": "a"}, {"a": "b", "c": None}, {"a": ["b"]}]
    keys = [group_key(key_parts(each)) for each in values]
    assert len(set(keys)) == len(values)
    assert all(len(key) == 8 and int(key, 16) >= 0 for key in keys)


TASK = Task(id="t", instruction="go", evaluate=["true"])
PARTS = {"task": "1"}
KEY = group_key(PARTS)


def row(session_id, status="completed", group=f"t-{KEY}.0"):
    return Session(session_id=session_id, status=status, group_id=group)


def missing(rows, *, sessions=2, further=False):
    recorded = Recorded(rows)
    return recorded.missing(recorded.group(TASK, PARTS, sessions, further=further)).session_ids


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ["-0", "-1"]),
        ([("-0", "completed")], ["-1"]),
        ([("-0", "failed"), ("-1", "timeout")], []),
        ([("-0", "unjudged"), ("-1", "budget")], ["-0~1"]),
        ([("-0", "infrastructure"), ("-1", "cancelled")], ["-0~1", "-1~1"]),
        ([("-0", "infrastructure"), ("-0~1", "completed"), ("-1", "completed")], []),
        ([("-0", "cancelled"), ("-0~1", "infrastructure"), ("-1", "completed")], ["-0~2"]),
        ([("-0~10", "cancelled"), ("-0~9", "cancelled"), ("-0", "cancelled")], ["-0~11", "-1"]),
        ([("-0", "completed"), ("-1", "completed"), ("-2", "completed")], []),
    ],
)
def test_a_session_that_says_something_of_the_agent_is_used_again_and_others_are_tried_again(
    rows, expected
):
    found = missing([row(f"t-{KEY}.0{place}", status) for place, status in rows])
    assert found == [f"t-{KEY}.0{place}" for place in expected]


def test_the_newest_round_is_gone_on_with_and_a_further_one_comes_after_it():
    rows = [row(f"t-{KEY}.{number}-0", group=f"t-{KEY}.{number}") for number in (0, 9, 10)]
    assert missing(rows) == [f"t-{KEY}.10-1"]
    assert missing([*rows, row(f"t-{KEY}.10-1")], further=True) == [
        f"t-{KEY}.11-0",
        f"t-{KEY}.11-1",
    ]
    first = [f"t-{KEY}.0-0", f"t-{KEY}.0-1"]
    assert missing([], further=True) == first
    others = [
        row("t-ffffffff.0-0", group="t-ffffffff.0"),
        row(f"u-{KEY}.0-0", group=f"u-{KEY}.0"),
        row("x", group=""),
    ]
    assert missing(others) == first  # of another key or task
    rows = [
        row(first[0], group="mine"),
        row(first[1], group=f"t-{KEY}.7"),
    ]  # somebody changed their groups
    assert missing(rows) == []
    assert missing(rows, further=True) == [f"t-{KEY}.1-0", f"t-{KEY}.1-1"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (None, ["1-1"]),
        ("cancelled", ["1-1~1"]),
        ("infrastructure", ["1-1~1"]),
        ("unjudged", ["2-0", "2-1"]),
        ("completed", ["2-0", "2-1"]),
    ],
)
def test_further_groups_are_begun_once_the_sessions_of_the_newest_have_run(last, expected):
    rows = [row(f"t-{KEY}.{place}") for place in ("0-0", "0-1", "1-0")]
    if last is not None:
        rows.append(row(f"t-{KEY}.1-1", last))
    assert missing(rows, further=True) == [f"t-{KEY}.{place}" for place in expected]


def told(tmp_path, rows, parts, *, further=False):
    tmp_path.mkdir()
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path, "never") as writer:
        for each in rows:
            each.task_id = "t"
            writer.add_event(started_event(each, PARTS))
    recorded = Recorded(rows)
    group = recorded.group(TASK, parts, 2, further=further)
    lacking = [recorded.missing(group)]
    return resume.resume_lines(tmp_path, recorded, [group], lacking, further=further)


def test_it_says_what_it_goes_on_with_and_why_not(tmp_path):
    rows = [row(f"t-{KEY}.0-0"), row(f"t-{KEY}.0-1", "cancelled")]
    assert told(tmp_path / "0", [], PARTS) == []
    assert told(tmp_path / "1", rows, PARTS) == [
        f"the rollout in {tmp_path / '1'} goes on with 1 session that ended before"
    ]
    changed = {"task": "1", "timeout": "2", "model": "3"}
    assert told(tmp_path / "2", rows, changed) == [
        "new groups begin for 1 task, because these changed: model, timeout"
    ]
    (_, waits) = told(tmp_path / "3", rows, PARTS, further=True)
    assert waits.startswith("sessions are missing from 1 group: they are run first")


STATUSES = st.sampled_from(
    ["completed", "failed", "timeout", "budget", "unjudged", "infrastructure", "cancelled"]
)


@given(st.lists(STATUSES, max_size=40), st.integers(1, 4))
def test_however_often_it_is_stopped_every_place_ends_once_and_no_id_is_given_twice(
    statuses, sessions
):
    rows: list[Session] = []
    for status in statuses:
        ids = missing(rows, sessions=sessions)
        if not ids:
            break
        rows.append(row(ids[len(rows) % len(ids)], status))
    ids = [session.session_id for session in rows]
    assert len(set(ids)) == len(ids)
    ended = [session for session in rows if session.status not in STARTED_AGAIN]
    assert len(ended) + len(missing(rows, sessions=sessions)) == sessions


def test_a_session_that_was_begun_and_has_no_row_is_cancelled_with_all_that_was_known(tmp_path):
    write_metadata(tmp_path, {"model": "m"})
    known = {name: f"the {name}" for name in STARTED_FIELDS}
    first, second, ended = [
        Session(session_id=name, status="completed", reward=1.0, **known)
        for name in ("first", "second", "ended")
    ]
    with RunWriter(tmp_path) as writer:
        for session in (second, ended, first):
            writer.add_event(started_event(session))
        writer.add_event(Event(kind="ended", session_id="third"))
        of_later_version = '{"task_id": "t", "status": "completed"}'  # read as far as it is known
        writer.add_event(Event(kind="session_started", session_id="later", detail=of_later_version))
        writer.add_session(ended)
    found = resume.interrupted_sessions(tmp_path)
    assert [session.session_id for session in found] == ["first", "second", "later"]
    assert (found[2].task_id, found[2].status) == ("t", "cancelled")
    for session, begun in zip(found[:2], (first, second), strict=True):
        assert (session.status, session.reward) == ("cancelled", None)
        assert session.started_at == begun.started_at
        assert {name: getattr(session, name) for name in known} == known
