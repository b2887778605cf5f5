"""Reports of a training while it runs: the file of metrics, the plots, a line a step on the console."""

import fnmatch
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pydantic_core import to_json
from rich.console import Console
from transformers import TrainerCallback

from rolltap.addons.store.metadata import RUN_FILE
from rolltap.addons.store.staging import new_file, write_atomically
from rolltap.trainer.runs.views.report import plot_rewards
from rolltap.trainer.runs.views.training import METRICS, read_metrics


def append_metrics(path: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Append the metrics of a step, in one write. Raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        file.write(_line({"step": step, **metrics}))


def cut_metrics(path: Path, step: int) -> None:
    """Remove the lines after `step`, and a last line without its end. Raises as `read_metrics`, and `OSError`."""
    if path.exists():
        kept = b"".join(_line(line) for line in read_metrics(path) if line["step"] <= step)
        write_atomically(path, kept.decode())


def _line(values: Mapping[str, Any]) -> bytes:
    return to_json(values, inf_nan_mode="null", fallback=float) + b"\n"


_OUTCOMES = tuple(
    f"sessions_{name}"
    for name in ("failed", "timeout", "budget", "infrastructure", "unjudged", "cancelled", "excluded", "no_reward")
)
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward", "reward/harness/*", "reward/task/*")),
    ("loss", ("loss",)),
    ("gradient norm", ("grad_norm",)),
    ("learning rate", ("learning_rate",)),
    ("evaluation", ("eval/reward", "eval/pass@*[0-9]")),
    ("sessions", ("sessions", *_OUTCOMES, "suspicious")),
    ("groups of sessions", ("groups", "groups_without_signal", "groups_without_reward")),
    ("sampler and trainer: mean difference of log-probabilities", ("difference/*",)),
    ("off policy: mean difference of log-probabilities", ("off_policy/*",)),
    ("importance ratio", ("ratio/max", "ratio/mean", "ratio/min")),
    ("share of tokens", ("clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio", "masked/*", "truncated/*")),
    ("entropy, KL", ("entropy", "kl")),
    ("sampled tokens", ("tokens_trained", "tokens_computed", "left_out/*")),
    ("tokens forwarded / tokens in rows", ("forwarded_share",)),
    ("seconds of a step", ("seconds_*",)),
    ("tokens in rows a second", ("tokens_per_second",)),
    ("peak memory, GiB", ("peak_memory_gib",)),
)
"""Titles, and patterns of metrics' names."""
_OCCURRED = (*_OUTCOMES, "suspicious", "left_out/*")
"""Patterns of metrics that are left out if they are 0 in every step."""
_COLUMNS = 2
MOST_LABELLED = 8
"""More lines than this of one prefix are thin, grey and without a label."""


def plot_training(metrics: Path, path: Path | IO[bytes], title: str) -> None:
    """Write a PNG of the metrics of a training over its steps. Raises as `read_metrics`, and `OSError`."""
    lines = read_metrics(metrics)
    for line in lines:
        if line.get("tokens_in_rows"):
            line["forwarded_share"] = line["tokens_forwarded"] / line["tokens_in_rows"]
    panels = [(name, patterns) for name, patterns in _PANELS if any(_matching(lines, each) for each in patterns)]
    rows = max(1, -(-len(panels) // _COLUMNS))
    figure = Figure(figsize=(10, 2.3 * rows))
    # a layout that is computed takes as long as the rest
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.3 / rows, top=1 - 0.36 / rows, wspace=0.2, hspace=0.45)
    figure.suptitle(title)
    for place, (name, patterns) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        _draw(axes, lines, patterns)
        axes.set_title(name, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supxlabel("optimizer steps", fontsize="medium")
    figure.savefig(path, dpi=100)


def _draw(axes: Axes, lines: Sequence[Mapping[str, Any]], patterns: Sequence[str]) -> None:
    axes.ticklabel_format(axis="y", scilimits=(-3, 4), useOffset=False)  # long labels would reach the next panel
    for pattern in patterns:
        names = _matching(lines, pattern)
        many = len(names) > MOST_LABELLED
        for name in names:
            step = "eval/step" if name.startswith("eval/") else "step"
            points = [(line[step], line[name]) for line in lines if line.get(name) is not None]
            style = {"color": "tab:gray", "linewidth": 0.5} if many else {"label": unquote(name), "marker": "."}
            axes.plot(*zip(*points, strict=True), **style)
    if patterns == ("difference/*",):
        axes.set_yscale("symlog", linthresh=1e-7)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def _matching(lines: Sequence[Mapping[str, Any]], pattern: str) -> list[str]:
    """Return the names of a pattern that have a value, sorted."""
    nothing = (None, 0) if pattern in _OCCURRED else (None,)
    present = {name for line in lines for name, value in line.items() if value not in nothing}
    names = sorted(fnmatch.filter(present, pattern))
    return [] if pattern.startswith("reward/") and len(names) == 1 else names  # it is the reward of all


logger = logging.getLogger(__name__)

PLOT_SHARE = 0.05
"""Most of the time of a training that drawing takes."""


def plot_run(run: Path, title: str) -> None:
    """Draw `training.png`, and for a run with recorded sessions `reward.png`. Each appears when it is complete."""
    with new_file(run / "training.png", "wb") as file:
        plot_training(run / METRICS, file, title)
    if (run / RUN_FILE).exists():
        with new_file(run / "reward.png", "wb") as file:
            plot_rewards(run, file, title)


class Reports(TrainerCallback):
    """Reports a training into the folder `run` and on `console` whenever metrics are logged.

    Plots are not drawn if that would take more than `PLOT_SHARE` of the time. One that cannot be
    drawn is a warning: the training goes on.
    """

    def __init__(self, run: Path, title: str, console: Console) -> None:
        self._run, self._title, self._console = run, title, console
        self._next_plot = 0.0
        self._began = time.monotonic()
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the lines after the checkpoint: their steps are taken again."""
        self._began = time.monotonic()
        self._first_step = state.global_step
        if state.is_world_process_zero:
            cut_metrics(self._run / METRICS, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Report a step."""
        if not state.is_world_process_zero or "train_runtime" in logs:  # a summary comes after the last step
            return
        append_metrics(self._run / METRICS, state.global_step, logs)
        if time.monotonic() >= self._next_plot:
            self.draw()
        line = step_line(state.global_step, state.max_steps, logs)
        taken = state.global_step - self._first_step
        left = time_left(time.monotonic() - self._began, taken, state.max_steps - state.global_step)
        self._console.print(f"{line}  {left}".rstrip(), markup=True)

    def draw(self) -> None:
        """Draw what was logged."""
        started = time.monotonic()
        try:
            plot_run(self._run, self._title)
        except Exception as error:
            logger.warning("the plots of the training could not be drawn: %s", error, exc_info=True)
        ended = time.monotonic()
        self._next_plot = ended + (ended - started) / PLOT_SHARE


def time_left(seconds: float, taken: int, left: int) -> str:
    """Return in words how long the steps that are left take at the pace of those taken; empty if it is not known."""
    if taken < 1 or left < 1:
        return ""
    remaining = timedelta(seconds=round(seconds / taken * left))
    return f"about {remaining} left"


def step_line(step: int, steps: int, logs: Mapping[str, Any]) -> str:
    """Return the metrics of a step that a person looks at first, in rich's markup. Those that are missing are left out.

    The difference, or `off policy`, is the largest of the means by kind of continuity.
    """
    number = {name: value for name, value in logs.items() if isinstance(value, int | float)}

    def share(*names: str) -> float | None:
        values = [number[name] for name in names if name in number]
        return 100 * sum(values) if values else None

    def largest(prefix: str) -> float | None:
        return max((value for name, value in number.items() if name.startswith(prefix)), default=None)

    rows = number.get("tokens_in_rows")
    parts: list[tuple[str, float | None]] = [
        ("reward [bold]{:.3f}[/]", number.get("reward")),
        ("eval {:.3f}", number.get("eval/reward")),
        ("infrastructure failures {:.0f}", number.get("sessions_infrastructure") or None),
        ("unjudged {:.0f}", number.get("sessions_unjudged") or None),
        ("timeouts {:.0f}", number.get("sessions_timeout") or None),
        ("out of budget {:.0f}", number.get("sessions_budget") or None),
        ("suspicious {:.0f}", number.get("suspicious") or None),
        ("excluded {:.0f}", number.get("sessions_excluded") or None),
        ("sessions without a reward {:.0f}", number.get("sessions_no_reward") or None),
        ("groups without signal {:.0f}", number.get("groups_without_signal") or None),
        ("loss {:.4g}", number.get("loss")),
        ("difference {:.1e}", largest("difference/")),
        ("off policy {:.1e}", largest("off_policy/")),
        ("ratio {:.3f}", number.get("ratio/mean")),
        ("clipped {:.1f} %", share("clip_ratio/region_mean", "cispo_clip_ratio")),
        ("masked {:.1f} %", share("masked/low", "masked/high")),
        ("truncated {:.1f} %", share("truncated/low", "truncated/high")),
        ("KL {:.2g}", number.get("kl")),
        ("entropy {:.3f}", number.get("entropy")),
        ("{:,.0f} tokens trained", number.get("tokens_trained")),
        ("{:,.0f} left out", sum(value for name, value in number.items() if name.startswith("left_out/")) or None),
        ("{:.0f} % of rows forwarded", 100 * number["tokens_forwarded"] / rows if rows else None),
        ("{:,.0f} tokens/s", number.get("tokens_per_second")),
        ("{:.1f} GiB", number.get("peak_memory_gib")),
    ]
    return "  ".join([f"step {step}/{steps}", *(text.format(value) for text, value in parts if value is not None)])
