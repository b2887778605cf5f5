"""Group-relative advantages, one per session."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Literal

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import GroupReward

GROUP = attrgetter("group_id")
Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as in TRL."""

SAME = 1e-6
"""Largest difference between equal rewards, relative to their size if that is more than 1. An advantage that is only
such a difference would still move the weights by a whole step of Adam."""


def rewards_differ(rewards: Collection[float]) -> bool:
    """Return True if the rewards of a group's sessions give a signal: some differ by more than `SAME`."""
    return bool(rewards) and max(rewards) - min(rewards) > SAME * max(1.0, *map(abs, rewards))


def session_advantages(rewards: Mapping[str, GroupReward], scale: Scale) -> dict[str, float]:
    """Return session id -> advantage. `rewards` must hold every session of a group that has a reward.

    The advantage is `(reward - mean) / (std + 1e-4)`, with the mean of the session's group. The standard deviation has
    Bessel's correction, and is that of the group (`group`) or of all of `rewards` (`batch`). With `none` the divisor is
    1. A session alone in its group, or in a group of equal rewards, gets 0.0.

    Source: TRL 1.16, `GRPOTrainer._generate_and_score_completions` with `scale_rewards` (trl/trainer/grpo_trainer.py,
    and `nanstd` of trl/trainer/utils.py). TRL has groups of equal size, one row per session; here sizes may differ.

    Raises `InputError` for a reward that is not a finite number and for an unknown `scale`.
    """
    for session, labelled in rewards.items():
        if not math.isfinite(labelled.reward):
            raise InputError(f"session {session} has the reward {labelled.reward}: it must be a finite number")
    groups = rewards_by(GROUP, rewards.values())
    means = {group: statistics.mean(values) for group, values in groups.items()}

    if scale == "group":
        divisors = {group: _std(values) + EPSILON for group, values in groups.items()}
    elif scale == "batch":
        divisors = dict.fromkeys(groups, _std([labelled.reward for labelled in rewards.values()]) + EPSILON)
    elif scale == "none":
        divisors = dict.fromkeys(groups, 1.0)
    else:
        raise InputError(f"unknown scale {scale!r}: choose group, batch or none")
    return {
        session: (labelled.reward - means[labelled.group_id]) / divisors[labelled.group_id]
        for session, labelled in rewards.items()
    }


def mean_group_std(groups: Collection[list[float]]) -> float:
    """Return the mean over groups of the standard deviation of rewards (Bessel's correction; 0.0 for one session)."""
    return statistics.mean(map(_std, groups))


def rewards_by(label: Callable[[GroupReward], str], rewards: Iterable[GroupReward]) -> dict[str, list[float]]:
    """Return label -> the rewards that have it, in their order."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for labelled in rewards:
        parts[label(labelled)].append(labelled.reward)
    return parts


def _std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
