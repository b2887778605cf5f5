"""Advantages of sessions are TRL's, and exactly zero where rewards do not differ."""

import math

import pytest
import torch
from trl.trainer.utils import nanstd

from rolltap.trainer.traces.build import GroupReward
from rolltap.trainer.training.step.advantages import rewards_differ, session_advantages


def in_groups(*groups):
    """Return a map of session ids, such as "10" of the second group, to their rewards."""
    rewards = {}
    for group, values in enumerate(groups):
        for number, reward in enumerate(values):
            rewards[f"{group}{number}"] = GroupReward(group_id=str(group), reward=reward)
    return rewards


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(scale):
    random = torch.Generator().manual_seed(0)
    rewards = torch.rand(3, 4, dtype=torch.float64, generator=random)
    rewards[0, 3] = torch.nan  # a group of three
    advantages = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "group":
        advantages /= nanstd(rewards, dim=1, keepdim=True) + 1e-4
    if scale == "batch":
        advantages /= nanstd(rewards) + 1e-4
    first, *others = rewards.tolist()
    found = session_advantages(in_groups(first[:3], *others), scale)
    wanted = advantages[~advantages.isnan()].tolist()
    assert list(found.values()) == pytest.approx(wanted, rel=1e-7)


def test_the_deviation_has_bessels_correction():
    advantages = session_advantages(in_groups([0.0, 1.0]), "group")
    # that of two values x and y is |x - y| / sqrt(2)
    assert advantages["01"] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4), rel=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_session_alone_and_rewards_that_differ_by_rounding_get_exactly_zero(scale):
    groups = [0.1, 0.1, 0.1], [0.3, 0.1 + 0.2], [1.0], [0.0, 1.0]
    advantages = session_advantages(in_groups(*groups), scale)
    *zeros, low, high = advantages.values()
    assert zeros == [0.0] * 6
    assert low < 0.0 < high
    assert session_advantages(in_groups([1.0]), scale) == {"00": 0.0}
    assert session_advantages({}, scale) == {}


def test_rewards_differ_by_more_than_rounding():
    assert not rewards_differ([0.0, 1e-7])
    assert not rewards_differ([1e3, 1e3 + 5e-4])
    assert rewards_differ([0.3, 0.1 + 0.2, 0.3 + 1e-5])


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_name(reward):
    with pytest.raises(ValueError, match="session 01 has the reward"):
        session_advantages(in_groups([0.0, reward]), "group")
