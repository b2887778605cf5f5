"""How often tasks are solved, with intervals, and whether two runs on the same tasks differ.

Sessions without a reward do not count. A session solved its task when its reward is at least `SOLVED`. Intervals are of
95 %. With `FEW_TASKS` tasks or more they say what other tasks of the kind would give: Student's t over the tasks. With
fewer they hold for these tasks alone. Rewards of 0 and 1 have the interval of Jeffreys' prior there, others Student's t
over the sessions of a task.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table

from rolltap.addons.errors import InputError
from rolltap.addons.store.records import Session
from rolltap.trainer.names import some
from rolltap.trainer.runs.views.outcomes import make_table
from rolltap.trainer.traces.sessions import session_reward

SOLVED = 1.0
FEW_TASKS = 5
DRAWS = 20_000
"""Draws of an estimate, of which the quantiles are the interval."""
_QUANTILES = (0.025, 0.975)

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and the interval of 95 % around it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class PassRow:
    """Chances over `k` sessions of a task, as means over the tasks with a reward.

    `pass_at` is the chance that one of them at least solves it (Chen et al., arXiv 2107.03374), `pass_all` that all of
    them do (Yao et al., arXiv 2406.12045). Both are without bias for tasks with more sessions than `k`.
    """

    k: int
    tasks: int
    pass_at: Interval
    pass_all: Interval


def rewards_of(sessions: Iterable[Session]) -> dict[str, list[float]]:
    """Return task id -> the rewards of its sessions, in their order."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for session in sessions:
        if (reward := session_reward(session)) is not None and session.task_id:
            rewards[session.task_id].append(reward)
    return dict(rewards)


def pass_rows(rewards: Mapping[str, Sequence[float]]) -> list[PassRow]:
    """Return a row for each k: 1, 2, 4 and so on, up to the sessions that every task has."""
    tasks = [(len(given), sum(reward >= SOLVED for reward in given)) for given in rewards.values()]
    fewest = min((n for n, _ in tasks), default=0)
    return [_pass_row(tasks, 2**power) for power in range(fewest.bit_length())]


def _pass_row(tasks: Sequence[tuple[int, int]], k: int) -> PassRow:
    return PassRow(
        k,
        len(tasks),
        _chance(tasks, lambda n, c: 1 - comb(n - c, k) / comb(n, k), lambda share: 1 - (1 - share) ** k),
        _chance(tasks, lambda n, c: comb(c, k) / comb(n, k), lambda share: share**k),
    )


def _chance(
    tasks: Sequence[tuple[int, int]],
    estimate: Callable[[int, int], float],
    of_share: Callable[[Numbers], Numbers],
) -> Interval:
    """Return the mean over tasks, which have n sessions of which c solved them.

    `estimate` is of n and c, `of_share` of the chance of one session.
    """
    values, rng = np.array([estimate(n, c) for n, c in tasks]), np.random.default_rng(0)
    if len(tasks) >= FEW_TASKS and np.ptp(values) > 0:
        return _interval(values, np.clip(_over_tasks(values, rng), 0, 1))
    return _interval(values, of_share(_shares(tasks, rng)).mean(axis=0))


def _over_tasks(values: Numbers, rng: np.random.Generator) -> Numbers:
    """Return draws of the mean of which the values of some tasks are a sample."""
    error = values.std(ddof=1) / len(values) ** 0.5
    draws: Numbers = values.mean() + error * rng.standard_t(len(values) - 1, DRAWS)
    return draws


def _shares(tasks: Sequence[tuple[int, int]], rng: np.random.Generator) -> Numbers:
    """Return draws of the chance of a session, shape (tasks, draws); many tasks that are all alike count as one."""
    n, c = np.array(tasks).T
    if len(tasks) >= FEW_TASKS:
        n, c = n.sum(keepdims=True), c.sum(keepdims=True)
    draws: Numbers = rng.beta(c[:, None] + 0.5, (n - c)[:, None] + 0.5, (len(n), DRAWS))
    return draws


def _interval(values: Numbers, means: Numbers) -> Interval:
    value = float(values.mean())
    low, high = map(float, np.quantile(means, _QUANTILES))
    return Interval(value, min(low, value), max(high, value))  # of 32 of 32 the interval ends at 1


@dataclass(slots=True)
class Comparison(JupyterMixin):
    """Mean rewards of the tasks that two runs have, each task with the same weight.

    Attributes:
        tasks: Number of tasks that both have.
        others: Ids of tasks that one of them has.
        changed: Ids of tasks that both have, which are not the same (`task_digest`).
        first, second: Mean reward of the runs.
        difference: Mean over the tasks of the second run's mean reward minus the first one's.
    """

    tasks: int
    others: list[str]
    changed: list[str]
    first: float
    second: float
    difference: Interval

    @property
    def differ(self) -> bool:
        """True when the interval of the difference has no 0 in it."""
        return not self.difference.low <= 0 <= self.difference.high

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {**asdict(self), "differ": self.differ}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield make_table(
            f"mean rewards of {self.tasks} tasks",
            ("first", "second", "difference (95 % interval)"),
            [(f"{self.first:.3f}", f"{self.second:.3f}", str(self.difference))],
        )
        yield (
            "The second run is better."
            if self.differ and self.difference.value > 0
            else (
                "The first run is better."
                if self.differ
                else "No difference is shown: more sessions or tasks may show one."
            )
        )
        for names, what in ((self.others, "in one of the runs alone"), (self.changed, "changed between the runs")):
            if names:
                yield f"warning: {len(names)} of the tasks are {what}: {some(names)}"


def compare_sessions(first: Sequence[Session], second: Sequence[Session]) -> Comparison:
    """Compare the rewards of two runs, paired by task.

    Raises `InputError` when no task has rewards in both, when there are too few sessions for an interval, and for a run
    with sessions of several policies, such as that of a training.
    """
    for sessions in (first, second):
        if len(versions := {session.policy_version or "" for session in sessions}) > 1:
            raise InputError(
                f"a run has sessions of {len(versions)} policy versions ({some(sorted(versions))}): take those of one "
                "with `rolltap filter --policy-version`"
            )
    one, two = rewards_of(first), rewards_of(second)
    both = sorted(one.keys() & two.keys())
    if not both:
        raise InputError("no task has sessions with a reward in both runs")
    digests = [{session.task_id: session.task_digest for session in sessions} for sessions in (first, second)]
    pairs = [(np.array(one[name]), np.array(two[name])) for name in both]
    return Comparison(
        tasks=len(both),
        others=sorted(one.keys() ^ two.keys()),
        changed=[name for name in both if digests[0][name] != digests[1][name]],
        first=float(np.mean([before.mean() for before, _ in pairs])),
        second=float(np.mean([after.mean() for _, after in pairs])),
        difference=_difference(pairs),
    )


def _difference(pairs: Sequence[tuple[Numbers, Numbers]]) -> Interval:
    """Return the mean difference of the rewards of some tasks. Raises `InputError` for too few sessions."""
    values, rng = np.array([after.mean() - before.mean() for before, after in pairs]), np.random.default_rng(0)
    sides = list(zip(*pairs, strict=True))
    binary = all(set(given) <= {0.0, 1.0} for side in sides for given in side)
    if len(pairs) >= FEW_TASKS and (np.ptp(values) > 0 or not binary):
        return _interval(values, _over_tasks(values, rng))
    if binary:
        before, after = (
            _shares([(len(given), int(given.sum())) for given in side], rng).mean(axis=0) for side in sides
        )
        return _interval(values, after - before)
    if min(len(given) for side in sides for given in side) < 2:
        raise InputError("there are too few sessions for an interval: give each task several, or more tasks")
    error = sum(given.var(ddof=1) / len(given) for side in sides for given in side) ** 0.5 / len(pairs)
    freedom = sum(len(given) - 1 for side in sides for given in side)
    return _interval(values, values.mean() + error * rng.standard_t(freedom, DRAWS))


def pass_table(rows: Sequence[PassRow], tasks: int) -> Table:
    """Return the table of rows, of a run with so many tasks."""
    cells = [(row.k, str(row.pass_at), str(row.pass_all)) for row in rows]
    rewarded = f"{rows[0].tasks} tasks" + (f" with rewards, of {tasks}" if rows[0].tasks < tasks else "")
    return make_table(f"solved, of {rewarded} (95 % interval)", ("k", "pass@k: one of k", "pass^k: all of k"), cells)
