"""How often tasks are solved, with intervals, and whether two runs on the same tasks differ.

Sessions without a reward do not count. A session solved its task when its reward is at least
`SOLVED`. Intervals are of 95 %. With `FEW_TASKS` tasks or more they say what other tasks of the
kind would give, with fewer they hold for these tasks alone. Those of solved tasks follow from the
beta-binomial model: the chances of the tasks have a Beta distribution, of which every mean and
every spread is as likely as another one. Those of a difference are Student's t over the tasks. For
few tasks they have Jeffreys' prior for rewards of 0 and 1, and else Student's t over the sessions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
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
from rolltap.trainer.runs.views.outcomes import task_rewards
from rolltap.trainer.runs.views.tables import make_table

SOLVED = 1.0
FEW_TASKS = 5
MANY_TASKS = 30
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

    `pass_at` is the chance that one of them at least solves it (Chen et al., arXiv 2107.03374),
    `pass_all` that all of them do (Yao et al., arXiv 2406.12045). Both are without bias for tasks
    with more sessions than `k`.
    """

    k: int
    tasks: int
    pass_at: Interval
    pass_all: Interval


def pass_rows(rewards: Mapping[str, Sequence[float]]) -> list[PassRow]:
    """Return a row for each k: 1, 2, 4 and so on, up to the sessions that every task has."""
    tasks = [(len(given), sum(reward >= SOLVED for reward in given)) for given in rewards.values()]
    fewest = min((n for n, _ in tasks), default=0)
    if not fewest:
        return []
    rng = np.random.default_rng(0)
    a, b, weights = _beta_grid(tasks)
    chances = None
    if len(tasks) < FEW_TASKS:
        chosen = rng.choice(len(a), DRAWS, p=weights / weights.sum())
        n, c = np.array(tasks).T[:, :, None]
        chances = rng.beta(a[chosen] + c, b[chosen] + n - c)
    rows = []
    for power in range(fewest.bit_length()):
        k = 2**power
        if chances is None:
            more = np.arange(k)[:, None]
            one = 1 - ((b + more) / (a + b + more)).prod(axis=0)
            every = ((a + more) / (a + b + more)).prod(axis=0)
        else:
            weights = np.ones(DRAWS)
            one = 1 - ((1 - chances) ** k).mean(axis=0)
            every = (chances**k).mean(axis=0)
        pass_at = np.array([1 - comb(n - c, k) / comb(n, k) for n, c in tasks])
        pass_all = np.array([comb(c, k) / comb(n, k) for n, c in tasks])
        found = [_chance(pass_at, one, weights, rng), _chance(pass_all, every, weights, rng)]
        rows.append(PassRow(k, len(tasks), *found))
    return rows


def _chance(
    values: Numbers, means: Numbers, weights: Numbers, rng: np.random.Generator
) -> Interval:
    """Return the mean of the tasks' values, with the interval of `means` with these weights.

    With many tasks it has Student's t in it, which needs no model of the tasks.
    """
    order = np.argsort(means)
    below = weights[order].cumsum()
    low, high = means[order][np.searchsorted(below, np.array(_QUANTILES) * below[-1])]
    value = values.mean()
    if len(values) >= MANY_TASKS:
        other = _interval(values, np.clip(_over_tasks(values, rng), 0, 1))
        low = min(low, other.low)
        high = max(high, other.high)
    return Interval(
        float(value), float(min(low, value)), float(max(high, value))
    )  # 32 of 32 ends at 1


_CELLS = 50
_ALIKE = 0.1
"""Probability, before anything is known, that all tasks have the same chance."""


def _beta_grid(tasks: Sequence[tuple[int, int]]) -> tuple[Numbers, Numbers, Numbers]:
    """Return parameters a and b of the Beta distribution of the tasks' chances, and their weights.

    A grid of its mean and its spread 1 / (a + b + 1) is laid over where they are likely, and again.
    `tasks` have n sessions, of which c solved them.
    """
    bounds = np.array([[0.0, 1.0], [0.0, 1.0]])
    counts = Counter(tasks)
    most = max(n for n, _ in tasks)
    places = (np.arange(_CELLS) + 0.5) / _CELLS
    for _ in range(3):
        lows, sizes = bounds[:, 0], np.diff(bounds)[:, 0]
        mean, spread = lows[:, None] + sizes[:, None] * places
        spread = np.append(spread, 1e-6)  # all chances alike
        prior = np.append(np.full(_CELLS, (1 - _ALIKE) * sizes[1] / _CELLS), _ALIKE)
        total = np.broadcast_to(1 / spread - 1, (_CELLS, len(spread)))
        a = mean[:, None] * total
        b = total - a
        more = np.arange(most)[:, None, None]
        rising = [np.log(each + more).cumsum(axis=0) for each in (a, b, total)]
        of_a, of_b, of_total = (np.concatenate([np.zeros((1, *a.shape)), each]) for each in rising)
        log = np.log(prior) + np.zeros_like(a)
        for (n, c), number in counts.items():
            log += number * (of_a[c] + of_b[n - c] - of_total[n])
        weights = np.exp(log - log.max())
        likely = weights > 1e-6
        for axis, among in enumerate((likely.any(axis=1), likely.any(axis=0)[:-1])):
            if among.any():
                cells = np.flatnonzero(among)
                bounds[axis] = lows[axis] + sizes[axis] / _CELLS * np.array(
                    [cells[0], cells[-1] + 1]
                )
    return a.ravel(), b.ravel(), weights.ravel()


def _over_tasks(values: Numbers, rng: np.random.Generator) -> Numbers:
    """Return draws of the mean of which the values of some tasks are a sample."""
    error = values.std(ddof=1) / len(values) ** 0.5
    draws: Numbers = values.mean() + error * rng.standard_t(len(values) - 1, DRAWS)
    return draws


def _shares(tasks: Sequence[tuple[int, int]], rng: np.random.Generator) -> Numbers:
    """Return draws of the chance of a session, shape (tasks, draws); many tasks that are all alike
    count as one."""
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
        for names, what in (
            (self.others, "in one of the runs alone"),
            (self.changed, "changed between the runs"),
        ):
            if names:
                yield f"warning: {len(names)} of the tasks are {what}: {some(names)}"


def compare_sessions(first: Sequence[Session], second: Sequence[Session]) -> Comparison:
    """Compare the rewards of two runs, paired by task.

    Raises `InputError` when no task has rewards in both, when there are too few sessions for an
    interval, and for a run with sessions of several policies, such as that of a training.
    """
    for name, sessions in (("first", first), ("second", second)):
        if len(versions := {session.policy_version or "" for session in sessions}) > 1:
            raise InputError(
                f"the {name} run has sessions of {len(versions)} policy versions"
                f" ({some(sorted(versions))}): take sessions of one with `rolltap filter"
                " --policy-version`"
            )
    one, two = task_rewards(first), task_rewards(second)
    both = sorted(one.keys() & two.keys())
    if not both:
        raise InputError("no task has sessions with a reward in both runs")
    digests = [
        {session.task_id: session.task_digest for session in sessions}
        for sessions in (first, second)
    ]
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
    """Return the mean difference of the rewards of some tasks. Raises `InputError` for too few
    sessions."""
    values, rng = (
        np.array([after.mean() - before.mean() for before, after in pairs]),
        np.random.default_rng(0),
    )
    sides = list(zip(*pairs, strict=True))
    binary = all(set(given) <= {0.0, 1.0} for side in sides for given in side)
    if len(pairs) >= FEW_TASKS and (np.ptp(values) > 0 or not binary):
        return _interval(values, _over_tasks(values, rng))
    if binary:
        before, after = (
            _shares([(len(given), int(given.sum())) for given in side], rng).mean(axis=0)
            for side in sides
        )
        return _interval(values, after - before)
    if min(len(given) for side in sides for given in side) < 2:
        raise InputError(
            "there are too few sessions for an interval: give each task several, or more tasks"
        )
    error = sum(given.var(ddof=1) / len(given) for side in sides for given in side) ** 0.5 / len(
        pairs
    )
    freedom = sum(len(given) - 1 for side in sides for given in side)
    return _interval(values, values.mean() + error * rng.standard_t(freedom, DRAWS))


def pass_table(rows: Sequence[PassRow], tasks: int) -> Table:
    """Return the table of rows, of a run with so many tasks."""
    cells = [(row.k, str(row.pass_at), str(row.pass_all)) for row in rows]
    rewarded = f"{rows[0].tasks} tasks" + (
        f" with rewards, of {tasks}" if rows[0].tasks < tasks else ""
    )
    return make_table(
        f"solved, of {rewarded} (95 % interval)",
        ("k", "pass@k: one of k", "pass^k: all of k"),
        cells,
    )
