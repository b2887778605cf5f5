import json
import math
from itertools import combinations

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session
from rolltap.trainer.cli import main
from rolltap.trainer.runs.views.evaluation import (
    FEW_TASKS,
    MANY_TASKS,
    compare_sessions,
    pass_rows,
)
from rolltap.trainer.runs.views.outcomes import task_rewards
from tests.deep import DEEP, cases, examples
from tests.factories import write_run


def sessions_of(rewards, digest="d"):
    """Return sessions: task -> rewards, None for a session without one."""
    sessions = []
    for task, given_rewards in rewards.items():
        for number, reward in enumerate(given_rewards):
            name = f"{task}-{number}"
            status = "infrastructure" if reward is None else "completed"
            row = Session(session_id=name, task_id=str(task), status=status, reward=reward)
            row.task_digest = digest
            sessions.append(row)
    return sessions


def compare(first, second):
    """Compare two runs: task -> rewards."""
    return compare_sessions(sessions_of(first), sessions_of(second))


REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6)


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_the_chances_over_k_sessions_are_those_of_all_choices_of_k_of_them(tasks):
    for row in pass_rows(dict(enumerate(tasks))):
        some = []
        every = []
        for rewards in tasks:
            choices = np.array(list(combinations(np.equal(rewards, 1.0), row.k)))
            some.append(choices.any(axis=1).mean())
            every.append(choices.all(axis=1).mean())
        assert row.pass_at.value == pytest.approx(np.mean(some))
        assert row.pass_all.value == pytest.approx(np.mean(every))
        for interval in (row.pass_at, row.pass_all):
            assert 0 <= interval.low <= interval.value <= interval.high <= 1


@pytest.mark.parametrize(("fewest", "ks"), [(0, []), (1, [1]), (3, [1, 2]), (8, [1, 2, 4, 8])])
def test_k_goes_up_to_the_sessions_that_every_task_has(fewest, ks):
    assert [row.k for row in pass_rows({"a": [1.0] * fewest, "b": [0.0] * 9})] == ks
    assert pass_rows({}) == []


def test_the_interval_of_one_task_is_that_of_its_sessions_and_never_without_width():
    (row, *_) = pass_rows({"a": [1.0] * 32})
    assert row.pass_at.value == row.pass_at.high == 1.0
    assert 0.91 < row.pass_at.low < 0.96  # Jeffreys' interval of 32 of 32 begins at 0.925
    (row, *_) = pass_rows({"a": [1.0] * 5 + [0.0] * 5})
    assert row.pass_at.low == pytest.approx(0.224, abs=0.02)
    assert row.pass_at.high == pytest.approx(0.776, abs=0.02)


KINDS = [(1, 1), (0.5, 0.5), (2, 2), (0.3, 1.2), (4, 1), (0.3, 0.3)]
"""Beta distributions of the chance of a task: of all sorts, of easy and hard ones, of hard or easy
ones mostly."""
POPULATIONS = {kind: np.random.default_rng(0).beta(*kind, 20_000) for kind in KINDS}


def of_kinds(rng, tasks):
    kind = KINDS[rng.integers(len(KINDS))]
    chances = rng.beta(*kind, tasks)
    if tasks < FEW_TASKS:  # these tasks alone
        return chances, chances
    return chances, POPULATIONS[kind]


def alike(rng, tasks):
    chances = np.full(tasks, rng.choice([0.1, 0.5, 0.9]))
    return chances, chances


def of_two_sorts(rng, tasks):
    return np.where(rng.random(tasks) < 0.5, 0.0, 0.5), np.array([0.0, 0.5])


def coverage(tasks, sessions, chances_of, trials):
    """Return k -> how often the intervals of pass@k and pass^k hold the truth.

    `chances_of` draws the chances of tasks, and returns them with those of all such tasks.
    """
    rng = np.random.default_rng(1)
    held = {}
    for _ in range(trials):
        chances, population = chances_of(rng, tasks)
        solved = rng.random((tasks, sessions)) < chances[:, None]
        for row in pass_rows(dict(enumerate(solved * 1.0))):
            inside = held.setdefault(row.k, [])
            some = np.mean(1 - (1 - population) ** row.k)
            inside.append(row.pass_at.low - 1e-9 <= some <= row.pass_at.high + 1e-9)
            every = np.mean(population**row.k)
            inside.append(row.pass_all.low - 1e-9 <= every <= row.pass_all.high + 1e-9)
    return {k: np.mean(inside) for k, inside in held.items()}


@pytest.mark.parametrize(
    ("tasks", "sessions"), cases([(5, 8), (2, 8), (1, 8), (4, 4), (10, 8), (20, 8), (40, 4)], 0, 1)
)
def test_an_interval_holds_the_truth_in_95_of_100_runs(tasks, sessions):
    held = coverage(tasks, sessions, of_kinds, 1000 if DEEP else 200)
    spare = 0 if DEEP else 0.02
    most = 0.97 if tasks < MANY_TASKS else 0.98  # of two intervals
    for k, share in held.items():
        if k <= sessions / 2:
            assert 0.93 - spare <= share <= most + spare, k
        else:
            assert share >= 0.9, k


@pytest.mark.parametrize("chances_of", [alike, of_two_sorts])
@pytest.mark.parametrize("tasks", cases([5, 20, 200], 0))
def test_tasks_that_no_beta_distribution_has_are_held_too(tasks, chances_of):
    if chances_of is of_two_sorts:
        tasks = max(tasks, MANY_TASKS)
    assert min(coverage(tasks, 8, chances_of, 300 if DEEP else 60).values()) >= 0.9


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_tasks_that_are_all_alike_have_an_interval_with_a_width(reward):
    for row in pass_rows({str(number): [reward] * 8 for number in range(20)}):
        for interval in (row.pass_at, row.pass_all):
            assert interval.value == reward
            assert interval.high - interval.low > 0.02


SIZES = [(1, 8), (1, 2), (3, 8), (3, 2), (5, 8), (8, 2), (30, 1)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("tasks", "sessions"), cases(SIZES, 1, 3, 5))
def test_two_runs_that_are_alike_seldom_differ(tasks, sessions, whole):
    rng = np.random.default_rng(1)

    def draw(chances):
        if whole:
            rewards = (rng.random((tasks, sessions)) < chances) * 1.0
        else:
            rewards = rng.normal(chances, 0.2, (tasks, sessions))
        return dict(enumerate(rewards.tolist()))

    differ = 0
    for _ in range(300):
        chances = rng.beta(2, 2, (tasks, 1))
        differ += compare(draw(chances), draw(chances)).differ
    assert differ <= 0.08 * 300


def test_of_one_session_of_a_task_nothing_is_claimed():
    assert not compare({"a": [0.0]}, {"a": [1.0]}).differ
    with pytest.raises(InputError, match="too few sessions"):
        compare({"a": [0.3]}, {"a": [0.7]})


def test_a_run_of_several_policies_is_not_compared():
    first = sessions_of({"a": [0.0, 1.0]})
    first[0].policy_version = "default"
    first[1].policy_version = "1a2b3c4d.1.0"
    one = sessions_of({"a": [0.0]})
    words = r"sessions of 2 policy versions \(1a2b3c4d\.1\.0, default\).*filter --policy-version"
    with pytest.raises(InputError, match=f"^the first run has {words}"):
        compare_sessions(first, one)
    with pytest.raises(InputError, match=f"^the second run has {words}"):
        compare_sessions(one, first)


def test_a_session_without_a_reward_does_not_count():
    assert task_rewards(sessions_of({"a": [1.0, None, 0.0], "b": [None]})) == {"a": [1.0, 0.0]}


def test_a_difference_is_paired_by_task():
    rng = np.random.default_rng(0)
    hard = rng.random((40, 1))  # tasks differ far more than the runs do
    first = dict(enumerate(hard.tolist()))
    second = dict(enumerate((hard + 0.05 + 0.01 * rng.random((40, 1))).tolist()))
    found = compare(first, second)
    assert found.tasks == 40
    assert found.differ
    assert found.others == found.changed == []
    assert 0.05 < found.difference.low < found.difference.high < 0.06
    assert compare(second, first).difference.high < 0
    assert not compare(first, first).differ


SOME = st.lists(st.floats(0, 1), min_size=1, max_size=5)


@given(first=SOME, second=SOME)
@examples(50)
def test_a_run_compared_the_other_way_round_has_the_opposite_difference(first, second):
    try:
        there = compare({"a": first}, {"a": second}).difference
    except InputError:
        assert min(len(first), len(second)) == 1
        return
    assert there.value == pytest.approx(-compare({"a": second}, {"a": first}).difference.value)
    assert there.low <= there.value <= there.high
    assert math.isfinite(there.low + there.high)


def test_tasks_of_one_run_alone_and_changed_ones_are_named():
    first = sessions_of({"a": [1.0, 1.0], "b": [0.0]})
    found = compare_sessions(first, sessions_of({"a": [0.0, 1.0], "c": [0.0]}, digest="e"))
    assert found.tasks == 1
    assert found.others == ["b", "c"]
    assert found.changed == ["a"]
    with pytest.raises(InputError, match="no task has sessions with a reward in both runs"):
        compare_sessions(first, sessions_of({"c": [1.0]}))


def test_the_command_prints_a_table_or_json(tmp_path):
    one = write_run(tmp_path / "one", *sessions_of({"a": [0.0] * 4}))
    two = write_run(tmp_path / "two", *sessions_of({"a": [1.0] * 4}))
    line = ["compare", str(one), str(two)]
    said = CliRunner().invoke(main.rolltap, line)
    assert said.exit_code == 0
    assert "The second run is better." in said.output
    assert "1.000 (0." in said.output
    found = json.loads(CliRunner().invoke(main.rolltap, [*line, "--json"]).output)
    assert found["differ"] is True
    assert found["difference"]["value"] == found["difference"]["high"] == 1.0
    assert found["difference"]["low"] > 0
