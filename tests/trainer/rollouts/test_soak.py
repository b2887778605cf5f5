"""A rollout of 16 sessions on a bad day: nothing is lost, nothing is run twice, nothing is left
behind."""

from collections import Counter

import pytest

import rolltap
from rolltap.addons.store.records import UNREWARDED
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.names import SessionName
from rolltap.trainer.rollouts.resume import NOT_RUN, STARTED_AGAIN
from tests.trainer.rollouts.soak import endure, left

ACTS = {5: "kill rolltap", 12: "kill the recorder", 18: "restart the engine", 24: "kill rolltap"}


@pytest.fixture(scope="module")
def soaked(tmp_path_factory, tokenizer):
    """Roll out. Return the folder, the status of each start, and the acts."""
    folder = tmp_path_factory.mktemp("soak")
    statuses, done = endure(tokenizer, folder, ACTS)
    return folder, statuses, done


@pytest.fixture
def rows(soaked):
    return list(read_rows(soaked[0] / "run", "sessions"))


def test_it_was_a_bad_day_and_the_rollout_ended_all_the_same(soaked, rows):
    folder, statuses, done = soaked
    assert statuses[-1] == 0, (folder / "rollout.log").read_text()[-3000:]
    assert sorted(done) == sorted(ACTS.values())
    assert statuses.count(-9) == 2
    assert statuses.count(1) == 1
    assert {"completed", "infrastructure", "cancelled"} == {row["status"] for row in rows}


def test_no_session_is_lost_or_run_twice(soaked, rows):
    ids = [row["session_id"] for row in rows]
    assert len(set(ids)) == len(ids)
    begun = []
    for event in read_rows(soaked[0] / "run", "events"):
        if event["kind"] == "session_started":
            begun.append(event["session_id"])
    assert len(set(begun)) == len(begun)
    assert {*begun} <= {*ids}
    ran = set()
    ended = Counter()
    for row in rows:
        place = SessionName.parse(row["session_id"]).place
        assert row["session_id"] in begun or "no box for the " in row["error"]
        if row["status"] not in NOT_RUN:
            ran.add(place)
        if row["status"] not in STARTED_AGAIN:
            ended[place] += 1
    assert len(ran) == 16
    assert set(ended.values()) == {1}


def test_no_failure_that_is_not_the_agents_has_a_reward(rows):
    for row in rows:
        if row["status"] in UNREWARDED:
            assert row["reward"] is None
        elif row["status"] == "completed":
            assert row["reward"] == 1.0


def test_the_ledger_adds_up_and_the_run_is_sound(soaked):
    run = rolltap.open_run(soaked[0] / "run")
    ledger = run.ledger()
    assert ledger.sampled == ledger.trained + sum(ledger.left_out.values()) > 0
    calls = [call for calls in run.calls.values() for call in calls]
    assert ledger.sampled == sum(len(call.completion_ids) for call in calls)
    assert {"infrastructure", "cancelled"} <= set(ledger.left_out)
    assert run.verify(progress=False).sound


def test_no_process_and_no_workspace_is_left(soaked):
    assert left(str(soaked[0])) == {}
    assert list((soaked[0] / "tmp").glob("rolltap-*")) == []
