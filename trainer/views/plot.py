"""The rewards of a run as a picture."""

from pathlib import Path

from matplotlib.figure import Figure

from rolltap.addons.store.records import Session
from rolltap.trainer.traces.outcomes import session_reward
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.versions import Version
from rolltap.trainer.views.report import reward_steps, weights_name


def plot_rewards(run: Path, path: Path, title: str) -> None:
    """Write a PNG of the mean reward of each step's weights, every session's reward as a dot behind it."""
    sessions = load_sessions(run).values()
    means = {step.policy_version: step.mean_reward for step in reward_steps(sessions) if step.mean_reward is not None}
    position = {name: i for i, name in enumerate(means)}
    labels = {weights_name(session): _label(session) for session in sessions}
    rewards = [(weights_name(session), session_reward(session)) for session in sessions]
    dots = [(position[name], reward) for name, reward in rewards if reward is not None]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter([x for x, _ in dots], [y for _, y in dots], s=14, alpha=0.25, color="tab:gray", label="a session")
    axes.plot(list(means.values()), marker="o", color="tab:blue", label="mean of the step's sessions")
    axes.set_xticks(range(len(means)), [labels[name] for name in means])
    axes.set(xlabel="weights (optimizer steps so far)", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _label(session: Session) -> str:
    version = Version.parse(session.policy_version or "")
    return str(version.step) if version else weights_name(session)
