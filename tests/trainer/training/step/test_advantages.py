import math

import pytest
import torch
from trl.trainer.utils import nanstd

from rolltap.trainer.traces.build import GroupReward
from rolltap.trainer.training.step.advantages import session_advantages

SCALES = ["group", "batch", "none"]


def in_groups(**groups):
    """Return a map of session ids to `GroupReward`, from the rewards of each group."""
    labelled = [(group, *each) for group, rewards in groups.items() for each in rewards.items()]
    return {
        session: GroupReward(group_id=group, reward=reward) for group, session, reward in labelled
    }


class TestSessionAdvantages:
    def test_group_divides_by_the_groups_standard_deviation(self):
        rewards = in_groups(g={"a": 0.0, "b": 1.0}, h={"c": 5.0, "d": 9.0})
        # the standard deviation of two values x and y with Bessel's correction is |x - y| / sqrt(2)
        g, h = 0.5 / (math.sqrt(0.5) + 1e-4), 2 / (math.sqrt(8) + 1e-4)
        assert session_advantages(rewards, "group") == pytest.approx(
            {"a": -g, "b": g, "c": -h, "d": h}, rel=1e-12
        )

    def test_batch_divides_by_the_standard_deviation_of_all_sessions(self):
        rewards = in_groups(g={"a": 0.0, "b": 2.0}, h={"c": 4.0, "d": 6.0})
        a = 1 / (math.sqrt(20 / 3) + 1e-4)
        assert session_advantages(rewards, "batch") == pytest.approx(
            {"a": -a, "b": a, "c": -a, "d": a}, rel=1e-12
        )

    def test_none_only_subtracts_the_groups_mean(self):
        rewards = in_groups(g={"a": 0.0, "b": 1.0, "c": 2.0}, h={"d": 7.0, "e": 8.0})
        assert session_advantages(rewards, "none") == {
            "a": -1.0,
            "b": 0.0,
            "c": 1.0,
            "d": -0.5,
            "e": 0.5,
        }

    @pytest.mark.parametrize("scale", SCALES)
    def test_a_session_alone_in_its_group_gets_zero(self, scale):
        rewards = in_groups(g={"alone": 1.0}, h={"b": 0.0, "c": 1.0})
        assert session_advantages(rewards, scale)["alone"] == 0.0
        assert session_advantages(in_groups(g={"alone": 1.0}), scale) == {"alone": 0.0}

    @pytest.mark.parametrize("scale", SCALES)
    def test_equal_rewards_get_exactly_zero(self, scale):
        rewards = in_groups(g=dict.fromkeys("012", 0.1))
        assert session_advantages(rewards, scale) == {"0": 0.0, "1": 0.0, "2": 0.0}
        assert session_advantages({}, scale) == {}

    @pytest.mark.parametrize("scale", SCALES)
    def test_rewards_that_differ_by_rounding_get_exactly_zero(self, scale):
        rewards = in_groups(g={"a": 0.3, "b": 0.1 + 0.2}, h={"c": 0.0, "d": 1.0})
        advantages = session_advantages(rewards, scale)
        assert advantages["a"] == advantages["b"] == 0.0
        assert advantages["c"] < 0.0 < advantages["d"]

    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_no_number_is_refused_by_name(self, reward):
        with pytest.raises(ValueError, match="session b has the reward"):
            session_advantages(in_groups(g={"a": 0.0, "b": reward}), "group")

    @pytest.mark.parametrize("scale", ["group", "batch"])
    def test_the_standard_deviation_is_trls(self, scale):
        rewards = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        rewards[0, 1] = torch.nan
        std = nanstd(rewards, dim=1, keepdim=True) if scale == "group" else nanstd(rewards)
        expected = (
            ((rewards - rewards.nanmean(dim=1, keepdim=True)) / (std + 1e-4)).flatten().tolist()
        )
        named = {
            str(i): GroupReward(group_id=str(i // 4), reward=reward)
            for i, reward in enumerate(rewards.flatten().tolist())
            if not math.isnan(reward)
        }
        assert session_advantages(named, scale) == pytest.approx(
            {name: expected[int(name)] for name in named}
        )
