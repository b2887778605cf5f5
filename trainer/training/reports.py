"""Reports of a training while it runs: the file of metrics, the plots, a line a step on the console.

They show what TRL logs, and so do the reporters of `grpo.report_to`. Only the main process reports.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback

from rolltap.addons.store.metadata import RUN_FILE
from rolltap.trainer.metrics_file import METRICS, append_metrics, cut_metrics
from rolltap.trainer.views.plot import plot_rewards
from rolltap.trainer.views.plot_training import plot_training

logger = logging.getLogger(__name__)

PLOT_SHARE = 0.05
"""Most of the time of a training that drawing takes."""


def run_reports(run: Path, title: str, console: Console) -> list[TrainerCallback]:
    """Return the callbacks that report a training into the folder `run` and on `console`."""
    return [MetricsFile(run / METRICS), Plots(lambda: plot_run(run, title)), StepLines(console)]


def plot_run(run: Path, title: str) -> None:
    """Draw `training.png`, and for a run with recorded sessions `reward.png`. Each appears when it is complete."""
    _replace(run / "training.png", lambda path: plot_training(run / METRICS, path, title))
    if (run / RUN_FILE).exists():
        _replace(run / "reward.png", lambda path: plot_rewards(run, path, title))


class MetricsFile(TrainerCallback):
    """Appends each step's metrics to a file. A training that resumes first removes those of steps it takes again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the lines after the checkpoint."""
        if state.is_world_process_zero:
            cut_metrics(self._path, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append a line."""
        if state.is_world_process_zero and _of_a_step(logs):
            append_metrics(self._path, state.global_step, logs)


class Plots(TrainerCallback):
    """Draws when metrics were logged, unless that would take more than `PLOT_SHARE` of the time, and at the end.

    A plot that cannot be drawn is a warning: the training goes on.
    """

    def __init__(self, draw: Callable[[], None]) -> None:
        self._draw_plots = draw
        self._next = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Draw if it is time."""
        if state.is_world_process_zero and _of_a_step(logs) and time.monotonic() >= self._next:
            self._draw()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the last state."""
        if state.is_world_process_zero:
            self._draw()

    def _draw(self) -> None:
        started = time.monotonic()
        try:
            self._draw_plots()
        except Exception as error:
            logger.warning("the plots of the training could not be drawn: %s", error, exc_info=True)
        ended = time.monotonic()
        self._next = ended + (ended - started) / PLOT_SHARE


class StepLines(TrainerCallback):
    """Prints a line when metrics were logged."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line of a step."""
        if state.is_world_process_zero and _of_a_step(logs):
            line = step_line(state.global_step, state.max_steps, logs)
            self._console.print(line, highlight=False, soft_wrap=True)


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


def _of_a_step(logs: Any) -> bool:
    """Return False for the summary that transformers logs after the last step."""
    return logs is not None and "train_runtime" not in logs


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write `path` under a hidden name, with its suffix, and rename it."""
    hidden = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(hidden)
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
