"""What a run holds, for people and for programs; and how its reward went."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from rolltap.addons.calls import Session
from rolltap.addons.store import read_rows
from rolltap.trainer.dataset import load_calls, load_sessions
from rolltap.trainer.traces import Ledger, Strategy, build_traces, label, leave_out_unrewarded


@dataclass(frozen=True, slots=True)
class Step:
    """The sessions of one policy version."""

    policy_version: str
    sessions: int
    mean_reward: float | None
    best_reward: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over a run. `interrupted` calls were started and never ended, because the recorder was killed."""

    sessions: dict[str, int]
    calls: dict[str, int]
    kinds: dict[str, int]
    roles: dict[str, int]
    violations: dict[str, int]
    refused: dict[str, int]
    uncaptured_calls: int
    """Requests that look like model calls and were not answered here: any of them is a gap in the record."""
    retried: int
    """Requests that got the reply of an earlier one, which is recorded once."""
    continued: int
    """How often an engine failed in the middle of a call and the call went on."""
    rejected: int
    unauthorised: int
    interrupted: int
    ledger: Ledger
    steps: list[Step]

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON values."""
        return asdict(self)


def summarize(run: Path, strategy: Strategy = "prefix_merging") -> Summary:
    """Count a run. Raises `RunError` when the folder cannot be read."""
    sessions = load_sessions(run)
    calls = load_calls(run)
    events = list(read_rows(run, "events"))
    ledger = Ledger()
    for session_id, session_calls in calls.items():
        traces, account = build_traces(session_calls, strategy)
        if session_id in sessions:
            label(traces, sessions[session_id])
        ledger += leave_out_unrewarded(traces, account)[1]
    every = [call for session_calls in calls.values() for call in session_calls]
    ended = {call.call_id for call in every}
    kinds = Counter(event["kind"] for event in events)
    return Summary(
        sessions=dict(Counter(session.status for session in sessions.values())),
        calls=dict(Counter(call.status for call in every)),
        kinds=dict(Counter(call.kind for call in every)),
        roles=dict(Counter(call.role for call in every)),
        violations=dict(Counter(call.violation for call in every if call.violation)),
        refused=dict(Counter(event["host"] for event in events if event["kind"] == "refused")),
        uncaptured_calls=kinds["uncaptured"],
        retried=kinds["joined"] + kinds["replayed"],
        continued=kinds["continued"],
        rejected=kinds["rejected"],
        unauthorised=kinds["unauthorised"],
        interrupted=sum(e["kind"] == "call_started" and e["detail"] not in ended for e in events),
        ledger=ledger,
        steps=reward_steps(sessions.values()),
    )


def reward_steps(sessions: Iterable[Session]) -> list[Step]:
    """One entry per policy version, in the order in which they were first used."""
    versions: defaultdict[str, list[Session]] = defaultdict(list)
    for session in sorted(sessions, key=lambda session: session.started_at):
        versions[session.policy_version or "default"].append(session)
    steps = []
    for version, group in versions.items():
        rewards = [session.reward for session in group if session.reward is not None]
        mean, best = (fmean(rewards), max(rewards)) if rewards else (None, None)
        steps.append(Step(version, len(group), mean, best))
    return steps


def print_summary(summary: Summary, console: Console) -> None:
    """Tables of the rewards and of all that was recorded."""
    if summary.steps:
        rewards = Table("policy version", "sessions", "mean reward", "best reward", title="reward")
        for step in summary.steps:
            rewards.add_row(
                step.policy_version, str(step.sessions), _number(step.mean_reward), _number(step.best_reward)
            )
        console.print(rewards)
    table = Table("", "", show_header=False, title="recorded")
    table.add_row("sessions", _counts(summary.sessions))
    table.add_row("calls", _counts(summary.calls))
    table.add_row("roles", _counts(summary.roles))
    table.add_row("prompts", _counts(summary.kinds))
    table.add_row("sampled tokens", str(summary.ledger.sampled))
    table.add_row("  to train", str(summary.ledger.trained))
    for reason, tokens in sorted(summary.ledger.left_out.items()):
        table.add_row(f"  left out: {reason}", str(tokens))
    for violation, count in summary.violations.items():
        table.add_row("[red]broken tokens[/]", f"{count} calls: {violation}")
    if summary.uncaptured_calls:
        table.add_row("[red]uncaptured model calls[/]", str(summary.uncaptured_calls))
    notes = {
        "retried requests": summary.retried,
        "continued after a failure of the engine": summary.continued,
        "rejected requests": summary.rejected,
        "unauthorised requests": summary.unauthorised,
        "calls cut off": summary.interrupted,
    }
    for note, count in notes.items():
        if count:
            table.add_row(note, str(count))
    if summary.refused:
        table.add_row("refused hosts", _counts(summary.refused))
    console.print(table)


def plot_rewards(run: Path, path: Path, title: str) -> None:
    """Write a PNG of the mean reward of each policy version, every session's reward as a dot behind it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sessions = list(load_sessions(run).values())
    steps = [step for step in reward_steps(sessions) if step.mean_reward is not None]
    position = {step.policy_version: i for i, step in enumerate(steps)}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    dots = [(position[s.policy_version or "default"], s.reward) for s in sessions if s.reward is not None]
    if dots:
        axes.scatter(*zip(*dots, strict=True), s=14, alpha=0.25, color="tab:gray", label="a session")
    axes.plot([step.mean_reward for step in steps], marker="o", color="tab:blue", label="mean of the step's sessions")
    axes.set_xticks(range(len(steps)), [step.policy_version for step in steps])
    axes.set(xlabel="policy version (optimizer steps so far)", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
