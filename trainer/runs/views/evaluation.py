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
    tasks = []
    for given in rewards.values():
        solved = sum(reward >= SOLVED for reward in given)
        tasks.append((len(given), solved))
    fewest = min((n for n, _ in tasks), default=0)
    if fewest == 0:
        return []
    rng = np.random.default_rng(0)
    a, b, weights = _beta_grid(tasks)
    few = len(tasks) < FEW_TASKS
    if few:
        chosen = rng.choice(len(a), DRAWS, p=weights / weights.sum())
        n, c = np.array(tasks).T[:, :, None]
        chances = rng.beta(a[chosen] + c, b[chosen] + n - c)
        weights = np.ones(DRAWS)
    rows = []
    for power in range(fewest.bit_length()):
        k = 2**power
        if few:
            none = ((1 - chances) ** k).mean(axis=0)
            every = (chances**k).mean(axis=0)
        else:
            none = _all_of(k, b, a)
            every = _all_of(k, a, b)
        solved_once = np.array([1 - comb(n - c, k) / comb(n, k) for n, c in tasks])
        solved_always = np.array([comb(c, k) / comb(n, k) for n, c in tasks])
        pass_at = _chance(solved_once, 1 - none, weights, rng)
        pass_all = _chance(solved_always, every, weights, rng)
        rows.append(PassRow(k, len(tasks), pass_at, pass_all))
    return rows


def _all_of(k: int, a: Numbers, b: Numbers) -> Numbers:
    """Return the mean of p**k, where p has the Beta distribution of a and b."""
    more = np.arange(k)[:, None]
    means: Numbers = ((a + more) / (a + b + more)).prod(axis=0)
    return means


def _chance(
    values: Numbers,
    means: Numbers,
    weights: Numbers,
    rng: np.random.Generator,
) -> Interval:
    """Return the mean of the tasks' values, with the interval of `means` with these weights.

    With many tasks it has Student's t in it, which needs no model of the tasks.
    """
    order = np.argsort(means)
    below = weights[order].cumsum()
    ends = means[order][np.searchsorted(below, np.array(_QUANTILES) * below[-1])]
    found = _around(values, ends)
    if len(values) < MANY_TASKS:
        return found
    other = _interval(values, np.clip(_over_tasks(values, rng), 0, 1))
    return Interval(found.value, min(found.low, other.low), max(found.high, other.high))


_CELLS = 50
_ALIKE = 0.1
"""Probability, before anything is known, that all tasks have the same chance."""


def _beta_grid(tasks: Sequence[tuple[int, int]]) -> tuple[Numbers, Numbers, Numbers]:
    """Return parameters a and b of the Beta distribution of the tasks' chances, and their weights.

    A grid of its mean and its spread 1 / (a + b + 1) is laid over where they are likely, and again.
    `tasks` have n sessions, of which c solved them.
    """
    bounds = np.array([[0.0, 1.0], [0.0, 1.0]])
    most = max(n for n, _ in tasks)
    places = (np.arange(_CELLS) + 0.5) / _CELLS
    for _ in range(3):
        lows = bounds[:, 0]
        sizes = bounds[:, 1] - lows
        mean, spread = lows[:, None] + sizes[:, None] * places
        spread = np.append(spread, 1e-6)  # all chances alike
        prior = np.append(np.full(_CELLS, (1 - _ALIKE) * sizes[1] / _CELLS), _ALIKE)
        total = np.broadcast_to(1 / spread - 1, (_CELLS, len(spread)))
        a = mean[:, None] * total
        b = total - a
        of_a = _log_rising(a, most)
        of_b = _log_rising(b, most)
        of_total = _log_rising(total, most)
        log = np.log(prior) + np.zeros_like(a)
        for (n, c), number in Counter(tasks).items():
            log += number * (of_a[c] + of_b[n - c] - of_total[n])
        weights = np.exp(log - log.max())
        likely = weights > 1e-6
        for axis, among in enumerate([likely.any(axis=1), likely.any(axis=0)[:-1]]):
            cells = np.flatnonzero(among)
            if cells.size:
                ends = np.array([cells[0], cells[-1] + 1])
                bounds[axis] = lows[axis] + sizes[axis] / _CELLS * ends
    return a.ravel(), b.ravel(), weights.ravel()


def _log_rising(base: Numbers, most: int) -> Numbers:
    """Return the logarithms of base (base + 1) ... (base + n - 1) for n from 0 to `most`."""
    factors = np.log(base + np.arange(most)[:, None, None])
    return np.concatenate([np.zeros((1, *base.shape)), factors.cumsum(axis=0)])


def _over_tasks(values: Numbers, rng: np.random.Generator) -> Numbers:
    """Return draws of the mean of which the values of some tasks are a sample."""
    error = values.std(ddof=1) / len(values) ** 0.5
    draws: Numbers = values.mean() + error * rng.standard_t(len(values) - 1, DRAWS)
    return draws


def _shares(side: Sequence[Numbers], rng: np.random.Generator) -> Numbers:
    """Return draws of the mean chance of a session of some tasks, whose rewards are 0 and 1; many
    tasks that are all alike count as one."""
    n = np.array([len(given) for given in side])
    c = np.array([int(given.sum()) for given in side])
    if len(side) >= FEW_TASKS:
        n = n.sum(keepdims=True)
        c = c.sum(keepdims=True)
    draws = rng.beta(c[:, None] + 0.5, (n - c)[:, None] + 0.5, (len(n), DRAWS))
    means: Numbers = draws.mean(axis=0)
    return means


def _interval(values: Numbers, means: Numbers) -> Interval:
    return _around(values, np.quantile(means, _QUANTILES))


def _around(values: Numbers, ends: Numbers) -> Interval:
    """Return the interval, made wide enough for the mean: 32 of 32 end at 1."""
    value = float(values.mean())
    low, high = map(float, ends)
    return Interval(value, min(low, value), max(high, value))


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
        if not self.differ:
            yield "No difference is shown: more sessions or tasks may show one."
        elif self.difference.value > 0:
            yield "The second run is better."
        else:
            yield "The first run is better."
        warned = {"in one of the runs alone": self.others, "changed between the runs": self.changed}
        for what, names in warned.items():
            if names:
                yield f"warning: {len(names)} of the tasks are {what}: {some(names)}"


def compare_sessions(first: Sequence[Session], second: Sequence[Session]) -> Comparison:
    """Compare the rewards of two runs, paired by task.

    Raises `InputError` when no task has rewards in both, when there are too few sessions for an
    interval, and for a run with sessions of several policies, such as that of a training.
    """
    _require_one_policy("first", first)
    _require_one_policy("second", second)
    one = task_rewards(first)
    two = task_rewards(second)
    both = sorted(one.keys() & two.keys())
    if not both:
        raise InputError("no task has sessions with a reward in both runs")
    before = [np.array(one[name]) for name in both]
    after = [np.array(two[name]) for name in both]
    first_digests = {session.task_id: session.task_digest for session in first}
    second_digests = {session.task_id: session.task_digest for session in second}
    return Comparison(
        tasks=len(both),
        others=sorted(one.keys() ^ two.keys()),
        changed=[name for name in both if first_digests[name] != second_digests[name]],
        first=float(_means(before).mean()),
        second=float(_means(after).mean()),
        difference=_difference(before, after),
    )


def _require_one_policy(name: str, sessions: Sequence[Session]) -> None:
    versions = {session.policy_version or "" for session in sessions}
    if len(versions) > 1:
        raise InputError(
            f"the {name} run has sessions of {len(versions)} policy versions"
            f" ({some(sorted(versions))}): take sessions of one with `rolltap filter"
            " --policy-version`"
        )


def _means(side: Sequence[Numbers]) -> Numbers:
    return np.array([given.mean() for given in side])


def _difference(before: Sequence[Numbers], after: Sequence[Numbers]) -> Interval:
    """Return the mean difference of the rewards of some tasks. Raises `InputError` for too few
    sessions."""
    rng = np.random.default_rng(0)
    values = _means(after) - _means(before)
    given = [*before, *after]
    binary = set(np.concatenate(given)) <= {0.0, 1.0}
    if len(values) >= FEW_TASKS and (np.ptp(values) > 0 or not binary):
        return _interval(values, _over_tasks(values, rng))
    if binary:
        first = _shares(before, rng)
        second = _shares(after, rng)
        return _interval(values, second - first)
    if min(map(len, given)) < 2:
        raise InputError(
            "there are too few sessions for an interval: give each task several, or more tasks"
        )
    variance = sum(rewards.var(ddof=1) / len(rewards) for rewards in given)
    freedom = sum(len(rewards) - 1 for rewards in given)
    draws = variance**0.5 / len(values) * rng.standard_t(freedom, DRAWS)
    return _interval(values, values.mean() + draws)


def pass_table(rows: Sequence[PassRow], tasks: int) -> Table:
    """Return the table of rows, of a run with so many tasks."""
    rewarded = f"{rows[0].tasks} tasks"
    if rows[0].tasks < tasks:
        rewarded += f" with rewards, of {tasks}"
    title = f"solved, of {rewarded} (95 % interval)"
    columns = ("k", "pass@k: one of k", "pass^k: all of k")
    return make_table(title, columns, [(row.k, row.pass_at, row.pass_all) for row in rows])
