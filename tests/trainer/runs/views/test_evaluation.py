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
    return [
        Session(
            session_id=f"{task}-{number}",
            task_id=task,
            task_digest=digest,
            status="completed" if reward is not None else "infrastructure",
            reward=reward,
        )
        for task, given in rewards.items()
        for number, reward in enumerate(given)
    ]


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=4
    )
)
def test_the_chances_over_k_sessions_are_those_of_all_choices_of_k_of_them(tasks):
    for row in pass_rows(dict(enumerate(tasks))):
        chosen = [list(combinations([reward == 1.0 for reward in given], row.k)) for given in tasks]
        at = [np.mean([any(each) for each in every]) for every in chosen]
        of_all = [np.mean([all(each) for each in every]) for every in chosen]
        assert row.pass_at.value == pytest.approx(np.mean(at))
        assert row.pass_all.value == pytest.approx(np.mean(of_all))
        for interval in (row.pass_at, row.pass_all):
            assert 0 <= interval.low <= interval.value <= interval.high <= 1


@pytest.mark.parametrize(("fewest", "ks"), [(0, []), (1, [1]), (3, [1, 2]), (8, [1, 2, 4, 8])])
def test_k_goes_up_to_the_sessions_that_every_task_has(fewest, ks):
    assert [row.k for row in pass_rows({"a": [1.0] * fewest, "b": [0.0] * 9})] == ks
    assert pass_rows({}) == []


def test_the_interval_of_one_task_is_that_of_its_sessions_and_never_without_width():
    (row, *_) = pass_rows({"a": [1.0] * 32})
    assert (row.pass_at.value, row.pass_at.high) == (1.0, 1.0)
    assert 0.91 < row.pass_at.low < 0.96  # Jeffreys' interval of 32 of 32 begins at 0.925
    (row, *_) = pass_rows({"a": [1.0] * 5 + [0.0] * 5})
    assert row.pass_at.low == pytest.approx(0.224, abs=0.02)
    assert row.pass_at.high == pytest.approx(0.776, abs=0.02)


def held(trial, trials=300):
    rng = np.random.default_rng(1)
    return sum(trial(rng) for _ in range(trials)) / trials


KINDS = [(1, 1), (0.5, 0.5), (2, 2), (0.3, 1.2), (4, 1), (0.3, 0.3)]
"""Beta distributions of the chance of a task: of all sorts, of easy and hard ones, of hard or easy
ones mostly."""


def coverage(tasks, sessions, chances_of, trials):
    """Return k -> how often the intervals of pass@k and pass^k hold the truth.

    `chances_of` draws the chances of tasks, and returns them with a mean of functions of them over
    all such tasks.
    """
    rng = np.random.default_rng(1)
    held = {}
    for _ in range(trials):
        chances, mean = chances_of(rng, tasks)
        solved = rng.random((tasks, sessions)) < chances[:, None]
        for row in pass_rows({str(number): list(each * 1.0) for number, each in enumerate(solved)}):
            k = row.k
            truths = (
                mean(lambda chance, k=k: 1 - (1 - chance) ** k),
                mean(lambda chance, k=k: chance**k),
            )
            for interval, truth in zip((row.pass_at, row.pass_all), truths, strict=True):
                held.setdefault(k, []).append(interval.low - 1e-9 <= truth <= interval.high + 1e-9)
    return {k: np.mean(every) for k, every in held.items()}


def of_kinds(rng, tasks):
    a, b = KINDS[rng.integers(len(KINDS))]
    chances = rng.beta(a, b, tasks)
    if tasks < FEW_TASKS:  # these tasks alone
        return chances, lambda function: np.mean(function(chances))
    return chances, lambda function: np.mean(function(POPULATIONS[a, b]))


def alike(rng, tasks):
    chances = np.full(tasks, rng.choice([0.1, 0.5, 0.9]))
    return chances, lambda function: np.mean(function(chances))


def of_two_sorts(rng, tasks):
    return np.where(
        rng.random(tasks) < 0.5, 0.0, 0.5
    ), lambda f: (f(np.float64(0.0)) + f(np.float64(0.5))) / 2


POPULATIONS = {kind: np.random.default_rng(0).beta(*kind, 20_000) for kind in KINDS}


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
    if chances_of is of_two_sorts and tasks < MANY_TASKS:
        tasks = MANY_TASKS
    assert min(coverage(tasks, 8, chances_of, 300 if DEEP else 60).values()) >= 0.9


def test_tasks_that_are_all_alike_have_an_interval_with_a_width():
    for reward in (0.0, 1.0):
        rows = pass_rows({str(number): [reward] * 8 for number in range(20)})
        for interval in (each for row in rows for each in (row.pass_at, row.pass_all)):
            assert interval.value == reward
            assert interval.high - interval.low > 0.02


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("tasks", "sessions"), [(1, 8), (1, 2), (3, 8), (3, 2), (5, 8), (8, 2), (30, 1)]
)
def test_two_runs_that_are_alike_seldom_differ(tasks, sessions, whole):
    def trial(rng):
        chances = rng.beta(2, 2, tasks)
        runs = [
            {
                str(n): list(
                    (rng.random(sessions) < each) * 1.0
                    if whole
                    else rng.normal(each, 0.2, sessions)
                )
                for n, each in enumerate(chances)
            }
            for _ in range(2)
        ]
        return not compare_sessions(*map(sessions_of, runs)).differ

    assert held(trial) >= 0.92


def test_of_one_session_of_a_task_nothing_is_claimed():
    assert not compare_sessions(sessions_of({"a": [0.0]}), sessions_of({"a": [1.0]})).differ
    with pytest.raises(InputError, match="too few sessions"):
        compare_sessions(sessions_of({"a": [0.3]}), sessions_of({"a": [0.7]}))


def test_a_run_of_several_policies_is_not_compared():
    first = sessions_of({"a": [0.0, 1.0]})
    for session, version in zip(first, ("default", "1a2b3c4d.1.0"), strict=True):
        session.policy_version = version
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
    hard = rng.random(40)  # tasks differ far more than the runs do
    first = sessions_of({str(number): [value] for number, value in enumerate(hard)})
    second = sessions_of(
        {str(number): [value + 0.05 + 0.01 * rng.random()] for number, value in enumerate(hard)}
    )
    found = compare_sessions(first, second)
    assert (found.tasks, found.differ, found.others, found.changed) == (40, True, [], [])
    assert 0.05 < found.difference.low < found.difference.high < 0.06
    assert compare_sessions(second, first).difference.high < 0
    assert not compare_sessions(first, first).differ


@given(
    first=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    second=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
@examples(50)
def test_a_run_compared_the_other_way_round_has_the_opposite_difference(first, second):
    one, two = sessions_of({"a": first}), sessions_of({"a": second})
    try:
        there, back = compare_sessions(one, two).difference, compare_sessions(two, one).difference
    except InputError:
        assert min(len(first), len(second)) == 1
        return
    assert there.value == pytest.approx(-back.value)
    assert there.low <= there.value <= there.high
    assert math.isfinite(there.low + there.high)


def test_tasks_of_one_run_alone_and_changed_ones_are_named():
    first = sessions_of({"a": [1.0, 1.0], "b": [0.0]})
    second = sessions_of({"a": [0.0, 1.0], "c": [0.0]}, digest="e")
    found = compare_sessions(first, second)
    assert (found.tasks, found.others, found.changed) == (1, ["b", "c"], ["a"])
    with pytest.raises(InputError, match="no task has sessions with a reward in both runs"):
        compare_sessions(first, sessions_of({"c": [1.0]}))


def test_the_command_prints_a_table_or_json(tmp_path):
    for name, reward in (("one", 0.0), ("two", 1.0)):
        write_run(tmp_path / name, *sessions_of({"a": [reward] * 4}))
    arguments = ["compare", str(tmp_path / "one"), str(tmp_path / "two")]
    said = CliRunner().invoke(main.rolltap, arguments, catch_exceptions=False)
    assert said.exit_code == 0
    assert "The second run is better." in said.output
    assert "1.000 (0." in said.output
    found = json.loads(
        CliRunner().invoke(main.rolltap, [*arguments, "--json"], catch_exceptions=False).output
    )
    assert found["differ"] is True
    assert (found["difference"]["value"], found["difference"]["high"]) == (1.0, 1.0)
    assert found["difference"]["low"] > 0
