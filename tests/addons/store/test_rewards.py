"""Rewards from elsewhere: which sessions may have one, and what their new rows say."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import UNREWARDED, Event, Session
from rolltap.addons.store.rewards import GivenReward, give_reward, session_rows
from rolltap.addons.store.tables import RunWriter
from tests.factories import START, make_call


@pytest.fixture
def writer(run):
    with RunWriter(run, "never") as writer:
        writer.add_call(make_call(version="3", finished_at=START))
        yield writer


def reward(value=1.0, **fields):
    return GivenReward(value=value, source="a test", **fields)


def test_a_session_of_which_only_calls_are_known_gets_a_row(writer):
    session = give_reward(writer, "s", reward(0.5, task="sort", parts={"a": 1}))
    assert [session] == session_rows(writer.run, "s")
    assert session.status == "completed"
    assert session.reward == 0.5
    assert session.revision == 0
    assert session.task_id == session.group_id == "sort"
    assert session.policy_version == "3"
    assert session.parts == {"a": 1.0}
    assert session.evidence == {"reward_from": "a test"}
    assert session.started_at == session.finished_at == START


def test_both_rows_are_kept(writer):
    writer.add_session(
        Session(
            session_id="s", status="failed", exit_status=1, error="it fell", evidence={"log": "x"}
        )
    )
    give_reward(writer, "s", reward(0.5))
    give_reward(writer, "s", reward(1), change=True)
    rows = session_rows(writer.run, "s")
    assert [(row.reward, row.revision) for row in rows] == [(None, 0), (0.5, 1), (1.0, 2)]
    third = rows[-1]
    assert (third.status, third.error, third.exit_status) == ("failed", "it fell", 1)
    assert third.evidence == {"log": "x", "reward_from": "a test"}


def test_a_reward_that_was_given_is_changed_only_on_request(writer):
    give_reward(writer, "s", reward(0.5))
    with pytest.raises(InputError, match=r"has the reward 0\.5 already"):
        give_reward(writer, "s", reward(0.5))
    assert len(session_rows(writer.run, "s")) == 1


@pytest.mark.parametrize("status", ["infrastructure", "cancelled"])
@pytest.mark.parametrize("change", [False, True])
def test_a_session_that_the_agent_could_not_do_has_no_reward(writer, status, change):
    writer.add_session(Session(session_id="s", status=status, error="the engine died"))
    with pytest.raises(InputError, match=f"the status {status}, and no reward: the engine died"):
        give_reward(writer, "s", reward(), change=change)


@pytest.mark.parametrize(
    ("evidence", "exit_status", "status"),
    [
        ({}, 0, "completed"),
        ({}, 1, "failed"),
        ({}, None, "timeout"),
        ({"ended": "budget"}, 0, "budget"),
        ({"ended": "failed"}, None, "failed"),
        ({"ended": "timeout"}, None, "timeout"),
        ({"ended": "cancelled"}, 0, "completed"),
    ],
)
def test_an_unjudged_session_has_the_outcome_that_the_rollout_noted_or_its_harness(
    writer, evidence, exit_status, status
):
    unjudged = {"status": "unjudged", "evidence": evidence, "error": "the judge died"}
    writer.add_session(Session(session_id="s", exit_status=exit_status, **unjudged))
    session = give_reward(writer, "s", reward())
    assert (session.status, session.error) == (status, None)
    assert session.status not in UNREWARDED


def test_a_session_without_a_completed_call_has_no_reward(writer):
    writer.add_call(make_call(1, session_id="t", status="aborted"))
    writer.add_session(Session(session_id="u", status="completed"))
    for session_id in ("t", "u"):
        with pytest.raises(InputError, match="no completed call"):
            give_reward(writer, session_id, reward())
    with pytest.raises(InputError, match="has no session 'v'"):
        give_reward(writer, "v", reward())


def test_a_session_that_a_rollout_runs_has_no_reward_from_elsewhere(writer):
    writer.add_event(Event(kind="session_started", session_id="s", detail="{}"))
    with pytest.raises(InputError, match="the rollout that started it has not ended it"):
        give_reward(writer, "s", reward())
    writer.add_session(Session(session_id="s", status="completed"))
    assert give_reward(writer, "s", reward()).revision == 1


@pytest.mark.parametrize(
    ("before", "given", "after"),
    [
        ("", {}, ("", "")),
        ("", {"task": "t"}, ("t", "t")),
        ("s", {"task": "t"}, ("t", "t")),  # alone in a group of its own
        ("g", {"task": "t"}, ("t", "g")),
        ("g", {"task": "t", "group": "h"}, ("t", "h")),
        ("s", {"group": "h"}, ("", "h")),
    ],
)
def test_a_session_of_its_own_joins_the_group_of_its_task(writer, before, given, after):
    writer.add_session(Session(session_id="s", status="completed", group_id=before))
    session = give_reward(writer, "s", reward(**given))
    assert (session.task_id, session.group_id) == after


def test_of_two_at_the_same_time_one_counts(writer):
    def give(value):
        with RunWriter(writer.run, "never") as own:
            try:
                return give_reward(own, "s", reward(value)).reward
            except InputError:
                return None

    with ThreadPoolExecutor(4) as pool:
        given = [value for value in pool.map(give, range(8)) if value is not None]
    assert [session.reward for session in session_rows(writer.run, "s")] == given
    assert len(given) == 1


@given(st.floats() | st.integers() | st.booleans() | st.text() | st.none())
def test_only_a_finite_number_whose_square_is_one_too_is_a_reward(value):
    right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e12
    try:
        given = reward(value).value
    except InputError:
        assert not right
    else:
        assert right
        assert type(given) is float
