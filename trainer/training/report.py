"""Reports of a training while it runs: the file of metrics, and a line a step on the console."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from rich.console import Console
from transformers import TrainerCallback

from rolltap.addons.store.staging import write_atomically
from rolltap.trainer.names import counted
from rolltap.trainer.runs.views.training import METRICS, read_metrics

STEP_PARTS = ("rollout", "publication", "evaluation", "training")
"""Phases of a step. A moment that is of no other one is of the last."""
_SHOWN = {
    "reward": "reward [bold]{:.3f}[/]",
    "eval/reward": "eval {:.3f}",
    "sessions_infrastructure": "infrastructure failures {:.0f}",
    "sessions_unjudged": "unjudged {:.0f}",
    "sessions_timeout": "timeouts {:.0f}",
    "sessions_budget": "out of budget {:.0f}",
    "suspicious": "suspicious {:.0f}",
    "sessions_excluded": "excluded {:.0f}",
    "sessions_no_reward": "sessions without a reward {:.0f}",
    "groups_without_signal": "groups without signal {:.0f}",
    "loss": "loss {:.4g}",
    "difference": "difference {:.1e}",
    "off_policy": "off policy {:.1e}",
    "ratio/mean": "ratio {:.3f}",
    "clipped": "clipped {:.1%}",
    "masked": "masked {:.1%}",
    "truncated": "truncated {:.1%}",
    "kl": "KL {:.2g}",
    "entropy": "entropy {:.3f}",
    "tokens_trained": "{:,.0f} tokens trained",
    "left_out": "{:,.0f} left out",
    "forwarded": "{:.0%} of rows forwarded",
    "tokens_per_second": "{:,.0f} tokens/s",
    "peak_memory_gib": "{:.1f} GiB",
    **{f"seconds_{phase}": f"{phase} {{:.1f}} s" for phase in STEP_PARTS},
}
"""Number of a step -> its text in the step's line, in rich's markup."""
_COUNTS = ("sessions_", "groups_", "suspicious", "left_out")
"""Beginnings of the numbers that are shown if they are not 0."""
_SUMS = {
    "clipped": ("clip_ratio/region_mean", "cispo_clip_ratio"),
    "masked": ("masked/low", "masked/high"),
    "truncated": ("truncated/low", "truncated/high"),
}


def append_metrics(path: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Append the metrics of a step, in one write. Raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        file.write(_line({"step": step, **metrics}))


def cut_metrics(path: Path, step: int) -> None:
    """Remove the lines after `step`, and a last line without its end. Raises as `read_metrics`, and
    `OSError`."""
    if not path.exists():
        return
    kept = b""
    for metrics in read_metrics(path):
        if metrics["step"] <= step:
            kept += _line(metrics)
    write_atomically(path, kept.decode())


def _line(values: Mapping[str, Any]) -> bytes:
    return to_json(values, inf_nan_mode="null", fallback=float) + b"\n"


class Phases(TrainerCallback):
    """Logs the seconds that each phase of a step took: `seconds_PHASE`. Phases do not overlap, and
    have no gaps."""

    def __init__(self) -> None:
        self.log: Callable[[Mapping[str, float]], None]
        """`TraceGRPOTrainer.log_metrics`."""
        self._phase = STEP_PARTS[-1]
        self._since = time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Let the time until the end of the block, or of the decorated function, count for a
        phase."""
        outer = self._phase
        self._begin(phase)
        try:
            yield
        finally:
            self._begin(outer)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Begin the first step."""
        self._begin(self._phase)
        self._seconds.clear()

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Log the seconds of the step, and begin the next one, with the time that a checkpoint
        takes."""
        self._begin(self._phase)
        self.log({f"seconds_{phase}": seconds for phase, seconds in self._seconds.items()})
        self._seconds.clear()

    def _begin(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase = phase
        self._since = now


class Reports(TrainerCallback):
    """Reports a training into the folder `run` and on `console` whenever metrics are logged."""

    def __init__(self, run: Path, console: Console) -> None:
        self._run = run
        self._console = console
        self._began = time.monotonic()
        self._first_step = 0

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Remove the lines after the checkpoint: their steps are taken again."""
        self._began = time.monotonic()
        self._first_step = state.global_step
        if state.is_world_process_zero:
            cut_metrics(self._run / METRICS, state.global_step)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        logs: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        """Report a step."""
        is_summary = "train_runtime" in logs  # it comes after the last step
        if is_summary or not state.is_world_process_zero:
            return
        append_metrics(self._run / METRICS, state.global_step, logs)
        line = step_line(state.global_step, state.max_steps, logs)
        taken = state.global_step - self._first_step
        seconds = time.monotonic() - self._began
        left = time_left(seconds, taken, state.max_steps - state.global_step)
        self._console.print(f"{line}  {left}".rstrip(), markup=True)

    def end(self, steps: int) -> None:
        """Say that the training has taken all its steps."""
        took = timedelta(seconds=round(time.monotonic() - self._began))
        line = f"trained {counted(steps, 'step')} in {took}"
        rewards = []
        for metrics in read_metrics(self._run / METRICS):
            if metrics.get("reward") is not None:
                rewards.append(metrics["reward"])
        if rewards:
            line += f", reward {rewards[0]:.3f} at first and {rewards[-1]:.3f} at last"
        self._console.print(line)


def time_left(seconds: float, taken: int, left: int) -> str:
    """Return in words how long the steps that are left take at the pace of those taken; empty if it
    is not known."""
    if taken < 1 or left < 1:
        return ""
    remaining = timedelta(seconds=round(seconds / taken * left))
    return f"about {remaining} left"


def step_line(step: int, steps: int, logs: Mapping[str, Any]) -> str:
    """Return the metrics of a step that a person looks at first, in rich's markup. Those that are
    missing are left out.

    The difference, or `off policy`, is the largest of the means by kind of continuity.
    """
    numbers: dict[str, float] = {}
    for name, value in logs.items():
        if not isinstance(value, int | float):
            continue
        numbers[name] = value
        kind = name.partition("/")[0]
        if kind in ("difference", "off_policy"):
            numbers[kind] = max(value, numbers.get(kind, value))
        elif kind == "left_out":
            numbers[kind] = value + numbers.get(kind, 0)
    for name, parts in _SUMS.items():
        found = [numbers[part] for part in parts if part in numbers]
        if found:
            numbers[name] = sum(found)
    if numbers.get("tokens_in_rows"):
        numbers["forwarded"] = numbers["tokens_forwarded"] / numbers["tokens_in_rows"]
    shown = [f"step {step}/{steps}"]
    for name, text in _SHOWN.items():
        if name in numbers and (numbers[name] or not name.startswith(_COUNTS)):
            shown.append(text.format(numbers[name]).replace("%", " %"))
    return "  ".join(shown)
