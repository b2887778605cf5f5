import math
import random

import pytest

from rolltap.trainer.grpo.advantages import session_advantages

SCALES = ["group", "batch", "none"]


class TestSessionAdvantages:
    def test_group_divides_by_the_groups_standard_deviation(self):
        rewards = {"a": ("g", 0.0), "b": ("g", 1.0), "c": ("h", 5.0), "d": ("h", 9.0)}
        # standard deviations of two values x and y with Bessel's correction: |x - y| / sqrt(2)
        g, h = 0.5 / (math.sqrt(0.5) + 1e-4), 2 / (math.sqrt(8) + 1e-4)
        assert session_advantages(rewards, "group") == pytest.approx({"a": -g, "b": g, "c": -h, "d": h}, rel=1e-12)

    def test_batch_divides_by_the_standard_deviation_of_all_sessions(self):
        rewards = {"a": ("g", 0.0), "b": ("g", 2.0), "c": ("h", 4.0), "d": ("h", 6.0)}
        a = 1 / (math.sqrt(20 / 3) + 1e-4)
        assert session_advantages(rewards, "batch") == pytest.approx({"a": -a, "b": a, "c": -a, "d": a}, rel=1e-12)

    def test_none_only_subtracts_the_groups_mean(self):
        rewards = {"a": ("g", 0.0), "b": ("g", 1.0), "c": ("g", 2.0), "d": ("h", 7.0), "e": ("h", 8.0)}
        assert session_advantages(rewards, "none") == {"a": -1.0, "b": 0.0, "c": 1.0, "d": -0.5, "e": 0.5}

    @pytest.mark.parametrize("scale", SCALES)
    def test_a_session_alone_in_its_group_gets_zero(self, scale):
        rewards = {"alone": ("g", 1.0), "b": ("h", 0.0), "c": ("h", 1.0)}
        assert session_advantages(rewards, scale)["alone"] == 0.0
        assert session_advantages({"alone": ("g", 1.0)}, scale) == {"alone": 0.0}

    @pytest.mark.parametrize("scale", SCALES)
    def test_equal_rewards_get_exactly_zero(self, scale):
        rewards = {str(i): ("g", 0.1) for i in range(3)}
        assert session_advantages(rewards, scale) == {"0": 0.0, "1": 0.0, "2": 0.0}

    @pytest.mark.parametrize("scale", SCALES)
    def test_sessions_without_a_reward_are_absent_and_change_nothing(self, scale):
        scored = {"a": ("g", 0.0), "b": ("g", 1.0), "c": ("g", 1.0)}
        unscored = {"x": ("g", None), "y": ("h", None)}
        assert session_advantages(scored | unscored, scale) == session_advantages(scored, scale)

    def test_no_sessions_give_no_advantages(self):
        assert session_advantages({}, "batch") == {}

    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_no_number_is_refused_by_name(self, reward):
        with pytest.raises(ValueError, match="session b has the reward"):
            session_advantages({"a": ("g", 0.0), "b": ("g", reward)}, "group")

    def test_an_unknown_scale_is_refused(self):
        with pytest.raises(ValueError, match="choose group, batch or none"):
            session_advantages({"a": ("g", 0.0)}, "std")

    @pytest.mark.parametrize("scale", ["group", "batch"])
    def test_the_standard_deviation_is_trls(self, scale):
        torch = pytest.importorskip("torch")
        trl = pytest.importorskip("trl.trainer.utils")
        rng = random.Random(0)
        rewards = torch.tensor([[rng.random() for _ in range(4)] for _ in range(3)], dtype=torch.float64)
        rewards[0, 1] = torch.nan
        std = trl.nanstd(rewards, dim=1, keepdim=True) if scale == "group" else trl.nanstd(rewards)
        expected = ((rewards - rewards.nanmean(dim=1, keepdim=True)) / (std + 1e-4)).flatten().tolist()
        named = {
            str(i): (str(i // 4), None if math.isnan(reward) else reward)
            for i, reward in enumerate(rewards.flatten().tolist())
        }
        assert session_advantages(named, scale) == pytest.approx(
            {str(i): value for i, value in enumerate(expected) if not math.isnan(value)}
        )
