"""Group-relative advantages, one per session."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import GroupReward

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""

SAME = 1e-6
"""Largest difference between equal rewards, relative to their size if that is more than 1. An
advantage that is only such a difference would still move the weights by a whole step of Adam."""


def rewards_differ(rewards: Collection[float]) -> bool:
    """Return True if the rewards of a group give a signal: some differ by more than `SAME`."""
    if not rewards:
        return False
    size = max(map(abs, rewards))
    return max(rewards) - min(rewards) > SAME * max(1.0, size)


def session_advantages(rewards: Mapping[str, GroupReward], scale: Scale) -> dict[str, float]:
    """Return session id -> advantage. `rewards` must hold every session of a group that has a
    reward.

    The advantage is `(reward - mean) / (std + 1e-4)`, with the mean of the session's group. The
    standard deviation has Bessel's correction, and is that of the group (`group`) or of all of
    `rewards` (`batch`). With `none` the divisor is 1. A session gets exactly 0.0 in a group whose
    rewards do not differ (`rewards_differ`), and alone in its group. A teacher's share trains such
    sessions too, and rounding must not add to it.

    Source: TRL 1.16, `GRPOTrainer._generate_and_score_completions` with `scale_rewards`
    (trl/trainer/grpo_trainer.py, and `nanstd` of trl/trainer/utils.py). TRL has groups of equal
    size, one row per session; here sizes may differ.

    Raises `InputError` for a reward that is not a finite number.
    """
    for session, labelled in rewards.items():
        if not math.isfinite(labelled.reward):
            what = f"session {session} has the reward {labelled.reward}"
            raise InputError(f"{what}: it must be a finite number")
    groups = rewards_by("group_id", rewards.values())
    means = {}
    divisors = {}
    for group, values in groups.items():
        means[group] = statistics.mean(values)
        divisors[group] = 1.0
        if scale == "group":
            divisors[group] = standard_deviation(values) + EPSILON
    if scale == "batch":
        every = [labelled.reward for labelled in rewards.values()]
        divisors = dict.fromkeys(groups, standard_deviation(every) + EPSILON)
    advantages = {}
    for session, labelled in rewards.items():
        group = labelled.group_id
        advantages[session] = 0.0
        if rewards_differ(groups[group]):
            advantages[session] = (labelled.reward - means[group]) / divisors[group]
    return advantages


def rewards_by(label: str, rewards: Iterable[GroupReward]) -> dict[str, list[float]]:
    """Return the rewards by one of their labels, such as `group_id`, in their order."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for labelled in rewards:
        parts[getattr(labelled, label)].append(labelled.reward)
    return parts


def standard_deviation(values: Collection[float]) -> float:
    """Return the standard deviation with Bessel's correction, and 0.0 for one value."""
    if len(values) < 2:
        return 0.0
    return statistics.stdev(values)
