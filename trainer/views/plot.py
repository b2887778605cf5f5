"""The rewards of a run as a picture."""

from pathlib import Path

from matplotlib.figure import Figure

from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.views.report import reward_steps


def plot_rewards(run: Path, path: Path, title: str) -> None:
    """Write a PNG of the mean reward of each policy version, every session's reward as a dot behind it."""
    sessions = list(load_sessions(run).values())
    means = {step.policy_version: step.mean_reward for step in reward_steps(sessions) if step.mean_reward is not None}
    position = {version: i for i, version in enumerate(means)}
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    dots = [(position[s.policy_version or "default"], s.reward) for s in sessions if s.reward is not None]
    axes.scatter([x for x, _ in dots], [y for _, y in dots], s=14, alpha=0.25, color="tab:gray", label="a session")
    axes.plot(list(means.values()), marker="o", color="tab:blue", label="mean of the step's sessions")
    axes.set_xticks(range(len(means)), list(means))
    axes.set(xlabel="policy version (optimizer steps so far)", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
