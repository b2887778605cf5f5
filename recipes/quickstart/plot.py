"""The plot of the quickstart: the mean reward of each step's weights, and every session as a dot
behind it."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

import rolltap


def plot_rewards(sessions: Iterable[rolltap.Session], path: Path, title: str) -> None:
    """Write a PNG of the rewards by the number of optimizer steps that made the weights."""
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for session in sessions:
        if session.reward is not None and session.policy_version is not None:
            _, step, _ = session.policy_version.split(".")
            rewards[int(step)].append(session.reward)
    steps = sorted(rewards)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for step in steps:
        label = "a session" if step == steps[0] else None
        axes.scatter(
            [step] * len(rewards[step]),
            rewards[step],
            s=14,
            alpha=0.25,
            color="tab:gray",
            label=label,
        )
    means = [sum(rewards[step]) / len(rewards[step]) for step in steps]
    axes.plot(steps, means, marker="o", color="tab:blue", label="mean of the step's sessions")
    axes.set_xticks(steps)
    axes.set(xlabel="weights (optimizer steps so far)", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    figure.legend(
        loc="outside lower center", ncols=2, fontsize="small"
    )  # inside it could hide sessions
    figure.savefig(path, dpi=120)
