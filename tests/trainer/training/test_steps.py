"""The sessions of a step: their ids, those that are on the disk, further tasks, and the file of the
trained steps."""

from datetime import timedelta

import pytest

from rolltap.addons.errors import RunError
from rolltap.addons.options import RecordedFrom
from rolltap.addons.store.metadata import write_metadata
from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
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
from tests.factories import START, make_call, make_session

STEP = Version("1a2b3c4d", 4, 9)
TASKS = [Task(id=name, instruction="go", evaluate=["true"]) for name in ("a", "a-1", "b-0.0", "c")]


def group_of(
    attempt: int, *, step: int = 4, position: int = 0, task: Task = TASKS[0], sessions: int = 3
) -> Group:
    return step_group(Version("1a2b3c4d", step, attempt), position, task, sessions)


def ended(
    group: Group, *indices: int, status="completed", reward=1.0, weights=None
) -> list[Session]:
    return [
        Session(
            session_id=group.session_ids[i],
            group_id=group.group_id,
            status=status,
            reward=reward,
            policy_version=f"{group.group_id.partition('-')[2].rpartition('.')[0]}.0"
            if weights is None
            else weights,
        )
        for i in indices
    ]


def test_a_group_has_the_same_id_in_every_attempt_and_its_sessions_have_not():
    assert group_of(0).group_id == group_of(1).group_id == "a-1a2b3c4d.4.0"
    assert group_of(1).session_ids == [f"a-1a2b3c4d.4.0-{index}.1" for index in range(3)]


def test_no_two_sessions_of_a_training_have_the_same_id():
    groups = [
        group_of(attempt, step=step, position=position, task=task, sessions=12)
        for attempt in (0, 1, 10)
        for step in (1, 10)
        for position in (0, 1, 10)
        for task in TASKS
    ]
    ids = [session_id for group in groups for session_id in group.session_ids]
    assert len({*ids}) == len(ids)


def test_sessions_of_any_attempt_are_found_under_the_ids_of_this_one():
    sessions = ended(group_of(0), 0) + ended(group_of(1), 2)
    found = FinishedSessions(sessions).of(group_of(2), STEP)
    names = group_of(2).session_ids
    assert found == {names[0]: sessions[0], names[2]: sessions[1]}


@pytest.mark.parametrize(
    "other",
    [
        group_of(0, step=5),
        group_of(0, position=1),
        group_of(0, task=TASKS[1]),
        Group(TASKS[0], "a-1a2b3c4d.4.0", ["a-1a2b3c4d.4.0-x", "s", ""]),
        Group(TASKS[0], "a-0f0f0f0f", [f"a-0f0f0f0f-{i}" for i in range(3)]),
    ],
    ids=lambda group: group.session_ids[0],
)
def test_sessions_of_another_group_or_of_another_form_are_not_found(other):
    assert FinishedSessions(ended(other, 0, 1, 2)).of(group_of(1), STEP) == {}


@pytest.mark.parametrize("weights", ["default", "1a2b3c4d.3.0", "0f0f0f0f.4.0", ""])
def test_sessions_that_other_weights_sampled_are_not_found(weights):
    assert FinishedSessions(ended(group_of(0), 0, weights=weights)).of(group_of(1), STEP, 0) == {}


@pytest.mark.parametrize(
    ("staleness", "found"), [(0, ["4"]), (1, ["3", "4"]), (9, ["2", "3", "4"])]
)
def test_sessions_of_older_weights_are_found_up_to_the_staleness(staleness, found):
    sessions = [ended(group_of(0), n, weights=f"1a2b3c4d.{n + 2}.0")[0] for n in range(3)]
    finished = FinishedSessions(sessions).of(group_of(1), STEP, staleness)
    assert [session.policy_version.split(".")[1] for session in finished.values()] == found


def test_sessions_beyond_the_size_of_the_group_are_not_found():
    found = FinishedSessions(ended(group_of(0, sessions=8), 1, 7)).of(group_of(1), STEP)
    assert [session.session_id for session in found.values()] == ["a-1a2b3c4d.4.0-1.0"]


def test_the_first_attempt_at_a_session_counts_whatever_the_order_of_the_rows():
    first, second, third = (
        ended(group_of(attempt), 0, reward=attempt)[0] for attempt in (2, 9, 10)
    )
    for sessions in ([first, second, third], [third, second, first]):
        (found,) = FinishedSessions(sessions).of(group_of(11, sessions=1), STEP).values()
        assert found is first


def test_a_fault_is_run_again_and_the_session_in_its_place_counts():
    sessions = ended(group_of(0), 0) + ended(
        group_of(0), 1, 2, status="infrastructure", reward=None
    )
    assert list(FinishedSessions(sessions).of(group_of(1), STEP).values()) == sessions[:1]
    again = ended(group_of(1), 1)
    assert list(FinishedSessions(sessions + again).of(group_of(2), STEP).values()) == [
        sessions[0],
        *again,
    ]


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
    sessions = [
        Session(session_id=str(i), status="completed", reward=reward)
        for i, reward in enumerate(rewards)
    ]
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
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path) as writer:
        for number, role in enumerate(roles):
            writer.add_call(make_call(number, role=role))
    sessions = [make_session("without", reward=reward), make_session("s", reward=reward)]
    found = find_fork(sessions, RewardRules(), Forks(**settings), tmp_path, SessionRows(tmp_path))
    at = None if expected is None else START + timedelta(seconds=expected)
    assert found == (at and RecordedFrom(tmp_path, "s", at))


def test_a_session_has_failed_by_the_reward_that_is_trained(tmp_path):
    write_metadata(tmp_path, {})
    with RunWriter(tmp_path) as writer:
        for number in range(2):
            writer.add_call(make_call(number))
    stopped = make_session("s", status="timeout")
    for rules, expected in ((RewardRules(), None), (RewardRules(Outcomes(timeout=0)), "s")):
        found = find_fork([stopped], rules, Forks(), tmp_path, SessionRows(tmp_path))
        assert (found and found.session) == expected
