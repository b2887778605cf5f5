"""The rewards of a run as a picture."""

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.versions import Version
from rolltap.trainer.views.report import reward_steps


def plot_rewards(run: Path, path: Path, title: str) -> None:
    """Write a PNG of the mean reward of each step's weights, every session's reward as a dot behind it.

    Versions that differ in the attempt only are one point: a resumed step has sessions of both.
    """
    sessions = [
        replace(session, policy_version=_without_attempt(session.policy_version or "default"))
        for session in load_sessions(run).values()
    ]
    means = {step.policy_version: step.mean_reward for step in reward_steps(sessions) if step.mean_reward is not None}
    position = {version: i for i, version in enumerate(means)}
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    dots = [(position[s.policy_version], s.reward) for s in sessions if s.policy_version and s.reward is not None]
    axes.scatter([x for x, _ in dots], [y for _, y in dots], s=14, alpha=0.25, color="tab:gray", label="a session")
    axes.plot(list(means.values()), marker="o", color="tab:blue", label="mean of the step's sessions")
    axes.set_xticks(range(len(means)), [_step(version) for version in means])
    axes.set(xlabel="weights (optimizer steps so far)", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _without_attempt(version: str) -> str:
    known = Version.parse(version)
    return str(replace(known, attempt=0)) if known else version


def _step(version: str) -> str:
    known = Version.parse(version)
    return str(known.step) if known else version
