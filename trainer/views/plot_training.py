"""The metrics of a training as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rolltap.trainer.metrics_file import read_metrics

_OUTCOMES = tuple(
    f"sessions_{name}"
    for name in ("failed", "timeout", "budget", "infrastructure", "unjudged", "cancelled", "excluded", "no_reward")
)
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward", "reward/harness/*", "reward/task/*")),
    ("sessions", ("sessions", *_OUTCOMES, "suspicious")),
    ("groups of sessions", ("groups", "groups_without_signal", "groups_without_reward")),
    ("sampler and trainer: mean difference of log-probabilities", ("difference/*",)),
    ("off policy: mean difference of log-probabilities", ("off_policy/*",)),
    ("importance ratio", ("ratio/max", "ratio/mean", "ratio/min")),
    ("share of tokens", ("clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio", "masked/*", "truncated/*")),
    ("entropy, KL", ("entropy", "kl")),
    ("sampled tokens", ("tokens_trained", "tokens_computed", "left_out/*")),
    ("tokens forwarded / tokens in rows", ("forwarded_share",)),
    ("tokens in rows a second", ("tokens_per_second",)),
    ("peak memory, GiB", ("peak_memory_gib",)),
)
"""Titles, and names of metrics; `PREFIX/*` stands for each that begins so. Outcomes and reasons that never occur are
left out."""
_COLUMNS = 2
MOST_LABELLED = 8
"""More lines than this of one prefix are thin, grey and without a label."""


def plot_training(metrics: Path, path: Path, title: str) -> None:
    """Write a PNG of the metrics of a training over its steps. Raises as `read_metrics`, and `OSError`."""
    lines = read_metrics(metrics)
    for line in lines:
        if line.get("tokens_in_rows"):
            line["forwarded_share"] = line["tokens_forwarded"] / line["tokens_in_rows"]
    rows = -(-len(_PANELS) // _COLUMNS)
    figure = Figure(figsize=(10, 2.3 * rows))
    # a layout that is computed takes as long as the rest
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.05, top=0.94, wspace=0.16, hspace=0.4)
    figure.suptitle(title)
    for axes, (name, patterns) in zip(figure.subplots(rows, _COLUMNS).flat, _PANELS, strict=True):
        _draw(axes, lines, patterns)
        axes.set_title(name, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supxlabel("optimizer steps", fontsize="medium")
    figure.savefig(path, dpi=100)


def _draw(axes: Axes, lines: Sequence[Mapping[str, Any]], patterns: Sequence[str]) -> None:
    for pattern in patterns:
        names = _matching(lines, pattern)
        many = len(names) > MOST_LABELLED
        for name in names:
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            style = {"color": "tab:gray", "linewidth": 0.5} if many else {"label": unquote(name), "marker": "."}
            axes.plot([step for step, _ in points], [value for _, value in points], **style)
    if patterns == ("difference/*",):
        axes.set_yscale("symlog", linthresh=1e-7)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def _matching(lines: Sequence[Mapping[str, Any]], pattern: str) -> list[str]:
    """Return the names of a pattern that have a value, sorted."""
    prefix = pattern.removesuffix("*")
    names = {name for line in lines for name, value in line.items() if name.startswith(prefix) and value is not None}
    if prefix == pattern:
        names &= {pattern}
    if prefix == "left_out/" or pattern in (*_OUTCOMES, "suspicious"):
        names = {name for name in names if any(line.get(name) for line in lines)}
    elif prefix.startswith("reward/") and len(names) == 1:
        return []  # the reward of all
    return sorted(names)
