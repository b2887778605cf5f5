"""The sessions of a step: their ids, those that are on the disk, further tasks, and the file of the
trained steps."""

from datetime import timedelta
from itertools import product

import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.options import RecordedFrom
from rolltap.trainer.names import Version
from rolltap.trainer.rollouts.resume import Group
from rolltap.trainer.tasks.task import Task
from rolltap.trainer.traces.reader import SessionRows
from rolltap.trainer.traces.sessions import Outcomes, RewardRules
from rolltap.trainer.training.recipe import Forks
from rolltap.trainer.training.steps import (
    BATCHES,
    FinishedSessions,
    TrainedBatch,
    TrainedBatches,
    find_fork,
    has_signal,
    step_group,
)
from tests.factories import START, make_call, make_session, write_run

STEP = Version("1a2b3c4d", 4, 9)
TASKS = [Task(id=name, instruction="go", evaluate=["true"]) for name in ("a", "a-1", "b-0.0", "c")]


RUN = "1a2b3c4d"


def group_of(attempt, *, step=4, position=0, task=TASKS[0], sessions=3):
    return step_group(Version(RUN, step, attempt), position, task, sessions)


def ended(group, *indices, status="completed", reward=1.0, weights=f"{RUN}.4.0"):
    sessions = []
    for index in indices:
        session = make_session(
            group.session_ids[index],
            status,
            group_id=group.group_id,
            reward=reward,
            policy_version=weights,
        )
        sessions.append(session)
    return sessions


def found(sessions, group, staleness=0):
    """Return the sessions that are found for a group of a step."""
    return list(FinishedSessions(sessions).of(group, STEP, staleness).values())


def test_a_group_has_the_same_id_in_every_attempt_and_its_sessions_have_not():
    assert group_of(0).group_id == group_of(1).group_id == f"a-{RUN}.4.0"
    assert group_of(1).session_ids == [f"a-{RUN}.4.0-{index}.1" for index in range(3)]


def test_no_two_sessions_of_a_training_have_the_same_id():
    ids = []
    for attempt, step, position, task in product((0, 1, 10), (1, 10), (0, 1, 10), TASKS):
        group = group_of(attempt, step=step, position=position, task=task, sessions=12)
        ids += group.session_ids
    assert len({*ids}) == len(ids)


def test_sessions_of_any_attempt_are_found_under_the_ids_of_this_one():
    (first,) = ended(group_of(0), 0)
    (third,) = ended(group_of(1), 2)
    names = group_of(2).session_ids
    finished = FinishedSessions([first, third]).of(group_of(2), STEP)
    assert finished == {names[0]: first, names[2]: third}


@pytest.mark.parametrize(
    "other",
    [
        group_of(0, step=5),
        group_of(0, position=1),
        group_of(0, task=TASKS[1]),
        Group(TASKS[0], f"a-{RUN}.4.0", [f"a-{RUN}.4.0-x", "s", ""]),
        Group(TASKS[0], "a-0f0f0f0f", [f"a-0f0f0f0f-{i}" for i in range(3)]),
    ],
    ids=lambda group: group.session_ids[0],
)
def test_sessions_of_another_group_or_of_another_form_are_not_found(other):
    assert found(ended(other, 0, 1, 2), group_of(1)) == []


@pytest.mark.parametrize("weights", ["default", f"{RUN}.3.0", "0f0f0f0f.4.0", ""])
def test_sessions_that_other_weights_sampled_are_not_found(weights):
    assert found(ended(group_of(0), 0, weights=weights), group_of(1)) == []


@pytest.mark.parametrize(("staleness", "number"), [(0, 1), (1, 2), (9, 3)])
def test_sessions_of_older_weights_are_found_up_to_the_staleness(staleness, number):
    sessions = []
    for index, step in enumerate((4, 3, 2)):
        sessions += ended(group_of(0), index, weights=f"{RUN}.{step}.0")
    assert found(sessions, group_of(1), staleness) == sessions[:number]


def test_sessions_beyond_the_size_of_the_group_are_not_found():
    sessions = ended(group_of(0, sessions=8), 1, 7)
    assert found(sessions, group_of(1)) == sessions[:1]


def test_the_first_attempt_at_a_session_counts_whatever_the_order_of_the_rows():
    rows = []
    for attempt in (2, 9, 10):
        rows += ended(group_of(attempt), 0, reward=attempt)
    for sessions in (rows, rows[::-1]):
        assert found(sessions, group_of(11, sessions=1)) == rows[:1]


def test_a_fault_is_run_again_and_the_session_in_its_place_counts():
    sessions = ended(group_of(0), 0)
    sessions += ended(group_of(0), 1, 2, status="infrastructure", reward=None)
    assert found(sessions, group_of(1)) == sessions[:1]
    again = ended(group_of(1), 1)
    assert found(sessions + again, group_of(2)) == sessions[:1] + again


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([1.0], False),
        ([None, 1.0], False),
        ([None], False),
        ([], False),
    ],
)
def test_a_group_has_a_signal_when_its_rewards_differ(rewards, signal):
    sessions = [make_session(reward=reward) for reward in rewards]
    assert has_signal(sessions, RewardRules()) is signal


def test_a_group_has_the_signal_of_the_rewards_that_the_recipe_gives():
    sessions = ended(group_of(0), 0, 1) + ended(group_of(0), 2, status="timeout", reward=0.0)
    sessions[0].suspicions = {"git_history": 1}
    assert has_signal(sessions, RewardRules())
    assert not has_signal(sessions, RewardRules(Outcomes(timeout="exclude")))
    assert not has_signal(sessions, RewardRules(Outcomes(timeout=1)))
    assert has_signal(sessions, RewardRules(Outcomes(timeout=1), 0.5))
    assert not has_signal(sessions, RewardRules(Outcomes(timeout=1), "exclude"))


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "sess', b'{"step": 4, "sessions": ["\xc3', b"\x00\x00"]
)
def test_a_torn_line_is_as_if_it_had_not_been_written(tmp_path, torn):
    third = TrainedBatch(step=3, sessions=[("b", 0), ("a", 2)], stale=["c"])
    TrainedBatches(tmp_path).add(third)
    with (tmp_path / BATCHES).open("ab") as file:
        file.write(torn)
    batches = TrainedBatches(tmp_path)
    assert batches.get(4) is None
    fourth = TrainedBatch(step=4, sessions=[("c", 1)])
    batches.add(fourth)
    again = TrainedBatches(tmp_path)
    assert (again.get(3), again.get(4)) == (third, fourth)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        '{"step": 1, "sessions": ["a-0"]}',
        '{"step": 1}',
        '{"step": "x", "sessions": []}',
        "{",
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    TrainedBatches(tmp_path).add(TrainedBatch(step=3, sessions=[("a", 0)]))
    with (tmp_path / BATCHES).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunError, match=r"batches\.jsonl, line 2 is damaged"):
        TrainedBatches(tmp_path)


@pytest.mark.parametrize(
    ("settings", "reward", "roles", "expected"),
    [
        ({}, 0.0, ["agent"] * 5, 2),
        ({}, 0.5, ["agent"] * 2, 1),
        ({"at": "last"}, 0.0, ["agent"] * 5, 4),
        ({}, 0.0, ["auxiliary", "agent", "subagent", "agent", "auxiliary"], 3),
        ({}, 0.0, ["agent", "auxiliary"], None),  # one call: a fork of it would be another session
        ({}, 1.0, ["agent"] * 5, None),
        ({"from": "any"}, 1.0, ["agent"] * 5, 2),
        ({}, None, ["agent"] * 5, None),
    ],
)
def test_a_session_is_forked_at_a_call_of_its_agent(tmp_path, settings, reward, roles, expected):
    calls = [make_call(number, role=role) for number, role in enumerate(roles)]
    write_run(tmp_path, *calls)
    sessions = [make_session("without", reward=reward), make_session("s", reward=reward)]
    found = find_fork(sessions, RewardRules(), Forks(**settings), tmp_path, SessionRows(tmp_path))
    fork = None
    if expected is not None:
        fork = RecordedFrom(tmp_path, "s", START + timedelta(seconds=expected))
    assert found == fork


def test_a_session_has_failed_by_the_reward_that_is_trained(tmp_path):
    write_run(tmp_path, make_call(0), make_call(1))
    stopped = make_session("s", status="timeout")
    rows = SessionRows(tmp_path)
    assert find_fork([stopped], RewardRules(), Forks(), tmp_path, rows) is None
    failed = RewardRules(Outcomes(timeout=0))
    assert find_fork([stopped], failed, Forks(), tmp_path, rows).session == "s"
